"""Run torch's profiler for one step, silently, and without disturbing the script's own profiler."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.autograd import profiler as torch_profiler

from ampwise.watch.patches import Patches
from ampwise.watch.profile import DeviceKernel, HostOp, OperatorCall, Profile, is_matmul, read

# Lines that the profiler's library prints on stderr when it starts and stops, since torch 2.13.
ANNOUNCED = re.compile(rb"^USDT:[^\n]*profiler_(start|stop)\r?\n?", re.MULTILINE)
# torch.profiler sets these itself where there are CUDA graphs, which do not survive a CUPTI teardown.
WITHOUT_TEARDOWN = {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
# Calls of the driver have their own numbering, which would be confused with that of operators.
DRIVER_CALL = re.compile(r"(cuda|cu|hip)[A-Z]")
STDERR = 2
# Held while stderr is redirected: a child forked meanwhile by another thread would inherit the redirection.
_REDIRECTING = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_REDIRECTING.acquire, after_in_parent=_REDIRECTING.release, after_in_child=_REDIRECTING.release
    )


class Profiler:
    """Start and stop a profiler of ampwise, and notice the script's own.

    Torch has one profiler per process. The script's has priority: ampwise's is stopped when the script's starts, and is
    not started while the script's is on or prepared.
    """

    def __init__(self, patches: Patches) -> None:
        self._on: Any = None
        self._thread = 0
        self._starting = False
        self._theirs: set[int] = set()
        self._started = False  # at least once
        self.given_up = False  # the last profile was stopped early, for the script's profiler or a fork
        for kind in (torch_profiler.profile, torch_profiler.emit_nvtx, torch_profiler.emit_itt):
            for name in ("__enter__", "_prepare_trace", "_start_trace"):
                if name in vars(kind):
                    patches.wrap(kind, name, self.script_profiler_starts)
            patches.wrap(kind, "__exit__", self.script_profiler_ends)

    @property
    def is_on(self) -> bool:
        return self._on is not None

    @property
    def is_free(self) -> bool:
        """Whether no profiler is on."""
        enabled = getattr(torch.autograd, "_profiler_enabled", bool)
        return not (self.is_on or self._theirs or enabled() or getattr(torch_profiler, "_is_profiler_enabled", False))

    def start(self) -> None:
        """Start recording calls of this thread and of its backward passes, and the device's work."""
        on_device = torch.cuda.is_initialized() and "NSYS_PROFILING_SESSION_ID" not in os.environ
        ours = torch_profiler.profile(use_device="cuda" if on_device else None, record_shapes=True, use_kineto=True)
        self._started = True
        with self._switching():
            ours.__enter__()
        self._on, self._thread, self.given_up = ours, threading.get_ident(), False

    def stop(self) -> Any:
        """Stop, and return what torch has recorded. Syncs with the device."""
        ours, self._on = self._on, None
        with self._switching():
            ours.__exit__(None, None, None)
        return ours.kineto_results

    def give_up(self) -> None:
        """Stop, and discard what was recorded."""
        if self.is_on and self._thread == threading.get_ident():
            self.given_up = True
            self.stop()

    def forked(self) -> None:
        """Clean up in a forked child, which has the library's state but none of its threads.

        The profiler's library keeps a thread, and its destructor would wait for it forever. So the child skips the
        destructors of C++ libraries when it exits. C's buffers are still flushed, and the exit status stays the same.
        """
        self._on = None
        libc = ctypes.CDLL(None)
        if self._started and hasattr(libc, "on_exit"):  # glibc has it; it passes the exit status to the handler
            libc.on_exit(libc._exit, None)  # handlers run in reverse order
            libc["__cxa_atexit"](libc.fflush, None, None)  # as an attribute, Python would mangle the name

    @contextmanager
    def _switching(self) -> Iterator[None]:
        """Context in which ampwise's own profiler starts or stops; what its library prints then is dropped."""
        before = {name: os.environ.get(name) for name in WITHOUT_TEARDOWN}
        os.environ.update(WITHOUT_TEARDOWN)
        self._starting = True
        try:
            with _REDIRECTING, _stderr_filtered():
                yield
        except Exception:
            if torch._C._autograd._profiler_enabled():
                torch._C._autograd._disable_profiler()
            torch_profiler._run_on_profiler_stop()
            raise
        finally:
            self._starting = False
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def script_profiler_starts(self, begin: Callable[..., Any], theirs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._starting and getattr(theirs, "enabled", True):
            self._theirs.add(id(theirs))
            try:
                self.give_up()
            except Exception:
                self._on = None  # if something is wrong, the script's profiler will raise it
        return begin(theirs, *args, **kwargs)

    def script_profiler_ends(self, end: Callable[..., Any], theirs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(theirs, *args, **kwargs)
        finally:
            self._theirs.discard(id(theirs))


@contextmanager
def _stderr_filtered() -> Iterator[None]:
    """Drop what the profiler's library prints; other output to stderr is written afterwards."""
    try:
        real = os.dup(STDERR)
    except OSError:  # stderr is closed
        yield
        return
    try:
        with tempfile.TemporaryFile() as kept:
            _flush()
            os.dup2(kept.fileno(), STDERR)
            try:
                yield
            finally:
                _flush()
                os.dup2(real, STDERR)
                kept.seek(0)
                printed = ANNOUNCED.sub(b"", kept.read())
                if printed:
                    os.write(STDERR, printed)
    finally:
        os.close(real)


def _flush() -> None:
    with suppress(Exception):  # it may be closed, None, or replaced by the script
        sys.stderr.flush()


def profile_of(result: Any) -> Profile:
    """Summarize what torch has recorded."""
    return read(*events_of(result))


def events_of(result: Any) -> tuple[list[HostOp], list[DeviceKernel]]:
    """Return what torch has recorded as plain data: calls on the host, and work of the device."""
    ops: list[HostOp] = []
    kernels: list[DeviceKernel] = []
    for event in result.events():
        name, start, duration = event.name(), event.start_ns(), event.duration_ns()
        if event.device_type() != DeviceType.CPU:
            if not event.is_user_annotation():  # copies of the host's ranges
                kernels.append(DeviceKernel(name, duration, event.linked_correlation_id(), start))
        elif not event.is_async() and not DRIVER_CALL.match(name):
            if is_matmul(name) or name == "aten::copy_":
                strides = getattr(event, "structured_input_strides", None)  # missing in some versions of torch
                values = getattr(event, "concrete_inputs", None)
                call = OperatorCall(
                    name=name,
                    shapes=event.shapes(),
                    strides=None if strides is None else strides(),
                    formats=event.dtypes(),
                    values=None if values is None else values(),
                )
            else:
                call = OperatorCall(name=name)  # most calls need only the name, and the rest is slow to get
            ops.append(
                HostOp(
                    call,
                    start,
                    start + duration,
                    event.start_thread_id(),
                    event.correlation_id(),
                    event.sequence_nr(),
                    backward=event.fwd_thread_id() > 0,
                )
            )
    return ops, kernels
