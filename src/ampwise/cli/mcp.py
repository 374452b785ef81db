"""Serve coding agents over stdin and stdout, by the Model Context Protocol.

An agent starts it; nothing listens on a network. Its tools are the verbs check, fix, explain, advise, memory, formats,
gpu, replay and read_report, and they see the folder it was started in and nothing else: no other path, no link that
leads out. fix answers with a diff unless it is asked to write. No code of yours is imported or run unless you say
--allow-run: then there is also run, replay works, and advise and memory take module:function.

Examples:
  pip install "ampwise[mcp]"
  ampwise mcp
  ampwise mcp --root ~/project
  ampwise mcp --allow-run
  claude mcp add ampwise -- ampwise mcp

The exit code is 0 when the agent has gone, and 2 when it cannot begin: the package mcp is missing or of a version that
was not tested, or there is no such folder.
"""

from __future__ import annotations

import argparse
import os
import sys

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allow-run", action="store_true", help="also run and import code of the folder")
    parser.add_argument("--root", metavar="DIR", default=".", help="the folder that agents see (default: this one)")


def run(args: argparse.Namespace) -> int:
    _forget(args.root)
    from ampwise.integrations.mcp import serve

    if sys.stdin is not None and sys.stdin.isatty():
        from ampwise.printers.terminal import say

        say("ampwise: an agent starts this, and speaks to it on stdin; Ctrl-D ends it")
    serve(args.root, allow_run=args.allow_run)
    return 0


def _forget(root: str) -> None:
    """Take the folder off Python's path, where a PYTHONPATH may have it: its files are not to be imported.

    First of all, since a json.py there would be imported by the next line; and by os alone, which is loaded already.
    """
    real = os.path.realpath
    sys.path[:] = [each for each in sys.path if real(each or ".") not in (real("."), real(root))]
