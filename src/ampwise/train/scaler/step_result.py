"""Results of optimizer steps, copied to the host without a sync, and counts of applied and skipped steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ampwise.train.scaler.loss_scale import UpdateField

__all__ = ["AsyncScalars", "StepCounts", "StepResult", "buffer_for_kernel"]

NORM, FOUND_INF = range(2)
MAX_AWAITED = 8  # results that are counted only once somebody has read them
BUFFERS_AT_A_TIME = 64  # buffers allocated at a time: pinned memory is slow to get


class AsyncScalars:
    """Numbers being copied from the device. ``read`` syncs with their copy only, not with later work.

    The numbers of several tensors of one device are concatenated. ``written_from``: the tensors are pinned buffers that
    a kernel on this device writes, so that there is nothing to copy.
    """

    def __init__(self, *parts: Tensor, written_from: torch.device | None = None) -> None:
        self.numbers: list[float] | None = None  # once they have arrived and were read
        self._on_device: tuple[Tensor, ...] | None = None
        self._on_host: list[Tensor] = []
        self._arrived: torch.cuda.Event | None = None
        if written_from is not None:
            self._on_host.extend(parts)
            self._arrived = torch.cuda.current_stream(written_from).record_event()
        elif not parts[0].is_cuda:
            self.numbers = _numbers_of(parts)
        elif torch.cuda.is_current_stream_capturing():
            self._on_device = parts  # each replay of the graph overwrites them
        else:
            self._on_host.extend([_pinned_buffer(part).copy_(part, non_blocking=True) for part in parts])
            self._arrived = torch.cuda.current_stream(parts[0].device).record_event()

    def read(self) -> list[float]:
        """Return the numbers; syncs if they have not arrived."""
        if self.numbers is None:
            if self._on_device is not None:
                return _numbers_of(self._on_device)
            assert self._arrived is not None
            self._arrived.synchronize()
            self.numbers = _numbers_of(self._on_host)
            self._on_host.clear()
        return self.numbers

    @property
    def arrived(self) -> bool:
        """Whether reading would not sync."""
        return self.numbers is not None or (self._arrived is not None and self._arrived.query())

    @property
    def lags(self) -> bool:
        """Whether the numbers are copied asynchronously, so that reading at once would sync."""
        return self._arrived is not None

    @property
    def captured(self) -> bool:
        """Whether the numbers belong to a CUDA graph capture: each replay writes them."""
        return self._on_device is not None


_pinned_buffers: dict[tuple[torch.dtype, torch.Size], deque[Tensor]] = {}


# Torch does not know that a kernel writes to pinned memory: freed before that, it would be used again. Each buffer
# stays for as many launches as CUDA ever queues (1,024, or four times that by an environment variable).
_written_by_kernels: deque[Tensor] = deque(maxlen=4096)


def buffer_for_kernel(part: Tensor) -> Tensor:
    """Return an unused pinned host buffer of the tensor's shape and dtype, for a kernel to write to."""
    buffer = _pinned_buffer(part)
    _written_by_kernels.append(buffer)
    return buffer


def _pinned_buffer(part: Tensor) -> Tensor:
    """Return an unused pinned host buffer of the tensor's shape and dtype."""
    free = _pinned_buffers.setdefault((part.dtype, part.shape), deque())
    while True:
        try:
            return free.popleft()
        except IndexError:  # none left; another thread may have taken the last
            with torch.inference_mode(False):  # inference tensors could not be written to outside inference_mode
                new = torch.empty(BUFFERS_AT_A_TIME, *part.shape, dtype=part.dtype, device="cpu", pin_memory=True)
                free.extend(new.unbind())


def _numbers_of(parts: Sequence[Tensor]) -> list[float]:
    return [float(number) for part in parts for number in part.reshape(-1).tolist()]


@dataclass(slots=True)
class StepResult:
    """Result of an optimizer's step: on the device first, then among numbers that are copied to the host."""

    numbers: Tensor | None  # norm and found_inf first; None for an unchecked step, and after ``release``
    skipped_on_host: bool | None = None  # whether it was skipped, if the host had to know at once
    posted: AsyncScalars | None = None
    place: int = 0  # index of norm and found_inf among the copied numbers
    scaled: bool = False  # the copied numbers begin with the scale
    on_host: Tensor | None = None  # ``numbers`` in pinned memory, if a kernel writes them there

    def values(self) -> tuple[bool, float, float, float]:
        """Return skipped, norm, scale after the step, and loss at once; syncs if the step is not finished."""
        if self.posted is None:
            return self.skipped, self.norm, 1.0, math.nan
        copied = self.posted.numbers or self.posted.read()
        skipped = bool(copied[self.place + FOUND_INF]) if self.skipped_on_host is None else self.skipped_on_host
        return skipped, copied[self.place + NORM], copied[UpdateField.SCALE] if self.scaled else 1.0, copied[-1]

    def _read(self) -> list[float] | None:
        """Return the copied numbers; None if nothing is copied. Syncs if the step is not finished."""
        return None if self.posted is None else self.posted.numbers or self.posted.read()

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped. Syncs if the step is not finished."""
        if self.skipped_on_host is not None:
            return self.skipped_on_host
        if (copied := self._read()) is not None:
            return bool(copied[self.place + FOUND_INF])
        return self.numbers is None or bool(self.numbers[FOUND_INF].item())

    @property
    def norm(self) -> float:
        """Norm of the unscaled gradients. Syncs if the step is not finished."""
        if (copied := self._read()) is not None:
            return copied[self.place + NORM]
        return math.nan if self.numbers is None else float(self.numbers[NORM].item())

    @property
    def scale(self) -> float:
        """Loss scale after the step; 1 with scaling off."""
        copied = self._read() if self.scaled else None
        return 1.0 if copied is None else copied[UpdateField.SCALE]

    @property
    def scale_before(self) -> float:
        """Loss scale of the step's gradients; 1 with scaling off."""
        copied = self._read() if self.scaled else None
        return 1.0 if copied is None else copied[UpdateField.SCALE_BEFORE]

    @property
    def backoff(self) -> float:
        """Factor by which the step lowered the scale; 1 if it was applied."""
        return max(self.scale_before / self.scale, 1.0)

    @property
    def clean_steps(self) -> int:
        """Growth tracker before the step."""
        copied = self._read() if self.scaled else None
        return 0 if copied is None else int(copied[UpdateField.TRACKER_BEFORE])

    @property
    def loss(self) -> float:
        """The loss that was copied with the other numbers; NaN if nothing was copied."""
        copied = self._read()
        return math.nan if copied is None else copied[-1]

    @property
    def known(self) -> bool:
        """Whether reading the result would not sync."""
        if self.posted is None:
            return self.numbers is None
        return self.posted.numbers is not None or self.posted.arrived

    @property
    def is_read(self) -> bool:
        """Whether the host knows that the step was skipped, or not, without asking the device."""
        if self.skipped_on_host is not None:
            return True
        return self.numbers is None if self.posted is None else self.posted.numbers is not None

    @property
    def is_skip_known(self) -> bool:
        """Whether reading ``skipped`` would not sync."""
        return self.skipped_on_host is not None or self.known

    def release(self) -> None:
        """Free the numbers on the device, if they are copied to the host.

        Keeping them would make the allocator place the next gradients at other addresses at every step.
        """
        if self.posted is not None and not self.posted.captured:
            self.numbers = None


class StepCounts:
    """Counts of applied and skipped steps, updated in order as results arrive on the host."""

    def __init__(self, applied: int = 0, skipped: int = 0, in_a_row: int = 0) -> None:
        self.applied, self.skipped = applied, skipped
        self.in_a_row = in_a_row  # consecutive skips, up to the last known step
        self._awaited: deque[StepResult] = deque()

    def add(self, result: StepResult) -> bool:
        """Add a step and count the results that have arrived; return whether any had."""
        awaited = self._awaited
        awaited.append(result)
        before = len(awaited)
        # Asking the device takes longer than counting, so that is done only if many are awaited.
        while awaited and (awaited[0].is_read or (len(awaited) > MAX_AWAITED and awaited[0].is_skip_known)):
            self._count(awaited.popleft().skipped)
        return len(awaited) < before

    def settle(self) -> StepCounts:
        """Count all steps and return self. Syncs with the last step."""
        while self._awaited:
            self._count(self._awaited.popleft().skipped)
        return self

    def _count(self, skipped: bool) -> None:
        self.skipped += skipped
        self.applied += not skipped
        self.in_a_row = self.in_a_row + 1 if skipped else 0
