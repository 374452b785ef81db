"""Watch a run while it runs, from another terminal or over ssh.

RUN is the folder of a record: what `ampwise run -o RUN` writes to, or a folder of several (ampwise-runs),
of which the newest is taken. If it is not there yet, it is waited for. The run does not notice: files
are read, and nothing is written, locked or sent. When the run has ended, its summary is printed.

Examples:
  ampwise watch ampwise-runs
  ampwise watch RUN --once
  ampwise watch RUN --serve --open
  ampwise watch RUN | tee progress.log

On a terminal the picture changes in place; elsewhere there is a line whenever something changed.
--serve gives a page that updates itself, to browsers on this machine alone, until Ctrl-C. Its address
is secret. From elsewhere: `ssh -L 9000:127.0.0.1:PORT machine`, and the same address with 9000 in it.

Ctrl-C leaves the watcher (exit code 130), never the run. 0: the run has ended, however that was; or
--once has told how it stands. 2: there is no such record, or it could not be read for three minutes.
"""

from __future__ import annotations

import argparse
import sys

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from contextlib import ExitStack

    from ampwise.record.follow import Follower
    from ampwise.record.reader import Run

__all__ = ["add_arguments", "run"]

SHORTEST_S, LONGEST_S = 0.1, 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", metavar="RUN", help="the folder of a record, or of several")
    parser.add_argument("--once", action="store_true", help="tell how it stands, and end")
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=_seconds,
        help="between two looks (default: 1; in a pipe 5, with --serve 2)",
    )
    parser.add_argument(
        "--serve", metavar="PORT", type=_port, nargs="?", const=0, help="a page for browsers on this machine"
    )
    parser.add_argument("--open", action="store_true", help="with --serve: show the page in a browser")


def run(args: argparse.Namespace) -> int:
    from ampwise.errors import BadInput
    from ampwise.live.terminal import show_once, watch

    if not args.record:
        raise BadInput("watch: the name of the record is empty. Name its folder; `.` is the one you are in.")
    if args.open and args.serve is None:
        raise BadInput("--open: there is a page only with --serve; `ampwise report RUN --open` makes one of its own.")
    if args.once and (args.serve is not None or args.interval is not None):
        raise BadInput("--once: it looks once, and goes with neither --serve nor --interval.")
    follower = _follower(args.record, wait=not args.once)
    if args.serve is not None:
        _serve(follower, args.serve, show=args.open, interval_s=args.interval)
    elif args.once:
        show_once(follower, sys.stdout)
    else:
        watch(follower, sys.stdout, interval_s=args.interval)
    return 0


def _follower(record: str, *, wait: bool) -> Follower:
    from pathlib import Path

    from ampwise.live.records import find_record, wait_for_record
    from ampwise.record.follow import Follower

    path = Path(record)
    found = wait_for_record(path, _say) if wait else find_record(path) or path
    if found != path:
        _say(f"{path} is a folder of records: this is the newest, {found.name}")
    return Follower(found)


def _serve(follower: Follower, port: int, *, show: bool, interval_s: float | None) -> None:
    """Until Ctrl-C: a run that has ended is looked at, too."""
    import time
    from contextlib import ExitStack

    from ampwise.live.server import LOOK_S, serve
    from ampwise.live.terminal import has_ended
    from ampwise.printers.terminal import flush, say
    from ampwise.report.page import page, update
    from ampwise.report.verdict import verdict

    interval_s = interval_s or LOOK_S
    opening = ExitStack()

    def live_page(run: Run) -> str:
        opening.close()  # the browser has come: what led it here can go
        return page(run, live=True, every=interval_s)

    server = serve(follower, page=live_page, update=update, port=port, interval_s=interval_s)
    try:
        say("{}", server.address, stream=sys.stdout)
        flush(sys.stdout)
        if show:
            _show(server.address, opening)
        while not has_ended(server.present.run):
            time.sleep(interval_s)
        _say(f"the run has ended: {verdict(server.present.run)}. Its page stays until Ctrl-C")
        while True:
            time.sleep(LONGEST_S)
    finally:
        opening.close()
        server.shutdown()
        server.server_close()


def _show(address: str, opening: ExitStack) -> None:
    """Open a browser; what leads it to the address is there until ``opening`` is closed."""
    from ampwise.live.opening import leading_to
    from ampwise.programs import open_in_browser

    if not open_in_browser(opening.enter_context(leading_to(address))):
        _say("--open: no browser was found here. Open the address yourself")


def _say(text: str) -> None:
    """To the person, not into a pipe."""
    from ampwise.printers.terminal import flush, say

    say("ampwise: {}", text)
    flush(sys.stderr)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not SHORTEST_S <= value <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r}: seconds from {SHORTEST_S} to {LONGEST_S:.0f} are expected")
    return value


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; RUN comes first: `ampwise watch RUN --serve`")
    return int(text)
