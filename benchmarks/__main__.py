"""Run one benchmark, or all: `python -m benchmarks NAME [--json FILE]`, `python -m benchmarks --all`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.report import BENCHMARKS, measure


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", choices=sorted(BENCHMARKS), help="which one to run")
    parser.add_argument("--all", action="store_true", help="run every benchmark, one after another")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as well")
    options = parser.parse_args(arguments)
    if bool(options.name) == options.all:
        parser.error(f"name one of {', '.join(sorted(BENCHMARKS))}, or give --all")
    names = sorted(BENCHMARKS) if options.all else [options.name]
    reports = [measure(name, ["python", "-m", "benchmarks", *arguments]) for name in names]
    text = json.dumps(reports if options.all else reports[0], indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
