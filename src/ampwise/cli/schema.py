"""Print the JSON Schema of what a command prints with --json.

Without NAME it lists the schemas. A name is that of the command; `ampwise report A B` has "comparison", a
list of runs has "runs", and `ampwise replay` prints the same as `ampwise check`. An object says the version of its
schema under "version"; arrays are of version 1. Within a version nothing is renamed or removed.

Examples:
  ampwise schema
  ampwise schema bench
  ampwise schema bench | jq '.properties | keys'

The exit code is 0, or 2 for an unknown name.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ampwise.errors import UnknownName
from ampwise.finding.terminal import write

GROUP = "Look up"
SCHEMAS = Path(__file__).parent / "_schemas"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="a schema, such as check or bench (default: list them)")


def run(args: argparse.Namespace) -> int:
    names = sorted(file.stem for file in SCHEMAS.glob("*.json"))
    if args.name is None:
        write("".join(f"{name}\n" for name in names), sys.stdout)
    elif args.name not in names:
        raise UnknownName("schema", args.name, names, listing="`ampwise schema` lists them.")
    else:
        write((SCHEMAS / f"{args.name}.json").read_text(encoding="utf-8"), sys.stdout)
    return 0
