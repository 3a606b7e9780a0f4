"""A reward model for the questions of a job file: the job's own actor with one output instead of the vocabulary.

    python examples/reward_model.py examples/ppo.yaml FOLDER

The new output is fitted by logistic regression to tell a right answer from a wrong one at the last token; the rest of
the model stays as it is. FOLDER is a Hugging Face sequence classifier with one label.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from nereus.cluster.config import default_data_dir
from nereus.cluster.state import ClusterFolder
from nereus.models import with_local_models
from nereus.spec_file import load_spec
from nereus_common.engines.tokenizer import ChatTokenizer
from nereus_common.rl.prompts import OrderedPrompts

OTHER_WORDS = ("The", "I", "word", "letters", "None")
"""Wrong answers that are no answers at all: what an untrained model may say."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=400)
    chosen = parser.parse_args()
    spec = with_local_models(load_spec(chosen.job), ClusterFolder(default_data_dir()).models)
    actor = Path(spec.model("actor").path)
    tokenizer = ChatTokenizer(actor)
    prompts = OrderedPrompts(spec.prompts.open(spec.seed, spec.evaluation.size), tokenizer, spec.seed)
    config = AutoConfig.from_pretrained(actor, num_labels=1, pad_token_id=tokenizer.eos_token_id)
    model = AutoModelForSequenceClassification.from_pretrained(actor, config=config, dtype=torch.bfloat16).eval()
    examples = list(labelled(prompts, AutoTokenizer.from_pretrained(actor), chosen.questions, spec.seed))
    states = torch.stack([last_state(model, ids) for ids, _ in examples])
    labels = torch.tensor([float(right) for _, right in examples])
    weight = fit(states, labels)
    scores = states @ weight
    ranked = (scores[labels == 1][:, None] > scores[labels == 0][None, :]).float().mean()
    with torch.no_grad():
        model.score.weight.copy_(weight[None])
    model.save_pretrained(chosen.folder)
    AutoTokenizer.from_pretrained(actor).save_pretrained(chosen.folder)
    print(f"{chosen.folder}: a right answer is scored above a wrong one in {float(ranked):.1%} of pairs")


def labelled(
    prompts: OrderedPrompts, tokenizer: AutoTokenizer, questions: int, seed: int
) -> Iterator[tuple[list[int], bool]]:
    """Prompts with one right and one wrong answer each, as the sampler would have ended them."""
    dice = random.Random(seed)
    asked = prompts.batch(range(questions))
    answers = sorted({prompt.question.answer for prompt in asked})
    for prompt in asked:
        right = prompt.question.answer
        wrong = dice.choice([other for other in (*answers, *OTHER_WORDS) if other != right])
        for answer in (right, wrong):
            ids = tokenizer(answer, add_special_tokens=False).input_ids
            yield [*prompt.token_ids, *ids, tokenizer.eos_token_id], answer == right


@torch.no_grad()
def last_state(model: torch.nn.Module, ids: list[int]) -> Tensor:
    """[H] what the output layer sees at the last token."""
    return model.model(torch.tensor([ids])).last_hidden_state[0, -1].float()


def fit(states: Tensor, labels: Tensor, penalty: float = 1e-2) -> Tensor:
    """[H] weights of a logistic regression on standardised features; there is no intercept, as the head has none."""
    centred = states - states.mean(0)
    scale = centred.std(0) + 1e-6
    features = centred / scale
    weight = torch.zeros(states.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(features @ weight, labels)
        (loss + penalty * weight.square().sum()).backward()
        return loss

    optimizer.step(closure)
    return (weight / scale).detach()


if __name__ == "__main__":
    main()
