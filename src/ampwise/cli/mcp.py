"""Serve coding agents over the Model Context Protocol.

An agent starts it, on stdin and stdout; nothing listens on a network. Its tools are check, fix, explain, advise,
memory, formats, gpu, replay and read_report. They see only the folder it was started in: no other path, and no symlink
that leads out. fix returns a diff unless it is asked to write. Your code is imported or run only with --allow-run,
which adds the tool run, enables replay, and lets advise and memory take MAKE.

Examples:
  pip install "ampwise[mcp]"
  ampwise mcp
  ampwise mcp --root ~/project
  ampwise mcp --allow-run
  claude mcp add ampwise -- ampwise mcp

The exit code is 0 when the agent disconnects, and 2 if the server cannot start: the package mcp is missing or has an
untested version, or the folder does not exist.
"""

from __future__ import annotations

import argparse
import os
import sys

GROUP = "Agents"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allow-run", action="store_true", help="let agents run and import code in the folder")
    parser.add_argument("--root", metavar="DIR", default=".", help="the folder that agents see (default: .)")


def run(args: argparse.Namespace) -> int:
    # Files of the folder must not be imported, and PYTHONPATH may have put it on sys.path. This comes before any other
    # import, since the folder may have a json.py.
    roots = (os.path.realpath("."), os.path.realpath(args.root))
    sys.path[:] = [each for each in sys.path if os.path.realpath(each or ".") not in roots]
    from ampwise.finding.terminal import say
    from ampwise.integrations.mcp_server import serve

    if sys.stdin is not None and sys.stdin.isatty():
        say("ampwise: waiting for an agent on stdin; agents start this command themselves. Ctrl-D ends it")
    serve(args.root, allow_run=args.allow_run)
    return 0
