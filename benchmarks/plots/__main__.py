"""See the package."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.plots import __doc__ as about
from benchmarks.plots import plot


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=about)
    parser.add_argument("result", type=Path, help="what --json of a benchmark wrote")
    parser.add_argument("out", type=Path, help="the picture")
    options = parser.parse_args(arguments)
    plot(json.loads(options.result.read_text()), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
