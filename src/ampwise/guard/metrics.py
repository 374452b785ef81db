"""A guarded run's numbers for Prometheus, as text on this machine's loopback and nowhere else.

Served by the official client, from a registry of our own, so that a script's own metrics stay apart. As with the live
page, the Host header has to be a name that only this machine has: no page from elsewhere reads it through a name that
it points here.
"""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from ampwise.errors import BadInput, MissingDependency, UnknownName
from ampwise.live.server import CLIENT_S, HOST, OURS

__all__ = ["COUNTS", "NUMBERS", "Metrics"]

# By the name that ``update`` and ``count`` take: what Prometheus calls it, and what it is.
NUMBERS = {
    "step": ("step", "The last step that was taken"),
    "loss": ("loss", "Its loss"),
    "grad_norm": ("grad_norm", "The norm of its gradients, in true units"),
    "scale": ("loss_scale", "Its loss scale"),
    "lr": ("learning_rate", "Its learning rate"),
    "last_good_step": ("last_good_step", "The newest step whose state is known to be good"),
    "healthy": ("healthy_steps", "Healthy steps in a row"),
}
COUNTS = {
    "applied": ("steps_applied", "Steps that changed the weights"),
    "skipped": ("steps_skipped", "Steps that changed nothing"),
    "rollbacks": ("rollbacks", "Times that an earlier state was put back"),
    "checkpoints": ("checkpoints_written", "Checkpoints that were written and are whole"),
    "checkpoints_failed": ("checkpoints_failed", "Checkpoints that could not be written"),
}
UNKNOWN = float("nan")

Start = Callable[..., Any]
App = Callable[[dict[str, Any], Start], Iterable[bytes]]


class Metrics:
    """Answers as soon as it is made, in threads of its own; ``port`` 0 takes a free one.

    A number that is not known, or not yet, is NaN.
    """

    def __init__(self, port: int = 0) -> None:
        client = _client()
        registry = client.CollectorRegistry()
        self._numbers = {
            key: client.Gauge(f"ampwise_{name}", about, registry=registry) for key, (name, about) in NUMBERS.items()
        }
        self._counts = {
            key: client.Counter(f"ampwise_{name}", about, registry=registry) for key, (name, about) in COUNTS.items()
        }
        self._totals = dict.fromkeys(COUNTS, 0.0)
        since = client.Gauge(
            "ampwise_seconds_since_checkpoint", "Since the last whole checkpoint of this process", registry=registry
        )
        since.set_function(self._seconds_since_checkpoint)
        self._checkpoint_at: float | None = None
        self.update(**dict.fromkeys(NUMBERS))
        self._server = _served(client.make_wsgi_app(registry), port)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.2},
            name="ampwise-metrics",
            daemon=True,
        )
        self._thread.start()
        self._open = True

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        """For the configuration of Prometheus, or a browser."""
        return f"http://{HOST}:{self.port}/metrics"

    def update(self, **known: float | None) -> None:
        """Set some of ``NUMBERS``, or tell how far some of ``COUNTS`` are; those not named stay as they are.

        A total that has gone down is that of a run that was put back: what it counts from there is counted again.
        """
        for name, value in known.items():
            if name in COUNTS and value is not None:
                grown, self._totals[name] = value - self._totals[name], value
                self._add(name, max(grown, 0.0))
            elif name in NUMBERS:
                self._numbers[name].set(UNKNOWN if value is None else value)
            elif name not in COUNTS:
                every = [*NUMBERS, *COUNTS]
                raise UnknownName("metric", name, every, listing=f"There are {', '.join(every)}.")

    def count(self, name: str) -> None:
        """One more of ``COUNTS``."""
        if name not in COUNTS:
            raise UnknownName("count", name, COUNTS, listing=f"There are {', '.join(COUNTS)}.")
        self._totals[name] += 1
        self._add(name, 1.0)

    def _add(self, name: str, amount: float) -> None:
        if name == "checkpoints" and amount:
            self._checkpoint_at = time.monotonic()  # whatever is done to the clock
        self._counts[name].inc(amount)

    def close(self) -> None:
        """Stop answering; the port is free then."""
        if self._open:
            self._open = False
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _seconds_since_checkpoint(self) -> float:
        return UNKNOWN if self._checkpoint_at is None else time.monotonic() - self._checkpoint_at


def _client() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise MissingDependency(
            "metrics for Prometheus need prometheus_client: pip install 'ampwise[prometheus]'"
        ) from error
    return prometheus_client


def _served(app: App, port: int) -> WSGIServer:
    if isinstance(port, bool) or not isinstance(port, int):
        raise BadInput(f"Metrics(port={port!r}): a number is expected, 0 for any free port.")
    try:
        return make_server(HOST, port, _for_us(app), server_class=_Server, handler_class=_Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"Metrics(port={port}): that port of {HOST} cannot be had: {reason}. Port 0 takes a free one."
        ) from error


def _for_us(app: App) -> App:
    """Answers only who asks under a name of this machine."""

    def answer(request: dict[str, Any], start: Start) -> Iterable[bytes]:
        if OURS.fullmatch(request.get("HTTP_HOST", "").strip()):
            return app(request, start)
        start("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"403 only under {HOST} or localhost\n".encode()]

    return answer


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # WSGIServer's own asks a name server who we are, and waits for it.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone, or sends nonsense, is no reason to write into the terminal."""


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""
