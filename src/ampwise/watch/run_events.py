"""Records of what a script did in its training steps: one for each relevant call, with the state at that moment.

Each record says where the call was made (``site``) and what the state was: whether gradients were multiplied by a loss
scale, whether a step had used them, and so on. A rule's ``check`` takes one kind of record, selected by the type of its
argument. Records of the same call in the same state are equal, so a call made in a million steps is checked once and
counted a million times.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ampwise.finding.call_site import CallSite

__all__ = [
    "Backward",
    "CheckpointSaved",
    "Clip",
    "ForwardCall",
    "GradNormRead",
    "OptimizerStep",
    "ReplicaSum",
    "RunEvent",
    "RunEvents",
    "ScalerCreated",
    "ScalerStep",
    "ScalerUpdate",
    "SchedulerStep",
    "ScriptFailed",
    "Unscale",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Base of the records."""

    site: CallSite = field(default_factory=CallSite)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCall(RunEvent):
    """A model ran."""

    training: bool  # gradients enabled, and the model in training mode
    precision: str  # of the surrounding autocast: "fp16", "bf16", or "fp32" if off
    device: str  # "cuda", "cpu"
    model: str = ""  # its class
    number: int | None = None  # index among the trained models; None for a copy
    other_half: str | None = None  # the other 16-bit format, if an earlier model ran in it in the same step
    gathered: str | None = None  # the precision in which FSDP2 gathers its weights, if that is not their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(RunEvent):
    """``loss.backward()``."""

    scaled: bool  # the loss came from ``scaler.scale``
    scaled_by_constant: float | None = None  # a fixed factor, not a scaler's
    autocast: str | None = None  # precision of the surrounding autocast, if on
    loss_is_mean: bool | None = None  # a mean that is not divided afterwards; None: unknown
    loss: str = "fp32"  # precision of the loss, before it was scaled
    fsdp_output: str | None = None  # precision that FSDP2 gives the output of the model that ran last
    partly: bool = False  # some terms of the loss came from ``scaler.scale``, others did not


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip(RunEvent):
    """Gradients clipped by one of torch's functions."""

    function: str
    scaled: bool  # they are multiplied by the loss scale
    limit: float | None = None  # the clipping threshold
    backward: CallSite | None = None  # the pass that scaled them


@dataclass(frozen=True, slots=True, kw_only=True)
class GradNormRead(RunEvent):
    """A gradient norm that is computed without changing the gradients."""

    function: str
    scaled: bool
    backward: CallSite | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscale(RunEvent):
    """``scaler.unscale_(optimizer)``."""

    again: bool = False  # since the last update
    half_parameters: bool = False
    earlier: CallSite | None = None  # the call before, if this one is ``again``
    new_pass: bool = False  # a backward pass came between the two
    left_overflow: bool = False  # of gradients cleared since, in which the call before found inf or NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleInLoss(RunEvent):
    """``scaler.scale`` within the code of a loss, part of which remains multiplied by the scale."""

    scale: float
    loss: float  # at this scale, in a replay
    at_half: float  # the loss at half the scale


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerStep(RunEvent):
    """``scaler.step(optimizer)``."""

    optimizer: str  # its class
    again: bool = False  # second step since the last update
    backwards: int = 0  # passes whose gradients it uses
    unscaled: tuple[Backward, ...] = ()  # passes without ``scaler.scale``, entirely or in part
    undivided: tuple[Backward, ...] = ()  # accumulated means that were not divided
    closure: bool = False
    half_parameters: bool = False
    eps: float | None = None  # of Adam-like optimizers
    precisions: tuple[str, ...] = ()  # of autocast since the last step
    mixed_forward: bool = False  # already reported for a forward pass
    fsdp: bool = False  # a model wrapped by FSDP1 with a plain scaler
    bare: bool = False  # the optimizer was also stepped directly, with the same gradients
    unscaled_midway: CallSite | None = None  # where gradients were unscaled before more were added
    threads: int = 1  # that use this scaler


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep(RunEvent):
    """``optimizer.step()`` called directly, not by a scaler."""

    optimizer: str
    scaled: bool = False  # the backward pass was scaled by a scaler, which would skip non-finite gradients
    unscaled: bool = False  # the gradients were unscaled again
    again: bool = False  # repeats the scaler's step, without a backward in between
    backwards: int = 0
    undivided: tuple[Backward, ...] = ()
    scaled_by_constant: float | None = None
    precisions: tuple[str, ...] = ()
    mixed_forward: bool = False
    scaler: bool = False  # an enabled scaler exists
    parameters: tuple[str, ...] = ("fp32",)  # their precisions
    eps: float | None = None  # of Adam-like optimizers
    backward: CallSite | None = None  # the last pass whose gradients it uses
    plain: bool = True  # one of torch's, which accumulates in the parameters' dtype
    cast_at: CallSite | None = None  # the line that gave the first parameter 16 bits, if it is known

    @property
    def half_parameters(self) -> bool:
        """Whether parameters are in FP16."""
        return "fp16" in self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerUpdate(RunEvent):
    """``scaler.update()``."""

    steps: int = 0  # by this scaler since its last update
    pending: bool = False  # unused gradients existed, and a later pass added to them
    earlier: tuple[int, ...] = ()  # optimizers stepped before the previous update in the same iteration
    earlier_site: CallSite | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStep(RunEvent):
    """``scheduler.step()`` after an optimizer's step."""

    scheduler: str
    per_step: bool  # called once per step, not once per epoch
    after_skip: bool
    before_any_update: bool = False  # the first step was skipped, and torch warns that the scheduler came first


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerCreated(RunEvent):
    """``GradScaler(...)``."""

    enabled: bool = True
    times: int = 1  # created at this line
    stepped_before: bool = False  # an earlier scaler from this line had taken steps
    precisions: tuple[str, ...] = ()  # of its steps, by the end of the run


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(RunEvent):
    """``torch.save`` of an object that contains an optimizer's or a scaler's state."""

    optimizer: bool
    scaler: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFailed(RunEvent):
    """The script ended with an exception."""

    error: str  # its type
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSum:
    """Sums of some weights and gradients of one rank, before an update."""

    optimizer: int
    step: int
    wrapped: bool  # by a DistributedDataParallel over all ranks
    weights: tuple[float, ...]
    gradients: tuple[float, ...]
    firsts: tuple[float, ...] = ()  # of the first halves of the gradients
    file: str  # where the optimizer was made
    line: int


@dataclass(slots=True, kw_only=True)
class RunEvents:
    """Records of a whole run, complete at its end."""

    steps: int = 0  # of all optimizers
    forwards: Counter[ForwardCall] = field(default_factory=Counter)
    scalers: list[ScalerCreated] = field(default_factory=list)
    unused_scalers: list[ScalerCreated] = field(default_factory=list)
    saves: Counter[CheckpointSaved] = field(default_factory=Counter)
    dropped: Counter[CallSite] = field(default_factory=Counter)  # steps before which zero_grad dropped unused gradients
    scales_by_rank: dict[int, dict[int, float]] = field(default_factory=dict)  # rank: {step: scale}
    replicas: dict[int, list[ReplicaSum]] = field(default_factory=dict)  # by rank
    bf16_emulated_on: str | None = None  # name of the device, if BF16 was used and is emulated
