"""What an alert can be, beside a function of one's own: a web hook, a command, stderr. Each takes a finding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, Literal, NoReturn

from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.printers.terminal import flush, printable, write
from ampwise.programs import find_program
from ampwise.strict_json import plain

__all__ = ["HELD_BACK", "Alert", "command", "stderr", "webhook"]

Alert = Callable[[Finding], object]

HELD_BACK = "held_back"  # in a finding's evidence: how many like it came since the last that was sent
BACKOFF_S = 1.0  # before the first retry, twice as much before each further one
LONGEST_WAIT_S = 60.0  # whatever a server asks for


def webhook(url: str, *, timeout: float = 10.0, retries: int = 3, format: Literal["json", "slack"] = "json") -> Alert:
    """Posts each finding to an address: as JSON, or as a message for Slack and what understands the same.

    A server that is away, overloaded or failing is tried again, one that refuses is not. It may not send us on to
    another address. timeout: seconds for each try.
    """
    where = _checked_address(url)
    body = {"json": _as_json, "slack": _for_slack}.get(format)
    if body is None:
        raise BadInput(f"webhook(format={format!r}): there are 'json' and 'slack'.")
    if not timeout > 0 or retries < 0:
        raise BadInput(
            f"webhook(timeout={timeout!r}, retries={retries!r}): a time above 0 and no fewer than 0 retries."
        )
    opener = urllib.request.build_opener(_NoRedirects)

    def post(finding: Finding) -> None:
        request = urllib.request.Request(
            url,
            data=body(finding),
            headers={"Content-Type": "application/json", "User-Agent": "ampwise"},
            method="POST",
        )
        _with_retries(lambda: opener.open(request, timeout=timeout).close(), retries)

    return _named(post, f"webhook({where})")


def command(arguments: Sequence[str], *, timeout: float = 30.0) -> Alert:
    """Runs a program for each finding, with the finding as JSON on its standard input; no shell is involved."""
    if isinstance(arguments, str | bytes) or not arguments or not all(isinstance(part, str) for part in arguments):
        raise BadInput(
            f"command({arguments!r}): a list of the program and its arguments is expected: ['notify', '-u']."
        )
    program = find_program(arguments[0])
    if program is None:
        raise BadInput(f"command({list(arguments)!r}): there is no program {arguments[0]!r} that could be run.")
    line = [program, *arguments[1:]]

    def run(finding: Finding) -> None:
        with tempfile.TemporaryFile() as said:  # no pipe: whatever it leaves running would hold that open
            try:
                done = subprocess.run(
                    line,
                    input=_as_json(finding),
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    timeout=timeout,
                    check=False,
                    start_new_session=True,  # Ctrl-C is for the training
                )
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"it took longer than {timeout:g} s, and was ended") from None
            if done.returncode:
                raise OSError(f"exit code {done.returncode}{_last_line(said)}")

    return _named(run, f"command({arguments[0]})")  # its arguments may hold secrets


def stderr() -> Alert:
    """Writes each finding to standard error, with its fix."""

    def tell(finding: Finding) -> None:
        shown = str(finding.but(message=f"{finding.message}{_more(finding)}"))  # printable, but for its own newlines
        write("".join(("ampwise: ", finding.severity, ": ", shown, "\n")), sys.stderr)
        flush(sys.stderr)

    return _named(tell, "stderr()")


def _named(alert: Callable[[Finding], None], name: str) -> Alert:
    alert.__qualname__ = alert.__name__ = name
    return alert


# Bodies


def _as_json(finding: Finding) -> bytes:
    return json.dumps(plain(finding.as_dict()), allow_nan=False).encode()


def _for_slack(finding: Finding) -> bytes:
    head = f"*{finding.severity}: {finding.rule.code} {finding.rule.name}* {finding.place}"
    lines = [head, f"{finding.message}{_more(finding)}", *finding.fix.split("\n")]
    # Slack reads <!channel> and <http://...|text> as more than text.
    text = "\n".join(map(printable, lines)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return json.dumps({"text": text}).encode()


def _more(finding: Finding) -> str:
    held = finding.evidence.get(HELD_BACK)
    return f" ({held:,} more like it since the last that was sent)" if held else ""


# Posting


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> NoReturn:
        fp.close()
        to = urllib.parse.urlsplit(newurl)
        raise _Refused(f"the server sends us on to {to.scheme}://{to.netloc}, which is not followed; give that address")


class _Refused(OSError):
    """There is no use in trying again."""


def _checked_address(url: str) -> str:
    """The scheme and the host, which may be shown: the rest of such an address is often a secret."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except (ValueError, AttributeError):
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise BadInput("webhook(url): an address such as 'https://example.org/hook' is expected, http or https.")
    if parts.username is not None or any(sign.isspace() or not sign.isprintable() for sign in url):
        raise BadInput("webhook(url): an address without a user's name, blanks and control characters is expected.")
    return f"{parts.scheme}://{parts.netloc}"


def _with_retries(post: Callable[[], None], retries: int) -> None:
    for attempt in range(retries + 1):
        try:
            return post()
        except (OSError, HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            if attempt == retries or not _may_pass(error):
                raise
            time.sleep(min(_asked_wait_s(error) or BACKOFF_S * 2**attempt, LONGEST_WAIT_S))
    return None


def _may_pass(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= HTTPStatus.INTERNAL_SERVER_ERROR or error.code == HTTPStatus.TOO_MANY_REQUESTS
    return not isinstance(error, _Refused)


def _asked_wait_s(error: Exception) -> float | None:
    asked = error.headers.get("Retry-After", "") if isinstance(error, urllib.error.HTTPError) else ""
    return float(asked) if asked.isascii() and asked.isdigit() and len(asked) < 9 else None


def _last_line(said: Any) -> str:
    said.seek(0, os.SEEK_END)
    said.seek(max(0, said.tell() - 2000))
    lines = said.read().decode("utf-8", "replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""
