"""What one knows of a step: facts that stay on the device until someone asks."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, overload

from torch import Tensor

from ampwise.engine.scaling.facts import Posted
from ampwise.engine.scaling.outcome import Outcome
from ampwise.errors import BadInput

__all__ = ["History", "Step"]

FACTS = ("loss", "skipped", "grad_norm", "scale", "precision", "lr")
SHOWN = 20  # steps in a notebook's table of a history
SURELY_THERE = 4  # steps later, a number has arrived, so that keeping it costs no memory of the device


class Step:
    """How a step went. Asking for a number that is still on its way waits for it, and for nothing that came after.

    number: of the step, from 1 on. closed: the window is complete, and the optimizer had its turn; before that,
    there are a loss and nothing else. extra: what the loss function returned besides the loss. undone: a guard has gone
    back in it: the weights are those of an earlier step.
    """

    __slots__ = (
        "_loss",
        "_loss_divisor",
        "_lrs",
        "_outcome",
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
        loss_divisor: float | Tensor | Posted | None = None,
        outcome: Outcome | None = None,
        lrs: Sequence[float | Posted] = (),
        extra: Any = None,
    ) -> None:
        self.number, self.precision, self.extra = number, precision, extra
        self.closed = outcome is not None
        self.undone = False
        self._loss: Tensor | float | None = loss  # None: it travels with the outcome
        self._loss_divisor = loss_divisor
        self._outcome = outcome
        self._lrs: tuple[float | Posted, ...] = tuple(lrs)
        self._settled: tuple[bool, float, float] | None = None

    @property
    def loss(self) -> float:
        """The mean over the window's micro-batches so far, or over their tokens."""
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
        """A gradient was not finite, and nothing has changed but the loss scale."""
        return self._facts()[0]

    @property
    def applied(self) -> bool:
        """The weights have moved in this step, and are still there: neither was it skipped, nor undone."""
        return self.closed and not self.undone and not self.skipped

    @property
    def grad_norm(self) -> float:
        """Of all gradients, in true units, before clipping. NaN while the window is open."""
        return self._facts()[1]

    @property
    def scale(self) -> float:
        """The loss scale as the step left it; 1 without scaling. NaN while the window is open."""
        return self._facts()[2]

    @property
    def lr(self) -> float:
        """The learning rate of this step: that of the first parameter group. NaN while the window is open."""
        return self.lrs[0] if self._lrs else math.nan

    @property
    def lrs(self) -> tuple[float, ...]:
        """The learning rates of all parameter groups, of one optimizer after the other."""
        lrs = tuple(_number(lr) for lr in self._lrs)
        self._lrs = lrs
        return lrs

    def as_dict(self) -> dict[str, Any]:
        """Plain data, such as for JSON, which has no NaN: None instead. Waits for what is on its way."""
        facts = {fact: getattr(self, fact) for fact in FACTS}
        return {"number": self.number, **{fact: _finite(value) for fact, value in facts.items()}}

    @property
    def known(self) -> bool:
        """The window is closed, and asking for any number would not wait."""
        return not self._waiting

    def settle_if_there(self) -> None:
        """Turn what has arrived into numbers, and let go of what carried them."""
        if self._outcome is not None and self._outcome.known:
            self._facts()
            _ = self.loss, self.lrs

    def bare(self) -> Step:
        """Without ``extra``, which may be large."""
        if self.extra is None:
            return self
        other = copy.copy(self)
        other.extra = None
        return other

    def __repr__(self) -> str:
        # Printing must not wait for the device.
        if waiting := self._waiting:
            return f"<Step {self.number}, {self.precision}, {waiting}>"
        how = ("skipped, " if self.skipped else "") + ("undone, " if self.undone else "")
        scale = "" if self.scale == 1 else f", scale {self.scale:g}"
        return (
            f"<Step {self.number}, {self.precision}, {how}loss {self.loss:.4g}, grad_norm {self.grad_norm:.4g}{scale}, "
            f"lr {self.lr:.4g}>"
        )

    def _repr_html_(self) -> str:
        from ampwise.printers.html import facts_html

        if waiting := self._waiting:
            return facts_html(f"Step {self.number}", {"precision": self.precision}, note=waiting)
        facts = {fact: _short(getattr(self, fact)) for fact in FACTS if fact != "skipped"}
        how, mood = ("applied", "ok") if self.applied else ("skipped" if self.skipped else "undone", "warning")
        return facts_html(f"Step {self.number}", facts, note=how, mood=mood)

    def cells(self) -> list[str]:
        """The facts in words, for a table; does not wait for what is on its way."""
        if waiting := self._waiting:
            return [self.precision if fact == "precision" else waiting for fact in FACTS]
        return [_short(getattr(self, fact)) for fact in FACTS]

    @property
    def _waiting(self) -> str:
        """Why asking for a number would wait, or give none; empty when all of them are there."""
        if not self.closed:
            return "accumulating"
        there = self._settled is not None or (self._outcome is not None and self._outcome.known)
        return "" if there else "on its way"

    def _facts(self) -> tuple[bool, float, float]:
        if self._settled is None:
            if self._outcome is None:
                return False, math.nan, math.nan
            self._settled = self._outcome.skipped, self._outcome.norm, self._outcome.scale
            if self._loss is None:
                self._loss = self._mean(self._outcome.aside)
            self._outcome = None
        return self._settled


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _number(value: Posted | Tensor | float) -> float:
    if isinstance(value, Posted):
        return value.read()[0]
    return float(value.item()) if isinstance(value, Tensor) else value


class History(Sequence[Step]):
    """The last steps whose windows are closed, oldest first.

    ``history["loss"]`` is the list of losses; likewise for skipped, grad_norm, scale and lr.
    """

    def __init__(self, length: int) -> None:
        self._steps: deque[Step] = deque(maxlen=length)

    def append(self, step: Step) -> None:
        self._steps.append(step.bare())
        if len(self._steps) > SURELY_THERE:
            self._steps[-1 - SURELY_THERE].settle_if_there()

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
            if which not in FACTS:
                raise BadInput(f"history[{which!r}]: no such fact. There are {', '.join(FACTS)}.")
            return [getattr(step, which) for step in self._steps]
        return list(self._steps)[which] if isinstance(which, slice) else self._steps[which]

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def rows(self) -> list[dict[str, Any]]:
        """Plain data, a dict for each step."""
        return [step.as_dict() for step in self._steps]

    def clear(self) -> None:
        self._steps.clear()

    def __repr__(self) -> str:
        return f"<History of {len(self)} steps>"

    def _repr_html_(self) -> str:
        from ampwise.printers.html import bold, paragraph, table, text

        shown = list(self._steps)[-SHOWN:]
        rows = [[text(step.number), *(text(cell) for cell in step.cells())] for step in shown]
        title = paragraph(bold(f"{len(self):,} steps{f', the last {SHOWN}' if len(self) > SHOWN else ''}"))
        return title + table(("step", *FACTS), rows)
