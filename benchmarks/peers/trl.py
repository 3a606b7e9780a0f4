"""One job under TRL's GRPOTrainer: `python -m benchmarks.peers.trl CONFIG JOB RESULT`, in a process of its own.

CONFIG names a set-up in this folder, JOB is a file with our job as JSON (the model a folder), RESULT is written as
JSON: the moments at which steps ended, lengths and rewards step by step, the peak of memory, the versions.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.peers.config import TrlConfig, grpo_arguments, trl_config
from nereus.spec import JobSpec
from nereus_common.core.errors import DeadlineExceeded, InvalidInput, ProcessLost
from nereus_common.rl.order import step_positions
from nereus_common.rl.prompts import OrderedPrompts, QuestionSet, chat
from nereus_common.rl.rewards import RewardInput, load_reward

TIMEOUT = 3600.0
_LOGGED = {
    "reward": "reward_mean",
    "completions/mean_length": "response_length_mean",
    "completions/clipped_ratio": "clipped_fraction",
}


def run_trl(name: str, job: JobSpec, *, timeout: float = TIMEOUT) -> dict[str, Any]:
    """The result of `job` under set-up `name`. ProcessLost with the end of its output, or DeadlineExceeded."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment |= {"HF_HUB_OFFLINE": "1", **trl_config(name).environment}
    with TemporaryDirectory(prefix="nereus-trl-") as path:
        folder = Path(path)
        (folder / "job.json").write_text(job.to_json())
        files = [str(folder / "job.json"), str(folder / "result.json")]
        command = [sys.executable, "-m", "benchmarks.peers.trl", name, *files]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired as late:
            raise DeadlineExceeded(f"{name} did not finish within {timeout:g} s") from late
        if done.returncode:
            raise ProcessLost(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}", process=name)
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result


def main(arguments: list[str]) -> int:
    name, job_file, result_file = arguments
    job = JobSpec.from_json(Path(job_file).read_text(), job_file)
    Path(result_file).write_text(json.dumps(_train(trl_config(name), job)))
    return 0


def _train(peer: TrlConfig, job: JobSpec) -> dict[str, Any]:
    import torch
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    if peer.threads:
        torch.set_num_threads(peer.threads)
    model = job.model("actor").path
    clock = _clock()
    with TemporaryDirectory(prefix="nereus-trl-out-") as out:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[_reward(entry.name) for entry in job.rewards],
            args=GRPOConfig(output_dir=out, model_init_kwargs=peer.model or None, **grpo_arguments(job, peer)),
            train_dataset=_prompts(job, AutoTokenizer.from_pretrained(model)),
            callbacks=[clock],
        )
        trainer.train()
    return {
        "ends": clock.ends,
        **clock.logged,
        "threads": torch.get_num_threads(),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "versions": {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")},
    }


def _clock() -> Any:
    """A trainer callback that notes when steps end and what is logged of them."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.ends: list[float] = []
            self.logged: dict[str, list[float]] = {ours: [] for ours in _LOGGED.values()}

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.monotonic())

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **__: Any) -> None:
            for theirs, ours in _LOGGED.items():
                if theirs in logs:
                    self.logged[ours].append(float(logs[theirs]))

    return Clock()


def _prompts(job: JobSpec, tokenizer: Any) -> Any:
    """The prompts of all steps in our order, as chats: InvalidInput should TRL's rendering give other token ids."""
    from datasets import Dataset

    from nereus_common.engines.tokenizer import ChatTokenizer

    questions: QuestionSet = job.prompts.open(job.seed, job.evaluation.size)
    ordered = OrderedPrompts(questions, ChatTokenizer(Path(job.model("actor").path)), job.seed)
    rows = []
    for step in range(job.steps):
        for prompt in ordered.batch(step_positions(step, job.algorithm.groups_per_step)):
            messages = chat(prompt.question, questions.examples, questions.system)
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            if tuple(ids) != prompt.token_ids:
                raise InvalidInput(f"TRL would see other tokens of prompt {prompt.position}", field="prompts")
            rows.append({"prompt": messages, "question": prompt.question.text, "answer": prompt.question.answer})
    return Dataset.from_list(rows)


def _reward(name: str) -> Callable[..., list[float]]:
    """One of our rewards as TRL calls them."""
    reward = load_reward(name)

    def score(completions: list[Any], question: list[str], answer: list[str], **_: Any) -> list[float]:
        return [
            float(reward(RewardInput(0, 0, asked, reply[-1]["content"], right)))
            for reply, asked, right in zip(completions, question, answer, strict=True)
        ]

    score.__name__ = name.rsplit(":", 1)[-1]
    return score


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
