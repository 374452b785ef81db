"""What a capsule holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ampwise.finding import Finding

__all__ = ["Contents"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A step, as it was before it ran, and how it ended."""

    args: tuple[Any, ...] = ()  # what the loss function was given: tensors and plain data
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    random: Mapping[str, Any] | None = None  # as random_state gives it
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # none: they were not saved
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    precision: str = "fp32"
    policy: Mapping[str, Any] | None = None  # as Policy.as_dict gives it
    scale: float = 1.0  # of the loss
    step: int | None = None
    rank: int = 0
    loss: float | None = None
    build: str | None = None  # what makes model and loss function: "train:make" or "train.py:make"
    build_args: Mapping[str, Any] = field(default_factory=dict)
    findings: Sequence[Finding] = ()  # of the time when it was saved
    evaluating: Sequence[str] | None = None  # modules in evaluation mode, by name; None: as the model is built
    device: str | None = None  # the kind that it ran on; where nobody tells, that of its tensors
    environment: Mapping[str, Any] = field(default_factory=dict)  # filled in when it is written
