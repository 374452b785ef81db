"""The result of a training step, whose numbers stay on the device until they are read, and the history of steps."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, overload

from torch import Tensor

from ampwise.errors import BadInput
from ampwise.train.scaler.step_result import AsyncScalars, StepResult

__all__ = ["Step", "StepHistory"]

FIELDS = ("loss", "skipped", "grad_norm", "scale", "precision", "lr")
SHOWN = 20  # steps in a notebook's table of a history
STEPS_UNTIL_READ = 4  # after this many further steps a number has arrived on the host, and its device memory is freed


class Step:
    """Result of a training step. Reading a number that is still being copied syncs with that step only.

    number: the step's number, from 1 on. closed: the accumulation window is complete and the optimizer has stepped;
    before that, only the loss is known. extra: what the loss function returned besides the loss. undone: a guard went
    back from this step: the weights are those of an earlier one.
    """

    __slots__ = (
        "_loss",
        "_loss_divisor",
        "_lrs",
        "_result",
        "_settled",
        "closed",
        "extra",
        "number",
        "precision",
        "undone",
    )

    def __init__(
        self,
        number: int,
        precision: str,
        loss: Tensor | None = None,
        *,
        loss_divisor: float | Tensor | AsyncScalars | None = None,
        result: StepResult | None = None,
        lrs: Sequence[float | AsyncScalars] = (),
        extra: Any = None,
    ) -> None:
        self.number, self.precision, self.extra = number, precision, extra
        self.closed = result is not None
        self.undone = False
        self._loss: Tensor | float | None = loss  # None: it is copied together with the step's result
        self._loss_divisor = loss_divisor
        self._result = result
        self._lrs: tuple[float | AsyncScalars, ...] = tuple(lrs)
        self._settled: tuple[bool, float, float] | None = None

    @property
    def loss(self) -> float:
        """Mean loss over the window's micro-batches so far, or over their tokens."""
        if self._loss is None:
            self._facts()
        if isinstance(self._loss, Tensor):
            self._loss = self._mean(float(self._loss.item()))
        assert self._loss is not None
        return self._loss

    def _mean(self, total: float) -> float:
        if self._loss_divisor is None:
            return total
        divisor = _number(self._loss_divisor)
        return total / divisor if divisor else math.nan

    @property
    def skipped(self) -> bool:
        """Whether a gradient was not finite, so that nothing changed but the loss scale."""
        return self._facts()[0]

    @property
    def applied(self) -> bool:
        """Whether this step changed the weights: it was neither skipped nor undone."""
        return self.closed and not self.undone and not self.skipped

    @property
    def grad_norm(self) -> float:
        """Norm of all unscaled gradients before clipping. NaN while the window is open."""
        return self._facts()[1]

    @property
    def scale(self) -> float:
        """Loss scale after the step; 1 without scaling. NaN while the window is open."""
        return self._facts()[2]

    @property
    def lr(self) -> float:
        """Learning rate of this step in the first parameter group. NaN while the window is open."""
        return self.lrs[0] if self._lrs else math.nan

    @property
    def lrs(self) -> tuple[float, ...]:
        """Learning rates of all parameter groups, optimizer by optimizer."""
        lrs = tuple(_number(lr) for lr in self._lrs)
        self._lrs = lrs
        return lrs

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, with None in place of NaN and infinity. Syncs with this step."""
        found: dict[str, Any] = {"number": self.number}
        for fact in FIELDS:
            value = getattr(self, fact)
            found[fact] = None if isinstance(value, float) and not math.isfinite(value) else value
        return found

    @property
    def known(self) -> bool:
        """Whether the window is closed and reading any number would not sync."""
        return not self._waiting

    def settle_if_there(self) -> None:
        """If the numbers have arrived on the host, read them and free the buffers."""
        if self._result is not None and self._result.known:
            self._facts()
            _ = self.loss, self.lrs

    def bare(self) -> Step:
        """Return this step without ``extra``, which may be large."""
        if self.extra is None:
            return self
        other = copy.copy(self)
        other.extra = None
        return other

    def __repr__(self) -> str:
        # Printing must not sync with the device.
        if waiting := self._waiting:
            return f"<Step {self.number}, {self.precision}, {waiting}>"
        how = ("skipped, " if self.skipped else "") + ("undone, " if self.undone else "")
        scale = "" if self.scale == 1 else f", scale {self.scale:g}"
        return (
            f"<Step {self.number}, {self.precision}, {how}loss {self.loss:.4g}, grad_norm {self.grad_norm:.4g}{scale}, "
            f"lr {self.lr:.4g}>"
        )

    def _repr_html_(self) -> str:
        from ampwise.finding.html import facts_html

        if waiting := self._waiting:
            return facts_html(f"Step {self.number}", {"precision": self.precision}, note=waiting)
        facts = {fact: _short(getattr(self, fact)) for fact in FIELDS if fact != "skipped"}
        how, mood = ("applied", "ok") if self.applied else ("skipped" if self.skipped else "undone", "warning")
        return facts_html(f"Step {self.number}", facts, note=how, mood=mood)

    def cells(self) -> list[str]:
        """Return the step's values as text for a table, without syncing."""
        if waiting := self._waiting:
            return [self.precision if fact == "precision" else waiting for fact in FIELDS]
        return [_short(getattr(self, fact)) for fact in FIELDS]

    @property
    def _waiting(self) -> str:
        """Why reading a number would sync or give NaN; empty if all numbers are on the host."""
        if not self.closed:
            return "accumulating"
        there = self._settled is not None or (self._result is not None and self._result.known)
        return "" if there else "pending"

    def _facts(self) -> tuple[bool, float, float]:
        if self._settled is None:
            if self._result is None:
                return False, math.nan, math.nan
            skipped, norm, scale, loss = self._result.values()
            self._settled = skipped, norm, scale
            if self._loss is None:
                self._loss = self._mean(loss)
            self._result = None
        return self._settled


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _number(value: AsyncScalars | Tensor | float) -> float:
    if isinstance(value, AsyncScalars):
        return value.read()[0]
    return float(value.item()) if isinstance(value, Tensor) else value


class StepHistory(Sequence[Step]):
    """Last closed steps, oldest first.

    ``history["loss"]`` is the list of losses; likewise for skipped, grad_norm, scale and lr. It holds 1000 steps;
    ``engine.history.limit = 10_000`` changes that.
    """

    def __init__(self, limit: int = 1000) -> None:
        self._steps: deque[Step] = deque(maxlen=limit)

    @property
    def limit(self) -> int:
        """How many steps are kept; may be set."""
        return self._steps.maxlen or 0

    @limit.setter
    def limit(self, limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise BadInput(f"history.limit = {limit!r}: expected the number of steps to keep, 0 or more.")
        self._steps = deque(self._steps, maxlen=limit)

    def append(self, step: Step) -> None:
        self._steps.append(step.bare())
        if len(self._steps) > STEPS_UNTIL_READ:
            self._steps[-1 - STEPS_UNTIL_READ].settle_if_there()

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, which: int) -> Step: ...
    @overload
    def __getitem__(self, which: slice) -> list[Step]: ...
    @overload
    def __getitem__(self, which: str) -> list[Any]: ...
    def __getitem__(self, which: int | slice | str) -> Any:
        if isinstance(which, str):
            if which not in FIELDS:
                raise BadInput(f"history[{which!r}]: expected one of {', '.join(FIELDS)}.")
            return [getattr(step, which) for step in self._steps]
        return list(self._steps)[which] if isinstance(which, slice) else self._steps[which]

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def rows(self) -> list[dict[str, Any]]:
        """Return plain data, one dict per step."""
        return [step.as_dict() for step in self._steps]

    def clear(self) -> None:
        self._steps.clear()

    def __repr__(self) -> str:
        return f"<History of {len(self)} steps>"

    def _repr_html_(self) -> str:
        from ampwise.finding.html import bold, paragraph, table, text

        shown = list(self._steps)[-SHOWN:]
        rows = [[text(step.number), *(text(cell) for cell in step.cells())] for step in shown]
        title = paragraph(bold(f"{len(self):,} steps{f', the last {SHOWN}' if len(self) > SHOWN else ''}"))
        return title + table(("step", *FIELDS), rows)
