"""HTTP server for the live page of a growing record, on the loopback interface only.

It serves only the page and its updates. The address contains a random token, so that other users of the machine cannot
guess it. The Host header must be a loopback name, which prevents DNS rebinding: a page from elsewhere cannot read it
through its own domain name. The port is not checked, because ssh may forward another one.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import shutil
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from html import escape
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ampwise.errors import BadInput
from ampwise.finding.strict_json import dumps
from ampwise.report.live.poller import PAUSE_FACTOR, RecordPoller
from ampwise.runs.reader import RecordFollower, Run

HOST = "127.0.0.1"  # never another interface
LOOK_S = 2.0  # between two reads of the record, however many clients there are; also the page's polling interval
PATIENCE_S = 0.5  # wait for a new page; after that the client gets the previous one
CLIENT_S = 20.0  # for a client to send the token, and socket timeout after that
MOST_STRANGERS = 64  # concurrent clients that have not sent the token
MOST_REQUEST_BYTES = 131_072  # bytes of a request
LOOPBACK_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
CONTENT_TYPES = {
    "": "text/html; charset=utf-8",
    "update": "application/json; charset=utf-8",
}  # by the last part of a path

HEADERS = {
    # Allows every page of ours; each page restricts its scripts further.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; font-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",  # the address is a secret
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

REDIRECT = """\
<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={address}">
<title>ampwise</title>
<p><a href="{address}">The page of the run</a></p>
"""


def serve(
    follower: RecordFollower,
    *,
    page: Callable[[Run], str],
    update: Callable[[Run], dict[str, Any]],
    port: int = 0,
    interval_s: float = LOOK_S,
) -> LiveServer:
    """Start a server in background threads and return it; ``port`` 0 chooses a free one."""
    present = PageCache(follower, {"": page, "update": lambda run: dumps(update(run), indent=None)}, interval_s)
    try:
        server = LiveServer(present, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"--serve {port}: cannot use this port of {HOST}: {reason}. --serve without a number chooses a free one."
        ) from error
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
    return server


class PageCache:
    """Pages of the current run, shared by all clients: one thread reads the record and renders for all.

    Only the first client waits for rendering. For a large run, rendering takes seconds: it happens in the background,
    clients get the previous result until then, and a pause follows, so that a training on this machine is not slowed.
    """

    def __init__(
        self, follower: RecordFollower, renderers: dict[str, Callable[[Run], str]], interval_s: float = LOOK_S
    ) -> None:
        self._looking = RecordPoller(follower)
        self._renderers, self._interval_s = renderers, interval_s
        self._work = threading.Lock()  # one thread reads or renders at a time
        self._look_due = time.monotonic() + interval_s
        self._render_due = 0.0
        self._alive = self._looking.run.alive  # not part of the record
        self._version = 1
        self._made: dict[str, tuple[int, bytes | Exception]] = {}
        self._starting = threading.Lock()
        self._renewal: threading.Thread | None = None

    @property
    def run(self) -> Run:
        """The run, at most one interval old."""
        with self._work:
            self._look()
            return self._looking.run

    @property
    def version(self) -> int:
        """Number that changes whenever the run does."""
        with self._work:
            self._look()
            return self._version

    def made(self, what: str) -> tuple[int, bytes]:
        """Return the version and text of the page or its update; raise the error that rendering has raised."""
        now = time.monotonic()
        if what not in self._made:
            self._renew(what)
        elif now >= self._look_due or (self._made[what][0] != self._version and now >= self._render_due):
            with self._starting:
                if self._renewal is None or not self._renewal.is_alive():
                    self._renewal = threading.Thread(target=self._renew, args=(what,), daemon=True)
                    self._renewal.start()
            self._renewal.join(PATIENCE_S)
        version, text = self._made[what]
        if isinstance(text, Exception):
            raise text
        return version, text

    def _renew(self, what: str) -> None:
        with self._work:
            try:
                self._look()
                began = time.monotonic()
                is_due = what not in self._made or began >= self._render_due
                if is_due and self._made.get(what, (0,))[0] != self._version:
                    try:
                        text = self._renderers[what](self._looking.run).encode("utf-8", "backslashreplace")
                        self._made[what] = self._version, text
                    finally:
                        self._render_due = time.monotonic() + PAUSE_FACTOR * (time.monotonic() - began)
            except Exception as error:  # reported to the client, and tried again
                self._made[what] = 0, error

    def _look(self) -> None:
        if time.monotonic() < self._look_due:
            return
        began, before = time.perf_counter(), self._looking.run
        run = self._looking.look()
        if run is not before or run.alive != self._alive:
            self._alive, self._version = run.alive, self._version + 1
        self._look_due = time.monotonic() + max(self._interval_s, PAUSE_FACTOR * (time.perf_counter() - began))


class LiveServer(ThreadingHTTPServer):
    """HTTP server on loopback with a secret address."""

    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # on Windows others could take the port, too
    request_queue_size = 32

    def __init__(self, present: PageCache, port: int = 0) -> None:
        self.present = present
        self.token = secrets.token_urlsafe(16)
        self._strangers: dict[socket.socket, float] = {}  # time of connection, oldest first
        self._strangers_lock = threading.Lock()
        super().__init__((HOST, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer.server_bind would do a DNS lookup and wait for it.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, int(self.server_address[1])

    @property
    def address(self) -> str:
        """URL for a browser."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or send invalid requests, instead of printing to the terminal."""

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread. Clients without the token have limited time, and the oldest is cut if there are many."""
        with self._strangers_lock:
            self._strangers[request] = time.monotonic()
            if len(self._strangers) > MOST_STRANGERS:
                self._cut(next(iter(self._strangers)))
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Disconnect clients that took too long to send the token, even if they keep sending."""
        with self._strangers_lock:
            for request in [each for each, came in self._strangers.items() if time.monotonic() - came > CLIENT_S]:
                self._cut(request)

    def accept(self, request: Any) -> None:
        """Lift the time limit for a client that has sent the token or has been answered."""
        with self._strangers_lock:
            self._strangers.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.accept(request)
        super().shutdown_request(request)

    def _cut(self, request: socket.socket) -> None:
        del self._strangers[request]
        with contextlib.suppress(OSError):  # already disconnected
            request.shutdown(socket.SHUT_RDWR)  # wakes its thread


class _LimitedRequest:
    """Request stream with a limit on the bytes that are read."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, MOST_REQUEST_BYTES

    def readline(self, size: int = -1) -> bytes:
        line: bytes = self._file.readline(self._left + 1 if size < 0 else min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("request")
        return line

    def close(self) -> None:
        self._file.close()


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = CLIENT_S
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = "text/plain; charset=utf-8"

    def setup(self) -> None:
        super().setup()
        self.rfile = _LimitedRequest(self.rfile)  # type: ignore[assignment]

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _refuse_method(self) -> None:
        if self._check_host() and self._requested_part() is not None:
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this address is read-only", Allow="GET, HEAD")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse_method  # noqa: N815 (names that http.server requires)

    def _answer(self, *, with_body: bool) -> None:
        part = self._requested_part() if self._check_host() else None
        if part is None:
            return
        try:
            version, text = self.server.present.made(part)
        except Exception as error:  # the next version of the record may work
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"this record cannot be shown: {type(error).__name__}")
            return
        tag = f'"{version}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, ETag=tag)
            return
        length = str(len(text))
        self._send(HTTPStatus.OK, **{"Content-Type": CONTENT_TYPES[part], "Content-Length": length, "ETag": tag})
        if with_body:
            self.wfile.write(text)

    def _refuse(self, status: HTTPStatus, why: str, **headers: str) -> None:
        text = f"{status.value} {why}\n".encode()
        self._send(status, **headers, **{"Content-Type": self.error_content_type, "Content-Length": str(len(text))})
        if self.command != "HEAD":
            self.wfile.write(text)

    def _send(self, status: HTTPStatus, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _check_host(self) -> bool:
        """Check the Host header; if it is wrong, answer with an error and return False."""
        hosts = [host.strip() for host in self.headers.get_all("Host") or []]
        if len(hosts) == 1 and LOOPBACK_HOST.fullmatch(hosts[0]):
            return True
        self._refuse(HTTPStatus.FORBIDDEN, f"use {HOST} or localhost as the host")
        return False

    def _requested_part(self) -> str | None:
        """Return the part of the path after the token; if it is wrong, answer with an error and return None."""
        token, slash, what = self.path.partition("?")[0].removeprefix("/").partition("/")
        known = hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        if known:
            self.server.accept(self.request)
        if known and slash and what in CONTENT_TYPES:
            return what
        if known and not slash:  # the slash is easily lost when an address is copied
            self._send(HTTPStatus.PERMANENT_REDIRECT, Location=f"/{token}/", **{"Content-Length": "0"})
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "not found: copy the whole address that `ampwise watch` printed")
        return None

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        return "ampwise"

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log: it would contain the token."""


# --- opening a browser ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def redirect_page(address: str) -> Iterator[str]:
    """Yield the file:// address of a page that redirects to the secret ``address``; the file is removed at the end.

    Every user of the machine can read the browser's command line, so that has only the name of a private file.
    """
    # A folder that only this user can read, in the home folder, with a name without a dot: a browser installed as a
    # snap can read nothing else.
    places = (os.path.expanduser("~"), os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir())  # noqa: PTH111
    for place in filter(os.path.isabs, places):
        try:
            folder = Path(tempfile.mkdtemp(prefix="ampwise-open-", dir=place))  # of mode 0700
            break
        except OSError:
            continue
    else:
        raise BadInput(f"--open: none of {', '.join(places)} is writable. Open the address yourself.")
    try:
        page = folder / "open.html"
        page.touch(mode=0o600, exist_ok=False)
        page.write_text(REDIRECT.format(address=escape(address)), encoding="utf-8")
        yield page.as_uri()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
