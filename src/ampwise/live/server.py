"""A page on this machine's loopback, for who knows its address: what it shows comes from the record as it grows.

Nothing is served but the page and its updates. The address holds a random token, so that no other user of the machine
guesses it; the Host header has to be a name that only this machine has, so that no page from elsewhere reads it through
a name of its own that it points here. The port may be any: ssh forwards one to another.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from ampwise.errors import BadInput
from ampwise.live.looking import REST, Looking
from ampwise.strict_json import dumps

if TYPE_CHECKING:
    from ampwise.record.follow import Follower
    from ampwise.record.reader import Run

__all__ = ["HOST", "Present", "Server", "serve"]

HOST = "127.0.0.1"  # and nothing else, ever
LOOK_S = 2.0  # at most so often is the record looked at, however many ask; the page asks as often
PATIENCE_S = 0.5  # in which most runs are made anew; who asks for a larger one gets what was made before
CLIENT_S = 20.0  # that a client has to show the token, and may then take nothing of its answer
MOST_STRANGERS = 64  # clients at a time that have not shown the token
MOST_ASKED = 131_072  # bytes of a request
OURS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
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
    interval_s: float = LOOK_S,
) -> Server:
    """A server that answers already, in threads of its own; ``port`` 0 takes a free one."""
    present = Present(follower, {"": page, "update": lambda run: dumps(update(run), indent=None)}, interval_s)
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
    """The run as it stands, for many who ask at the same time: one looks, one makes, all get the same.

    Only the first waits until what was asked for is made. To make it anew takes seconds for a large run: that is done
    beside, and until then the one before is given; and after that it rests, for the sake of whoever trains here.
    """

    def __init__(self, follower: Follower, makers: dict[str, Callable[[Run], str]], interval_s: float = LOOK_S) -> None:
        self._looking = Looking(follower)
        self._makers, self._interval_s = makers, interval_s
        self._work = threading.Lock()  # one looks or makes at a time
        self._look_due = time.monotonic() + interval_s
        self._make_due = 0.0
        self._alive = self._looking.run.alive  # which the record does not say
        self._version = 1
        self._made: dict[str, tuple[int, bytes | Exception]] = {}
        self._starting = threading.Lock()
        self._renewal: threading.Thread | None = None

    @property
    def run(self) -> Run:
        """As of an interval ago, or now."""
        with self._work:
            self._look()
            return self._looking.run

    @property
    def version(self) -> int:
        """Another number whenever there is something new."""
        with self._work:
            self._look()
            return self._version

    def made(self, what: str) -> tuple[int, bytes]:
        """The page, or its update, with the version it shows; what making it has raised."""
        if what not in self._made:
            self._renew(what)
        elif self._may_renew(what):
            self._renewed_beside(what).join(PATIENCE_S)
        version, text = self._made[what]
        if isinstance(text, Exception):
            raise text
        return version, text

    def _may_renew(self, what: str) -> bool:
        now = time.monotonic()
        return now >= self._look_due or (self._made[what][0] != self._version and now >= self._make_due)

    def _renewed_beside(self, what: str) -> threading.Thread:
        with self._starting:
            if self._renewal is None or not self._renewal.is_alive():
                self._renewal = threading.Thread(target=self._renew, args=(what,), daemon=True)
                self._renewal.start()
            return self._renewal

    def _renew(self, what: str) -> None:
        with self._work:
            try:
                self._look()
                is_due = what not in self._made or time.monotonic() >= self._make_due
                if is_due and self._made.get(what, (0,))[0] != self._version:
                    self._made[what] = self._version, self._make(what)
            except Exception as error:  # whatever a record holds: it is told, and tried again
                self._made[what] = 0, error

    def _make(self, what: str) -> bytes:
        began = time.perf_counter()
        try:
            return self._makers[what](self._looking.run).encode("utf-8", "backslashreplace")
        finally:
            self._make_due = time.monotonic() + REST * (time.perf_counter() - began)

    def _look(self) -> None:
        if time.monotonic() < self._look_due:
            return
        began, before = time.perf_counter(), self._looking.run
        run = self._looking.look()
        if run is not before or run.alive != self._alive:
            self._alive, self._version = run.alive, self._version + 1
        self._look_due = time.monotonic() + max(self._interval_s, REST * (time.perf_counter() - began))


class Server(ThreadingHTTPServer):
    """On loopback, at an address that nobody guesses."""

    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # elsewhere that would let others take the port, too
    request_queue_size = 32

    def __init__(self, present: Present, port: int = 0) -> None:
        self.present = present
        self.token = secrets.token_urlsafe(16)
        self._strangers: dict[socket.socket, float] = {}  # when they came, the oldest first
        self._meeting = threading.Lock()
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

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread. Whoever does not show the token has little time, and goes when there are many of them."""
        with self._meeting:
            self._strangers[request] = time.monotonic()
            if len(self._strangers) > MOST_STRANGERS:
                self._cut(next(iter(self._strangers)))
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Cut off whoever took too long, though never silent: this is called several times a second."""
        with self._meeting:
            for request in [each for each, came in self._strangers.items() if time.monotonic() - came > CLIENT_S]:
                self._cut(request)

    def welcome(self, request: Any) -> None:
        """A client that has shown the token, or has been answered, may take its time."""
        with self._meeting:
            self._strangers.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.welcome(request)
        super().shutdown_request(request)

    def _cut(self, request: socket.socket) -> None:
        del self._strangers[request]
        with contextlib.suppress(OSError):  # it has gone
            request.shutdown(socket.SHUT_RDWR)  # which wakes its thread


class _Asked:
    """What a client asks, of which only so much is read."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, MOST_ASKED

    def readline(self, size: int = -1) -> bytes:
        line: bytes = self._file.readline(self._left + 1 if size < 0 else min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("request")
        return line

    def close(self) -> None:
        self._file.close()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = CLIENT_S
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = "text/plain; charset=utf-8"

    def setup(self) -> None:
        super().setup()
        self.rfile = _Asked(self.rfile)  # type: ignore[assignment]

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _refuse_method(self) -> None:
        if self._is_for_us() and self._asked() is not None:
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this is only read", Allow="GET, HEAD")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse_method  # noqa: N815 (names that http.server asks for)

    def _answer(self, *, with_body: bool) -> None:
        asked = self._asked() if self._is_for_us() else None
        if asked is None:
            return
        try:
            version, text = self.server.present.made(asked)
        except Exception as error:  # whatever a record holds: the next version of it may do
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"this record cannot be shown: {type(error).__name__}")
            return
        tag = f'"{version}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, ETag=tag)
            return
        length = str(len(text))
        self._send(HTTPStatus.OK, **{"Content-Type": KINDS[asked], "Content-Length": length, "ETag": tag})
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

    def _is_for_us(self) -> bool:
        """Whether it was asked for under a name of this machine; else it is answered already."""
        hosts = [host.strip() for host in self.headers.get_all("Host") or []]
        if len(hosts) == 1 and OURS.fullmatch(hosts[0]):
            return True
        self._refuse(HTTPStatus.FORBIDDEN, f"only under {HOST} or localhost")
        return False

    def _asked(self) -> str | None:
        """The last part of the path, after the token; None where it is answered already."""
        token, slash, what = self.path.partition("?")[0].removeprefix("/").partition("/")
        known = hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        if known:
            self.server.welcome(self.request)
        if known and slash and what in KINDS:
            return what
        if known and not slash:  # the last sign is easily lost when an address is copied
            self._send(HTTPStatus.PERMANENT_REDIRECT, Location=f"/{token}/", **{"Content-Length": "0"})
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "not here: copy the whole address that `ampwise watch` printed")
        return None

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        return "ampwise"

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it, and it would hold the token."""
