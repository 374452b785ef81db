"""The contents of a capsule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ampwise.finding import Finding

__all__ = ["CapsuleContents"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapsuleContents:
    """The state before a step, and the step's result."""

    args: tuple[Any, ...] = ()  # arguments of the loss function: tensors and plain data
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    random: Mapping[str, Any] | None = None  # from random_state
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # empty: not saved
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    precision: str = "fp32"
    policy: Mapping[str, Any] | None = None  # from Policy.as_dict
    scale: float = 1.0  # loss scale
    step: int | None = None
    rank: int = 0
    loss: float | None = None
    build: str | None = None  # function that builds model and loss function: "train:make" or "train.py:make"
    build_args: Mapping[str, Any] = field(default_factory=dict)
    findings: Sequence[Finding] = ()  # reported when it was saved
    evaluating: Sequence[str] | None = None  # names of modules in evaluation mode; None: as the model is built
    device: str | None = None  # device type that it ran on; None: that of its tensors
    environment: Mapping[str, Any] = field(default_factory=dict)  # added when it is written
