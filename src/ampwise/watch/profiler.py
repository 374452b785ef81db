"""Torch's profiler, on for one step: quietly, and never in the way of the script's own."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.autograd import profiler as torch_profiler

from ampwise.watch.forks import end_without_destructors
from ampwise.watch.matrix_work import Call, is_matrix_product
from ampwise.watch.patches import Patches
from ampwise.watch.profile import HostOp, Kernel, Profile, read

__all__ = ["Profiler", "profile_of"]

# What the profiler's library says on stderr when it starts and stops, since torch 2.13.
ANNOUNCED = re.compile(rb"^USDT:[^\n]*profiler_(start|stop)\r?\n?", re.MULTILINE)
# As torch.profiler sets them itself where there are CUDA graphs, which do not outlive a teardown.
WITHOUT_TEARDOWN = {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
STDERR = 2
# Held while stderr goes elsewhere: a child that another thread forks meanwhile would never have its own.
_REDIRECTING = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_REDIRECTING.acquire, after_in_parent=_REDIRECTING.release, after_in_child=_REDIRECTING.release
    )


class Profiler:
    """Ours, while it is on; and whether the script has one of its own.

    Torch has one profiler a process. The script's comes first: ours is given up when the script's starts, and does
    not start while the script's is on, or prepared.
    """

    def __init__(self, patches: Patches) -> None:
        self._on: Any = None
        self._thread = 0
        self._starting = False
        self._theirs: set[int] = set()
        self._started = False  # ever
        self.given_up = False  # the last one, to the script's or to a fork
        for kind in (torch_profiler.profile, torch_profiler.emit_nvtx, torch_profiler.emit_itt):
            for name in ("__enter__", "_prepare_trace", "_start_trace"):
                if name in vars(kind):
                    patches.replace(kind, name, self._making_way)
            patches.replace(kind, "__exit__", self._noting_the_end)

    @property
    def is_on(self) -> bool:
        return self._on is not None

    @property
    def is_free(self) -> bool:
        """Nobody profiles."""
        enabled = getattr(torch.autograd, "_profiler_enabled", bool)
        return not (self.is_on or self._theirs or enabled() or getattr(torch_profiler, "_is_profiler_enabled", False))

    def start(self) -> None:
        """Begin to record the calls of this thread, of the backward passes it starts, and of the device."""
        on_device = torch.cuda.is_initialized() and "NSYS_PROFILING_SESSION_ID" not in os.environ
        ours = torch_profiler.profile(use_device="cuda" if on_device else None, record_shapes=True, use_kineto=True)
        self._started = True
        with self._ours(), _quiet():
            try:
                ours.__enter__()
            except Exception:
                _switch_off()
                raise
        self._on, self._thread, self.given_up = ours, threading.get_ident(), False

    def stop(self) -> Any:
        """End it: what torch has recorded. Waits for the device."""
        ours, self._on = self._on, None
        with self._ours(), _quiet():
            try:
                ours.__exit__(None, None, None)
            except Exception:
                _switch_off()
                raise
        return ours.kineto_results

    def give_up(self) -> None:
        """End it and forget what was recorded."""
        if self.is_on and self._thread == threading.get_ident():
            self.given_up = True
            self.stop()

    def forked(self) -> None:
        """In a forked child: it has the library's state, and none of its threads."""
        self._on = None
        if self._started:
            end_without_destructors()

    @contextmanager
    def _ours(self) -> Iterator[None]:
        self._starting = True
        try:
            yield
        finally:
            self._starting = False

    def _making_way(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(theirs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._starting and getattr(theirs, "enabled", True):
                self._theirs.add(id(theirs))
                try:
                    self.give_up()
                except Exception:
                    self._on = None  # theirs will say what is wrong, if something is
            return original(theirs, *args, **kwargs)

        return begin

    def _noting_the_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def end(theirs: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(theirs, *args, **kwargs)
            finally:
                self._theirs.discard(id(theirs))

        return end


def _switch_off() -> None:
    """What the end of a profile does last, when something before it went wrong."""
    if torch._C._autograd._profiler_enabled():
        torch._C._autograd._disable_profiler()
    torch_profiler._run_on_profiler_stop()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what the profiler's library prints; what others print meanwhile comes out afterwards."""
    before = {name: os.environ.get(name) for name in WITHOUT_TEARDOWN}
    os.environ.update(WITHOUT_TEARDOWN)
    try:
        with _REDIRECTING, _stderr_filtered():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _stderr_filtered() -> Iterator[None]:
    try:
        real = os.dup(STDERR)
    except OSError:  # it is closed: nothing can be printed
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
                said = ANNOUNCED.sub(b"", kept.read())
                if said:
                    os.write(STDERR, said)
    finally:
        os.close(real)


def _flush() -> None:
    with suppress(Exception):  # it may be closed, gone, or an object of the script's own
        sys.stderr.flush()


def profile_of(result: Any) -> Profile:
    """What torch has recorded, read."""
    ops: list[HostOp] = []
    kernels: list[Kernel] = []
    for event in result.events():
        start, duration = event.start_ns(), event.duration_ns()
        if event.device_type() != DeviceType.CPU:
            if not event.is_user_annotation():  # the host's ranges, drawn on the device once more
                launched_by = event.linked_correlation_id()
                kernels.append(Kernel(name=event.name(), duration=duration, launched_by=launched_by))
        elif not event.is_async():
            thread, number = event.start_thread_id(), event.correlation_id()
            ops.append(HostOp(call=_call(event), start=start, end=start + duration, thread=thread, id=number))
    return read(ops, kernels)


@lru_cache(maxsize=1024)
def _named(name: str) -> Call:
    return Call(name=name)


def _call(event: Any) -> Call:
    name = event.name()
    if not (is_matrix_product(name) or name == "aten::copy_"):
        return _named(name)  # of most calls the name is all that matters, and the rest is slow to ask for
    strides = getattr(event, "structured_input_strides", None)  # not in every torch
    values = getattr(event, "concrete_inputs", None)
    return Call(
        name=name,
        shapes=event.shapes(),
        strides=None if strides is None else strides(),
        formats=event.dtypes(),
        values=None if values is None else values(),
    )
