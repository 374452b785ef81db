"""Built-in alerts: a web hook, a command, stderr. Each is a function that takes a finding."""

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
from ampwise.finding.strict_json import to_json_types
from ampwise.finding.terminal import flush, printable, write
from ampwise.hardware.programs import find_program

__all__ = ["HELD_BACK", "Alert", "command", "stderr", "webhook"]

Alert = Callable[[Finding], object]

HELD_BACK = (
    "held_back"  # key in a finding's evidence: how many findings of this rule were held back since the last one sent
)
BACKOFF_S = 1.0  # before the first retry; doubles with each further one
LONGEST_WAIT_S = 60.0  # even if the server's Retry-After is longer


def webhook(url: str, *, timeout: float = 10.0, retries: int = 3, format: Literal["json", "slack"] = "json") -> Alert:
    """Return an alert that posts each finding to a URL, as JSON or as a Slack-compatible message.

    It retries if the server is unreachable, overloaded or failing, but not if the server refuses the request.
    Redirects are not followed. timeout: seconds for each try.
    """
    where = _checked_address(url)
    body = {"json": _as_json, "slack": _for_slack}.get(format)
    if body is None:
        raise BadInput(f"webhook(format={format!r}): expected 'json' or 'slack'.")
    if not timeout > 0 or retries < 0:
        raise BadInput(f"webhook(timeout={timeout!r}, retries={retries!r}): expected timeout > 0 and retries >= 0.")
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
    """Return an alert that runs a program for each finding, with the finding as JSON on stdin; no shell is used."""
    if isinstance(arguments, str | bytes) or not arguments or not all(isinstance(part, str) for part in arguments):
        raise BadInput(f"command({arguments!r}): expected a list of the program and its arguments: ['notify', '-u'].")
    program = find_program(arguments[0])
    if program is None:
        raise BadInput(f"command({list(arguments)!r}): program {arguments[0]!r} not found.")
    line = [program, *arguments[1:]]

    def run(finding: Finding) -> None:
        with tempfile.TemporaryFile() as output:  # not a pipe: a process it leaves running would hold that open
            try:
                done = subprocess.run(
                    line,
                    input=_as_json(finding),
                    stdout=subprocess.DEVNULL,
                    stderr=output,
                    timeout=timeout,
                    check=False,
                    start_new_session=True,  # Ctrl-C is for the training
                )
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"it took longer than {timeout:g} s and was killed") from None
            if done.returncode:
                raise OSError(f"exit code {done.returncode}{_last_line(output)}")

    return _named(run, f"command({arguments[0]})")  # its arguments may hold secrets


def stderr() -> Alert:
    """Return an alert that writes each finding to standard error, with its fix."""

    def write_finding(finding: Finding) -> None:
        shown = str(finding.but(message=f"{finding.message}{_more(finding)}"))  # printable except for newlines
        write("".join(("ampwise: ", finding.severity, ": ", shown, "\n")), sys.stderr)
        flush(sys.stderr)

    return _named(write_finding, "stderr()")


def _named(alert: Callable[[Finding], None], name: str) -> Alert:
    alert.__qualname__ = alert.__name__ = name
    return alert


# Request bodies


def _as_json(finding: Finding) -> bytes:
    return json.dumps(to_json_types(finding.as_dict()), allow_nan=False).encode()


def _for_slack(finding: Finding) -> bytes:
    head = f"*{finding.severity}: {finding.rule.code} {finding.rule.name}* {finding.place}"
    lines = [head, f"{finding.message}{_more(finding)}", *finding.fix.split("\n")]
    # Slack interprets <!channel> and <http://...|text>.
    text = "\n".join(map(printable, lines)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return json.dumps({"text": text}).encode()


def _more(finding: Finding) -> str:
    held = finding.evidence.get(HELD_BACK)
    return f" ({held:,} more of this rule since the last one sent)" if held else ""


# Posting


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> NoReturn:
        fp.close()
        to = urllib.parse.urlsplit(newurl)
        raise _Refused(
            f"the server redirects to {to.scheme}://{to.netloc}, and redirects are not followed; give that address"
        )


class _Refused(OSError):
    """An error for which a retry is useless."""


def _checked_address(url: str) -> str:
    """Check a URL and return its scheme and host, which may be printed: the path is often a secret."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except (ValueError, AttributeError):
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise BadInput("webhook(url): expected an http or https address such as 'https://example.org/hook'.")
    if parts.username is not None or any(character.isspace() or not character.isprintable() for character in url):
        raise BadInput("webhook(url): expected an address without a user name, spaces or control characters.")
    return f"{parts.scheme}://{parts.netloc}"


def _with_retries(post: Callable[[], None], retries: int) -> None:
    for attempt in range(retries + 1):
        try:
            return post()
        except (OSError, HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            if attempt == retries or not _is_temporary(error):
                raise
            time.sleep(min(_retry_after_s(error) or BACKOFF_S * 2**attempt, LONGEST_WAIT_S))
    return None


def _is_temporary(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= HTTPStatus.INTERNAL_SERVER_ERROR or error.code == HTTPStatus.TOO_MANY_REQUESTS
    return not isinstance(error, _Refused)


def _retry_after_s(error: Exception) -> float | None:
    value = error.headers.get("Retry-After", "") if isinstance(error, urllib.error.HTTPError) else ""
    return float(value) if value.isascii() and value.isdigit() and len(value) < 9 else None


def _last_line(output: Any) -> str:
    output.seek(0, os.SEEK_END)
    output.seek(max(0, output.tell() - 2000))
    lines = output.read().decode("utf-8", "replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""
