"""Run one benchmark, or all: `python -m benchmarks NAME [--json FILE]`, `python -m benchmarks --all`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.report import BENCHMARKS, TINY, measure


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", choices=sorted(BENCHMARKS), help="which one to run")
    parser.add_argument("--all", action="store_true", help="run every benchmark, one after another")
    parser.add_argument("--tiny", action="store_true", help="only see whether it runs: its numbers mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as well")
    options = parser.parse_args(arguments)
    if bool(options.name) == options.all:
        parser.error(f"name one of {', '.join(sorted(BENCHMARKS))}, or give --all")
    if options.tiny and options.name not in TINY:
        parser.error(f"--tiny goes with {', '.join(sorted(TINY))}")
    names = sorted(BENCHMARKS) if options.all else [options.name]
    command = ["python", "-m", "benchmarks", *arguments]
    reports = [measure(name, command, tiny=options.tiny) for name in names]
    text = json.dumps(reports if options.all else reports[0], indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
