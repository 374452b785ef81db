"""Watch a run live, in another terminal or a browser.

RUN is the folder that `ampwise run -o RUN` writes to, or a folder of several, of which the newest is taken: by default
ampwise-runs. If it does not exist yet, the command waits for it. The run is not affected: files are only read, nothing
is locked or sent. When the run ends, its summary is printed.

Examples:
  ampwise watch
  ampwise watch RUN --once
  ampwise watch RUN --serve --open
  ampwise watch RUN | tee progress.log

On a terminal the display updates in place; in a pipe, a line is printed for each change. --serve provides a
page that updates itself, only for browsers on this machine, until Ctrl-C. Its address is secret. From another
machine: `ssh -L 9000:127.0.0.1:PORT machine`, then the same address with port 9000.

Ctrl-C stops the watcher, not the run (exit code 130). The exit code is 0 if the run has ended, for whatever
reason, or after --once, and 2 if there is no such record or it could not be read for three minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ampwise.cli._arguments import RUNS
from ampwise.errors import BadInput
from ampwise.finding.terminal import flush, say

if TYPE_CHECKING:
    from ampwise.runs.reader import RecordFollower, Run

GROUP = "Find bugs"
SHORTEST_S, LONGEST_S = 0.1, 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "record",
        metavar="RUN",
        nargs="?",
        default=RUNS,
        help=f"the folder of a record, or of several (default: {RUNS})",
    )
    add("--once", action="store_true", help="print the current state and exit")
    add(
        "--interval",
        metavar="SECONDS",
        type=_seconds,
        help="time between updates (default: 1; in a pipe 5, with --serve 2)",
    )
    add("--serve", metavar="PORT", type=_port, nargs="?", const=0, help="serve a page to browsers on this machine")
    add("--open", action="store_true", help="with --serve: open the page in a browser")


def run(args: argparse.Namespace) -> int:
    from ampwise.report.live.poller import find_record, wait_for_record
    from ampwise.report.live.terminal import show_once, watch
    from ampwise.runs.reader import RecordFollower

    if not args.record:
        raise BadInput("watch: the name of the record is empty. Name its folder; `.` is the current one.")
    if args.open and args.serve is None:
        raise BadInput("--open: needs --serve. For a page without a server: `ampwise report RUN --open`.")
    if args.once and (args.serve is not None or args.interval is not None):
        raise BadInput("--once: cannot be combined with --serve or --interval.")
    path = Path(args.record)
    found = find_record(path) or path if args.once else wait_for_record(path, _say)
    if found != path:
        _say(f"{path} is a folder of records; watching the newest, {found.name}")
    follower = RecordFollower(found)
    if args.serve is not None:
        _serve(follower, args.serve, show=args.open, interval_s=args.interval)
    elif args.once:
        show_once(follower, sys.stdout)
    else:
        watch(follower, sys.stdout, interval_s=args.interval)
    return 0


def _serve(follower: RecordFollower, port: int, *, show: bool, interval_s: float | None) -> None:
    """Serve the page until Ctrl-C, also after the run has ended."""
    from ampwise.hardware.programs import open_in_browser
    from ampwise.report.live.server import LOOK_S, redirect_page, serve
    from ampwise.report.live.terminal import has_ended
    from ampwise.report.page import page, update
    from ampwise.report.verdict import verdict

    interval_s = interval_s or LOOK_S
    opening = ExitStack()

    def live_page(run: Run) -> str:
        opening.close()  # the browser is here: the redirect to the secret address is no longer needed
        return page(run, live=True, every=interval_s)

    server = serve(follower, page=live_page, update=update, port=port, interval_s=interval_s)
    try:
        say("{}", server.address, stream=sys.stdout)
        flush(sys.stdout)
        if show and not open_in_browser(opening.enter_context(redirect_page(server.address))):
            _say("--open: no browser found. Open the address yourself")
        while not has_ended(server.present.run):
            time.sleep(interval_s)
        _say(f"the run has ended: {verdict(server.present.run)}. The page stays up until Ctrl-C")
        while True:
            time.sleep(LONGEST_S)
    finally:
        opening.close()
        server.shutdown()
        server.server_close()


def _say(text: str) -> None:
    say("ampwise: {}", text)
    flush(sys.stderr)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not SHORTEST_S <= value <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"expected {SHORTEST_S} to {LONGEST_S:.0f} seconds, got {text!r}")
    return value


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; RUN comes first: `ampwise watch RUN --serve`")
    return int(text)
