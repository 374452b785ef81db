"""What a script did in its training steps: one record for each call that matters, with what was known of it then.

Each record says where it was called (``site``), and the state of things at that moment: whether gradients in memory
were multiplied by a loss scale, whether they had been read by a step, and so on. A rule's ``check`` takes one of them;
the type of its argument says which. Records of the same call in the same state are equal, so that a call of a million
steps is judged once and counted a million times.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ampwise.finding import Place

__all__ = [
    "Backward",
    "Clip",
    "Conduct",
    "Died",
    "Event",
    "Forward",
    "Measured",
    "OptimizerStep",
    "Saved",
    "ScalerMade",
    "ScalerStep",
    "Scheduled",
    "Site",
    "Unscale",
    "Update",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A line of the user's, and the library it went through, if it did."""

    file: str | None = None
    line: int | None = None
    function: str = ""
    through: str = ""  # "accelerate/optimizer.py:123"
    called_from: str = ""  # the line of the user's that called the function it is in: "train.py:30"

    @property
    def place(self) -> Place:
        return Place(file=self.file, line=self.line)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "(an unknown place)"

    @property
    def short(self) -> str:
        """The line alone, for a sentence about one file."""
        return f"line {self.line}" if self.line else "an unknown line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something the script did."""

    site: Site = field(default_factory=Site)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Event):
    """A model ran."""

    training: bool  # gradients enabled, and the model in training mode
    precision: str  # of autocast around it: "fp16", "bf16", or "fp32" where it is off
    device: str  # "cuda", "cpu"
    model: str = ""  # its class
    number: int | None = None  # which of the models that optimizers train; None of a copy
    other_half: str | None = None  # what an earlier model ran in, in the same step, if that is the other half format


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(Event):
    """``loss.backward()``."""

    scaled: bool  # the loss came from ``scaler.scale``
    scaled_by_constant: float | None = None  # by hand
    autocast: str | None = None  # its precision, where autocast is on around the call
    loss_is_mean: bool | None = None  # a mean that nothing divided afterwards; None: cannot tell
    partly: bool = False  # some terms of the loss came from ``scaler.scale``, others did not


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip(Event):
    """Gradients clipped by one of torch's functions."""

    function: str
    scaled: bool  # they are multiplied by the loss scale
    limit: float | None = None  # that they are clipped to
    backward: Site | None = None  # that made them so


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Event):
    """The norm of gradients asked for, and nothing changed."""

    function: str
    scaled: bool
    backward: Site | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscale(Event):
    """``scaler.unscale_(optimizer)``."""

    again: bool = False  # since the last update
    half_parameters: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerStep(Event):
    """``scaler.step(optimizer)``."""

    optimizer: str  # its class
    again: bool = False  # the second since the last update
    backwards: int = 0  # passes whose gradients it takes
    unscaled: tuple[Backward, ...] = ()  # those of them without ``scaler.scale``, in whole or in part
    undivided: tuple[Backward, ...] = ()  # means, added up, that nothing divided
    closure: bool = False
    half_parameters: bool = False
    eps: float | None = None  # of Adam and its like
    precisions: tuple[str, ...] = ()  # that autocast had since the last step
    mixed_forward: bool = False  # which a forward pass has shown already
    fsdp: bool = False  # a model wrapped by FSDP1, and a scaler that knows nothing of it
    bare: bool = False  # the optimizer was stepped without the scaler too, with the same gradients
    unscaled_midway: Site | None = None  # unscaled, and then added to
    threads: int = 1  # that have used this scaler


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep(Event):
    """``optimizer.step()``, not by a scaler."""

    optimizer: str
    scaled: bool = False  # the backward pass was: by a scaler, which would have skipped what is not finite
    unscaled: bool = False  # and the gradients divided again
    again: bool = False  # without a backward since the scaler's step, which it repeats
    backwards: int = 0
    undivided: tuple[Backward, ...] = ()
    scaled_by_constant: float | None = None
    precisions: tuple[str, ...] = ()
    mixed_forward: bool = False
    scaler: bool = False  # one exists, enabled
    parameters: tuple[str, ...] = ("fp32",)  # their precisions
    eps: float | None = None  # of Adam and its like
    backward: Site | None = None  # of the last pass whose gradients it takes
    plain: bool = True  # one of torch's, which sums up in what it stores


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(Event):
    """``scaler.update()``."""

    steps: int = 0  # by this scaler since its last update
    pending: bool = False  # gradients were in memory that no step had taken, and a later pass has added to them
    earlier: tuple[int, ...] = ()  # stepped before the update before, in the same round of optimizers
    earlier_site: Site | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled(Event):
    """``scheduler.step()`` after an optimizer's step."""

    scheduler: str
    per_step: bool  # it has moved once for every step, not once an epoch
    after_skip: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerMade(Event):
    """``GradScaler(...)``."""

    enabled: bool = True
    times: int = 1  # at this line
    stepped_before: bool = False  # one made at this line had taken steps
    precisions: tuple[str, ...] = ()  # of the steps it has taken, by the end of the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Event):
    """``torch.save`` of something with an optimizer's state, or a scaler's."""

    optimizer: bool
    scaler: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Died(Event):
    """The script ended with an exception."""

    error: str  # its type
    message: str


@dataclass(slots=True, kw_only=True)
class Conduct:
    """The whole run, once it is over."""

    steps: int = 0  # of all optimizers
    forwards: dict[Forward, int] = field(default_factory=dict)
    scalers: list[ScalerMade] = field(default_factory=list)
    unused_scalers: list[ScalerMade] = field(default_factory=list)
    saves: dict[Saved, int] = field(default_factory=dict)
    dropped: dict[Site, int] = field(default_factory=dict)  # steps before which zero_grad dropped unused gradients
    scales_by_rank: dict[int, dict[int, float]] = field(default_factory=dict)  # rank: {step: scale}
    bf16_emulated_on: str | None = None  # the device's name, where BF16 was used and is emulated
