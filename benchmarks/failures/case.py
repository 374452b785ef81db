"""What a program of the zoo hands over, and how its label is read.

A program is a file in ``failing/`` or ``healthy/`` with a function ``case()``. One line of a failing one ends with
``# guilty: KIND``: the one whose operation first makes the inf or the NaN that is the cause; for a failure of the
backward pass alone, the forward line whose derivative it is; for bad data, weights or statistics, the line of the first
operation that reads them. An infinity that was put there by hand, such as a mask of -inf, is no cause by itself.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampwise.errors import BadInput

__all__ = ["KINDS", "Case", "Label", "Program", "failing", "healthy", "label_of", "named"]

FOLDER = Path(__file__).parent
LABEL = re.compile(r"#\s*guilty:\s*(?P<kind>[\w-]+)\s*$")

KINDS: Mapping[str, str] = {
    "bad-batch": "NaN or inf in what the loss function was given",
    "bad-weights": "a parameter was bad before the step",
    "poisoned-statistics": "a buffer, such as BatchNorm's, is bad",
    "half-overflow": "a forward result beyond FP16's 65504 that FP32 would hold",
    "overflow": "a forward result beyond FP32's and BF16's range, other than in a loss function's exp or log",
    "outside-domain": "log of a number not positive, sqrt of a negative one, acos beyond 1, within a module",
    "division-by-zero": "in a normalisation, a masked mean, a cosine",
    "fully-masked-row": "softmax over a row that is -inf throughout",
    "mean-of-nothing": "mean of no elements, all labels ignored, standard deviation of one element",
    "infinite-derivative": "a finite forward pass, and a derivative that is infinite where it is taken",
    "gradient-overflow": "the loss is finite, and a gradient beyond FP16's range at loss scale 1 too",
    "optimizer-division": "the optimizer's update made the weights bad; gradients were finite",
    "custom-op": "made inside an operator of one's own, which cannot be looked into",
    "cancelled-infinities": "inf - inf or 0 * inf, of infinities put there by hand",
    "unstable-loss": "exp overflows or log sees a zero, written by hand in the loss function",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained: ``for batch in batches: engine.step(loss_fn, *batch)``."""

    model: Module
    loss_fn: Callable[..., Tensor]
    batches: Sequence[tuple[Any, ...]]
    optimizer: Optimizer
    precision: str = "fp16"
    options: Mapping[str, Any] = field(default_factory=dict)  # of ampwise.Engine
    direct: bool = False  # the failure shows in one call of loss_fn, without autocast: ampwise.trace can have it


@dataclass(frozen=True)
class Label:
    line: int
    kind: str


@dataclass(frozen=True)
class Program:
    """A file of the zoo, not yet run."""

    name: str
    path: Path
    label: Label | None  # None: healthy

    def case(self) -> Case:
        """A new one each time, alike each time."""
        module = importlib.import_module(f"{__package__}.{self.path.parent.name}.{self.name}")
        made = module.case()
        assert isinstance(made, Case), f"{self.path}: case() returns no Case"
        return made


def label_of(path: Path) -> Label | None:
    """The label in a program's text."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [Label(number, match["kind"]) for number, line in enumerate(lines, 1) if (match := LABEL.search(line))]
    if len(found) > 1:
        raise BadInput(f"{path}: {len(found)} lines are labelled guilty; a program has one")
    if found and found[0].kind not in KINDS:
        raise BadInput(f"{path}:{found[0].line}: no kind {found[0].kind!r}; there are {', '.join(KINDS)}")
    return found[0] if found else None


def failing() -> list[Program]:
    return _programs("failing")


def healthy() -> list[Program]:
    return _programs("healthy")


def named(names: Iterable[str]) -> list[Program]:
    """The programs of these names, or all of them."""
    every = {program.name: program for program in [*failing(), *healthy()]}
    if missing := [name for name in names if name not in every]:
        raise BadInput(f"no program {missing[0]!r} in benchmarks/failures; there are {', '.join(every)}")
    return [every[name] for name in names] or list(every.values())


def _programs(folder: str) -> list[Program]:
    return [Program(path.stem, path, label_of(path)) for path in sorted((FOLDER / folder).glob("[!_]*.py"))]
