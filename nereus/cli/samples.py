"""`nereus job samples`: what a job's model wrote, and what it got for it, fitted to the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from nereus.types import Sample

PROMPT_LETTERS = 240
"""Of a prompt only its end is shown: the examples before it are the same for all."""
_INDENT = 2


def show(samples: Sequence[Sample], console: Console) -> None:
    """Each sample as a header line, the end of its prompt, and its response."""
    for sample in samples:
        console.print(_header(sample))
        console.print(Padding(Text(_end(sample.prompt), style="dim"), (0, 0, 0, _INDENT)))
        console.print(Padding(Text(sample.response.strip() or "(nothing)"), (0, 0, 1, _INDENT)))


def _header(sample: Sample) -> Text:
    """What matters most comes first: a narrow terminal breaks the line."""
    fields = [
        f"reward {sample.reward:.3f}",
        f"{sample.tokens} tok",
        "finished" if sample.finished else "cut off",
        f"prompt {sample.position}",
        f"step {sample.step + 1}",
    ]
    if sample.turns > 1:
        fields.append(f"{sample.turns} turns")
    if len(sample.rewards) > 1:
        fields += [f"{name} {value:.3f}" for name, value in sample.rewards.items()]
    return Text.assemble((fields[0], "bold"), *(f" · {one}" for one in fields[1:]))


def _end(prompt: str) -> str:
    text = prompt.strip()
    return text if len(text) <= PROMPT_LETTERS else f"… {text[-PROMPT_LETTERS:]}"
