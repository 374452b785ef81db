"""Facts about whether a run learns: what its steps used and changed, and the modes, schedules and data around them.

The rules of ``amp62x_learning``, ``amp63x_loop`` and ``amp64x_losses`` examine them. Counts are of followed steps;
``sampled`` and ``compared`` say of how many of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ampwise.finding.call_site import CallSite

__all__ = [
    "CountedCalls",
    "DilutedMean",
    "HalfAverage",
    "HeldFrozen",
    "IdleAverage",
    "IdleFreeze",
    "Learning",
    "LoaderUse",
    "ModelModes",
    "OptimizerUse",
    "OutsideParameters",
    "ScheduleUse",
    "SharedMemory",
    "SharedSteps",
    "UntiedWeights",
]


@dataclass(slots=True, kw_only=True)
class OptimizerUse:
    """What the steps of one optimizer used and changed."""

    index: int
    name: str  # its class
    made_at: CallSite
    steps: int = 0  # also those that were not followed
    followed: int = 0  # without those with a closure
    closures: int = 0  # steps with a closure
    step_site: CallSite = field(default_factory=CallSite)
    backwards: int = 0  # passes that gave it gradients
    backward_site: CallSite = field(default_factory=CallSite)
    zeroed: Counter[CallSite] = field(default_factory=Counter)  # calls of zero_grad that dropped unused gradients
    by_hand: bool = False  # it makes no steps, and the script changes its parameters itself
    # Gradients
    empty: int = 0  # steps without any gradient
    empty_at_last: int = 0  # in a row, up to now
    emptied: Counter[CallSite] = field(default_factory=Counter)  # of these: the zero_grad that had dropped them
    kept: int = 0  # steps whose gradients were still there, unchanged, when the next backward pass added to them
    cleared: int = 0  # steps whose gradients were not
    parameters: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # of the parameters that require gradients
    sampled: int = 0
    ungraded: list[str] = field(default_factory=list)  # trainable, and without a gradient in all samples
    replaced: int = 0  # of these, parameters that no living module has
    cut_off: tuple[str, ...] = ()  # names of the first modules that ran, if all of their parameters are ungraded
    cut_at: CallSite | None = None  # the line that takes what these parameters compute out of the graph
    # Weights
    precisions: tuple[str, ...] = ()  # of the parameters
    compared: int = 0  # steps with a gradient before and after which some weights were compared
    tried: int = 0  # weights with a gradient that were compared
    unchanged: int = 0  # compared steps that changed none of these
    largest_change: float = 0.0  # by a step, relative to the weights
    still: int = 0  # the last compared steps that changed none, although gradient times learning rate was large enough
    still_from: int = 0  # the first of them
    # If its parameters are weights of terms of the loss, which is smallest where they are 0: their mean size at some
    # backward passes
    term_weights: list[float] = field(default_factory=list)
    # Learning rate: the largest of all groups
    lr: float | None = None
    peak_lr: float = 0.0
    lr_set_in: str | None = None  # where the script has assigned one that no step reads
    lr_set_at: CallSite = field(default_factory=CallSite)
    low_since: int | None = None  # the step since which it is zero, or next to nothing of the highest

    @property
    def trainable(self) -> int:
        """Number of parameters that require gradients."""
        return len(self.shapes)


@dataclass(slots=True, kw_only=True)
class OutsideParameters:
    """Parameters of one model that got gradients, never changed, and that no optimizer had at any time."""

    model: str  # its class; empty for parameters in no module
    names: list[str]
    shapes: list[tuple[int, ...]]
    samples: int  # backward passes that gave them gradients
    first_step: int
    last_step: int
    passes: int  # backward passes that were followed from the first to the last of these
    held: int  # other parameters of the model that an optimizer has
    fixed: bool  # loaded, or in evaluation mode: perhaps not meant to be trained
    converted_at: CallSite | None = None  # the line that made an attribute of it, so that no module has it
    is_plain: bool = False  # it never was a parameter, but a tensor that requires gradients
    clip: WideClip | None = None  # that includes them


@dataclass(slots=True, kw_only=True)
class WideClip:
    """Clips by a norm that includes gradients of parameters that no optimizer has."""

    site: CallSite
    limit: float
    scaled: bool = False  # losses are scaled, and nothing unscales these gradients
    kept: int = 0  # times that they were still there in the next backward pass
    cleared: int = 0
    effective: list[float] = field(default_factory=list)  # lowest and highest limit for the optimizer's gradients
    first_bad: int | None = None  # step at which such a gradient was not finite
    spread: int = 0  # steps at which the optimizer's gradients were finite, until the clip


@dataclass(slots=True, kw_only=True)
class ModelModes:
    """In which mode a trained model ran."""

    model: str
    parts: list[str] = field(default_factory=list)  # classes of modules that act otherwise in evaluation mode
    trained: int = 0  # steps with a pass in training mode
    in_eval: int = 0  # steps since the last of these, all of whose passes were in evaluation mode
    first_in_eval: int = 0  # the first of them
    eval_site: CallSite | None = None  # the call of ``eval()`` before it
    evaluated: int = 0  # passes without gradients in evaluation mode
    mistaken: int = 0  # passes without gradients in training mode, several in a row on different inputs
    mistaken_step: int = 0  # the step after which the first of them ran
    mistaken_site: CallSite = field(default_factory=CallSite)


@dataclass(slots=True, kw_only=True)
class ScheduleUse:
    """A learning rate scheduler."""

    name: str
    made_at: CallSite
    optimizer: int  # index; -1 if unknown
    began: int = 0  # steps of the optimizer before
    steps: int = 0  # steps of the optimizer since
    moves: int = 0
    step_site: CallSite = field(default_factory=CallSite)
    position: int = 0  # its ``last_epoch``
    period: int | None = None  # moves after which a cosine turns
    inner: bool = False  # part of another scheduler
    counts_epochs: bool = False  # by the names in the code that makes it
    total: int | None = None  # moves that it was made for
    base_lr: float | None = None  # of a LambdaLR
    factors: set[float] = field(default_factory=set)  # some of those that its function returned, and the largest
    idle_moves: int = 0  # while its optimizer made no steps, and another one stepped the same parameters
    other: CallSite | None = None  # where that one was made


@dataclass(slots=True, kw_only=True)
class LoaderUse:
    """A DataLoader that is iterated over with gradients enabled."""

    site: CallSite  # the first iteration
    made_at: CallSite | None = None
    batches: int  # in a pass; 0: unknown
    in_order: bool  # not shuffled
    distributed: bool  # shuffled by a DistributedSampler, for several ranks
    batch_size: int = 0  # of batches with a row for each sample in all their tensors; 0: unknown
    passes: int = 0
    first_only: int = 0  # passes that ended after the first batch
    drawn: int = 0
    epochs: set[int] = field(default_factory=set)  # of the DistributedSampler


@dataclass(slots=True, kw_only=True)
class SharedSteps:
    """Steps of two optimizers in a row that used the same gradients of shared parameters."""

    pair: tuple[int, int]
    first: str  # its class
    second: str
    first_site: CallSite
    site: CallSite  # the second step
    parameters: list[str]
    times: int = 0


@dataclass(slots=True, kw_only=True)
class SharedMemory:
    """Two parameters of an optimizer that have the same memory."""

    first: str
    second: str
    optimizer: str
    made_at: CallSite


@dataclass(slots=True, kw_only=True)
class UntiedWeights:
    """Two parameters that are trained, and were one until a line assigned a new one."""

    first: str
    second: str
    site: CallSite


@dataclass(slots=True, kw_only=True)
class HalfAverage:
    """A 16-bit copy of a model that the script updates in place, and that is in no optimizer."""

    model: str  # its class
    precision: str
    site: CallSite  # where it was converted
    updates: int  # of each parameter between two looks
    values: int  # that were compared
    moved: int  # of these, how many the updates have changed


@dataclass(slots=True, kw_only=True)
class DilutedMean:
    """Mean losses that count ignored positions."""

    step: int
    positions: int
    ignored: int
    times: int = 0


@dataclass(slots=True, kw_only=True)
class IdleFreeze:
    """A line that is to freeze parameters, and freezes none of them."""

    why: str
    parameters: dict[str, None] = field(default_factory=dict)  # names, in order: these are trained on
    is_for_some: bool = False  # some of these only, or others like them
    are_frozen: bool = False  # and still changed


@dataclass(slots=True, kw_only=True)
class IdleAverage:
    """An average of the weights without effect."""

    name: str  # in the script
    why: str  # "never updated", "unchanged", "dropped" or "never used"


@dataclass(slots=True, kw_only=True)
class HeldFrozen:
    """A parameter of an optimizer that needs no gradient, by a default."""

    name: str
    optimizer: str  # its class
    why: str
    first: int  # step at which it was seen
    last: int = 0


@dataclass(slots=True, kw_only=True)
class CountedCalls:
    """Calls at one line."""

    step: int  # the first one
    times: int = 0
    what: str = ""
    at: CallSite | None = None  # the line within the loss, once it is known


@dataclass(slots=True, kw_only=True)
class Learning:
    """The facts of a run, so far or, if it has ended, of all of it."""

    ended: bool = False
    steps: int = 0
    optimizers: list[OptimizerUse] = field(default_factory=list)
    outside: list[OutsideParameters] = field(default_factory=list)
    models: list[ModelModes] = field(default_factory=list)
    schedules: list[ScheduleUse] = field(default_factory=list)
    loaders: list[LoaderUse] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)  # of some batches, the one that all samples have; -1: several
    shared: list[SharedSteps] = field(default_factory=list)
    same_memory: list[SharedMemory] = field(default_factory=list)
    untied: list[UntiedWeights] = field(default_factory=list)
    averages: list[HalfAverage] = field(default_factory=list)
    diluted: dict[CallSite, DilutedMean] = field(default_factory=dict)
    crossed: dict[CallSite, CountedCalls] = field(default_factory=dict)  # losses over all pairs
    normalised: dict[CallSite, CountedCalls] = field(default_factory=dict)  # losses that normalise probabilities again
    unlogged: dict[CallSite, CountedCalls] = field(default_factory=dict)  # losses of what is no logarithm
    unloaded: dict[CallSite, CountedCalls] = field(default_factory=dict)  # states of which no entry was loaded
    drawn_without_graph: dict[CallSite, CountedCalls] = field(default_factory=dict)  # samples that a loss depends on
    loaded_into_itself: dict[CallSite, CountedCalls] = field(
        default_factory=dict
    )  # states of the model that loads them
    unreachable: dict[CallSite, CountedCalls] = field(default_factory=dict)  # losses whose targets are out of range
    flat_penalties: dict[CallSite, CountedCalls] = field(default_factory=dict)  # of gradients without a graph
    scrambled: dict[str, CountedCalls] = field(default_factory=dict)  # views that swap the sizes of axes
    seen_targets: dict[CallSite, CountedCalls] = field(default_factory=dict)  # by what sees later positions
    copied_targets: dict[CallSite, CountedCalls] = field(default_factory=dict)  # that the model reads in place
    # Targets and advantages through which gradients flow, by what they are.
    target_graphs: dict[tuple[CallSite, str], CountedCalls] = field(default_factory=dict)
    maximised: dict[CallSite, CountedCalls] = field(default_factory=dict)  # likelihoods with the wrong sign
    wrong_terms: dict[CallSite, CountedCalls] = field(default_factory=dict)  # terms with the wrong sign
    minimised: int = 0  # with the right one
    reseeded: dict[CallSite, CountedCalls] = field(default_factory=dict)  # seeds after which steps draw the same
    spent: dict[CallSite, CallSite] = field(default_factory=dict)  # loops over used-up generators, and a call of each
    self_compared: dict[CallSite, bool] = field(
        default_factory=dict
    )  # losses of values and the same values; whether these are constant
    inverted_masks: list[CallSite] = field(default_factory=list)  # of padding, true for the other tokens
    cut_checkpoints: dict[CallSite, CountedCalls] = field(default_factory=dict)  # checkpoints that give no gradients
    mixed: dict[tuple[str, CallSite], CountedCalls] = field(
        default_factory=dict
    )  # along samples, by operation and line
    idle_freezes: dict[CallSite, IdleFreeze] = field(default_factory=dict)
    held_frozen: dict[tuple[CallSite, str], HeldFrozen] = field(default_factory=dict)  # by line and name
    idle_averages: dict[CallSite, IdleAverage] = field(default_factory=dict)
    stale_casts: dict[CallSite, CountedCalls] = field(default_factory=dict)  # steps in a region that goes on
    stale_buffers: dict[CallSite, CountedCalls] = field(default_factory=dict)  # averages of parameters only
    followed_states: dict[CallSite, CountedCalls] = field(default_factory=dict)  # loaded, and changed by steps before
    cut_terms: dict[CallSite, CountedCalls] = field(
        default_factory=dict
    )  # passes of losses with a term without a graph
    leaf_losses: dict[CallSite, CountedCalls] = field(default_factory=dict)  # backward passes of losses without a graph
    idle_clips: dict[CallSite, CountedCalls] = field(default_factory=dict)  # clips of nothing
    useful_clips: Counter[CallSite] = field(default_factory=Counter)
    clip_limits: dict[int, tuple[CallSite, float | None]] = field(default_factory=dict)  # the last, by optimizer
    nan_replaced: dict[CallSite, CountedCalls] = field(default_factory=dict)  # in losses and gradients
    always_dropped: dict[CallSite, CountedCalls] = field(default_factory=dict)  # functional dropout in evaluation
