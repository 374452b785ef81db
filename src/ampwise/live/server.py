"""A page on this machine's loopback, for who knows its address: what it shows comes from the record as it grows.

Nothing is served but the page and its updates. The address holds a random token, so that no other user of the machine
guesses it; the Host header has to be ours, so that no page from elsewhere reads it through a name that it points here.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socketserver
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from ampwise.errors import BadInput
from ampwise.strict_json import dumps

if TYPE_CHECKING:
    from ampwise.record.follow import Follower
    from ampwise.record.reader import Run

__all__ = ["HOST", "Present", "Server", "serve"]

HOST = "127.0.0.1"  # and nothing else, ever
LOOK_S = 1.0  # at most so often is the record looked at, however many ask
WEB = 80  # the port that browsers leave out
CLIENT_S = 20.0  # that a client may take for a line
KINDS = {"": "text/html; charset=utf-8", "update": "application/json; charset=utf-8"}  # by the last part of a path

HEADERS = {
    # Wide enough for any page of ours, which says in itself more closely which script it runs.
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


def serve(
    follower: Follower,
    *,
    page: Callable[[Run], str],
    update: Callable[[Run], dict[str, Any]],
    port: int = 0,
) -> Server:
    """A server that answers already, in threads of its own; ``port`` 0 takes a free one."""
    present = Present(follower, {"": page, "update": lambda run: dumps(update(run), indent=None)})
    try:
        server = Server(present, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"--serve {port}: that port of {HOST} cannot be had: {reason}. --serve without a number takes a free one."
        ) from error
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
    return server


class Present:
    """The run as it stands, for many who ask at the same time: one looks, one makes, all get the same."""

    def __init__(self, follower: Follower, makers: dict[str, Callable[[Run], str]]) -> None:
        run = follower.look()
        assert run is not None  # the first look has all
        self._follower, self._makers = follower, makers
        self._lock = threading.Lock()
        self._looked_at = time.monotonic()
        self._seen = self._shown = run
        self._state = ("", run.alive)  # what the record does not say: that it is gone, and that its process is
        self._version = 1
        self._made: dict[str, tuple[int, bytes]] = {}

    @property
    def run(self) -> Run:
        """As of a second ago, or now."""
        with self._lock:
            self._look()
            return self._shown

    @property
    def version(self) -> int:
        """Another number whenever there is something new."""
        with self._lock:
            self._look()
            return self._version

    def made(self, what: str) -> tuple[int, bytes]:
        """The page, or its update, with the version it shows."""
        with self._lock:
            self._look()
            version, text = self._made.get(what, (0, b""))
            if version != self._version:
                text = self._makers[what](self._shown).encode("utf-8", "backslashreplace")
                self._made[what] = self._version, text
            return self._version, text

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        fresh, gone = None, ""
        try:
            fresh = self._follower.look()
        except BadInput as error:  # what was seen of it is still worth something
            gone = str(error)
        self._seen = fresh or self._seen
        state = (gone, self._seen.alive)
        if fresh is not None or state != self._state:
            self._state, self._version = state, self._version + 1
            self._shown = replace(self._seen, trouble=[*self._seen.trouble, gone]) if gone else self._seen


class Server(ThreadingHTTPServer):
    """On loopback, at an address that nobody guesses."""

    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # elsewhere that would let others take the port, too
    request_queue_size = 32

    def __init__(self, present: Present, port: int = 0) -> None:
        self.present = present
        self.token = secrets.token_urlsafe(16)
        super().__init__((HOST, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks a name server who we are, and waits for it.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, int(self.server_address[1])

    @property
    def address(self) -> str:
        """For a browser."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone, or sends nonsense, is no reason to write into the terminal."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = CLIENT_S
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = "text/plain; charset=utf-8"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _refuse_method(self) -> None:
        if self._is_for_us() and self._asked() is not None:
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse_method  # noqa: N815 (names that http.server asks for)

    def _answer(self, *, with_body: bool) -> None:
        asked = self._asked() if self._is_for_us() else None
        if asked is None:
            return
        try:
            tag = f'"{self.server.present.version}"'
            if self.headers.get("If-None-Match") == tag:
                self._say_unchanged(tag)
                return
            version, text = self.server.present.made(asked)
        except Exception as error:  # whatever a record holds: the next version of it may do
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, f"this record cannot be shown: {type(error).__name__}")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", KINDS[asked])
        self.send_header("Content-Length", str(len(text)))
        self.send_header("ETag", f'"{version}"')
        self.end_headers()
        if with_body:
            self.wfile.write(text)

    def _say_unchanged(self, tag: str) -> None:
        self.send_response(HTTPStatus.NOT_MODIFIED)
        self.send_header("ETag", tag)
        self.end_headers()

    def _is_for_us(self) -> bool:
        """Whether it was asked for under our own name; else it is answered already."""
        port = self.server.server_port
        hosts = [host.strip().lower() for host in self.headers.get_all("Host") or []]
        ours = [f"{name}{'' if port == WEB else f':{port}'}" for name in (HOST, "localhost")]
        if len(hosts) == 1 and hosts[0] in ours:
            return True
        self.send_error(HTTPStatus.FORBIDDEN, f"only under {HOST}:{port} or localhost:{port}")
        return False

    def _asked(self) -> str | None:
        """The last part of the path, after the token; None where it is answered already."""
        token, slash, what = self.path.partition("?")[0].removeprefix("/").partition("/")
        known = hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        if known and slash and what in KINDS:
            return what
        self.send_error(HTTPStatus.NOT_FOUND)
        return None

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        return "ampwise"

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it, and it would hold the token."""
