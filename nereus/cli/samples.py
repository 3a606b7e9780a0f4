"""`nereus job samples`: what a job's model wrote, and what it got for it, fitted to the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from nereus.types import Sample

PROMPT_LETTERS = 200
"""Of a prompt only its end is shown: what stands before it is mostly the same for all."""
_INDENT, _RESPONSE = "  ", "> "
"""Before each line; the second marks what the model wrote."""


def show(samples: Sequence[Sample], console: Console) -> None:
    """Each sample as a header line, the end of its prompt, and its response."""
    for number, sample in enumerate(samples):
        if number:
            console.print()
        console.print(_header(sample))
        if len(sample.rewards) > 1:
            parts = ", ".join(f"{name} {value:.3f}" for name, value in sample.rewards.items())
            _print_indented(Text(parts), console)
        _print_indented(Text(_end(sample.prompt), style="dim"), console)
        _print_indented(Text(sample.response.strip() or "(nothing)"), console, _RESPONSE)


def _header(sample: Sample) -> Text:
    """What matters most comes first: a narrow terminal breaks the line."""
    fields = [
        f" · {sample.tokens} tok",
        " · finished" if sample.finished else " · cut off",
        f" · {sample.turns} turns" if sample.turns > 1 else "",
        f" · prompt {sample.position}",
        f" · step {sample.step + 1}",
    ]
    return Text.assemble((f"reward {sample.reward:.3f}", "bold"), *fields)


def _print_indented(text: Text, console: Console, before: str = _INDENT) -> None:
    for line in text.wrap(console, console.width - len(before)):
        line.rstrip()
        console.print(Text.assemble(before, line), soft_wrap=True)


def _end(prompt: str) -> str:
    text = prompt.strip()
    return text if len(text) <= PROMPT_LETTERS else f"… {text[-PROMPT_LETTERS:].lstrip()}"
