"""A failed training step and its origin, which the rules about operations examine.

It is built by replaying the step (``ampwise.trace``). A value that is not finite either came in from outside
(``BadTensor``) or originated in an operation (``Origin``); the kind of failure follows from these facts alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ampwise.finding.call_site import CallSite
from ampwise.numbers.op_families import is_collective, is_custom
from ampwise.trace.failure_facts import FP32_MAX, BadTensor, FixTrial, OptimizerFacts, Origin, known_as_json

if TYPE_CHECKING:
    from ampwise.trace.remedies import Remedy

__all__ = ["KINDS", "Failure"]

NAMED_GRADIENTS = 10  # names in the evidence; there is also a count


# Kinds of failure, each with a rule of the same name.
KINDS = (
    "bad-batch",
    "bad-weights",
    "poisoned-statistics",
    "half-overflow",
    "overflow",
    "outside-domain",
    "division-by-zero",
    "fully-masked-row",
    "mean-of-nothing",
    "infinite-derivative",
    "gradient-overflow",
    "optimizer-division",
    "custom-op",
    "from-another-rank",
    "not-reproduced",
    "swallowed-infinity",
    "cancelled-infinities",
    "unstable-loss",
    "kernel-fault",
    "exploding-update",
    "compiler-fault",
)
# What weights that have grown without bound lead to.
OF_LARGE_WEIGHTS = (
    "overflow",
    "half-overflow",
    "gradient-overflow",
    "unstable-loss",
    "cancelled-infinities",
    "bad-weights",
)
KERNEL = "kernel"  # the change of a trial with another kernel
COMPILER = "compiler"  # that of a trial with another backend of torch.compile, or without it
# Operation families with a single failure kind, unless FP64 is finite.
FIXED = {"normalisation": "division-by-zero", "determinant": "outside-domain", "loss": "unstable-loss"}
OF_BOUNDS = ("division-by-zero", "infinite-derivative", "outside-domain", "unstable-loss")
PARTIAL_DOMAIN = ("logarithm", "gamma", "root", "power", "arc")
SOURCE_KINDS = {"parameter": "bad-weights", "buffer": "poisoned-statistics"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed step and everything its replay showed."""

    symptom: str = "loss"  # what is not finite: "loss" or "gradients", "weights"; "value" for a swallowed infinity
    loss: float | None = None
    bad_gradients: tuple[str, ...] = ()  # parameters
    gradients: int = 0  # number of all gradients
    origin: Origin | None = None  # the operation that caused it
    nan_origin: Origin | None = None  # where infinities became NaN, if elsewhere
    source: BadTensor | None = None  # or the bad input
    precision: str = "fp32"
    device: str = "cuda"  # torch's device type
    scale: float = 1.0  # loss scale when it failed
    fitting_scale: float | None = None  # the largest power of two at which gradients would be finite
    step: int | None = None
    rank: int | None = None  # where it originated, if there are several
    ranks: int = 1
    has_modules: bool = True  # whether any operation ran in a module
    swallowed: bool = False  # the infinity was turned into a finite value
    not_reproduced: str = ""  # what was tried, if the replay was finite
    compiled: bool = False  # torch.compile has compiled a part of it
    remarks: tuple[str, ...] = ()  # notes about the replay
    optimizer: OptimizerFacts | None = None
    trials: tuple[FixTrial, ...] = ()

    def but(self, **changes: Any) -> Failure:
        return replace(self, **changes)

    def untried_fix(self) -> Remedy | None:
        """Return the most likely fix, without having tried it."""
        from ampwise.trace.remedies import remedies_for

        # A swallowed infinity has the same fix as one that was not, but a replay cannot show that it helps: the step
        # is finite without it.
        return next(iter(remedies_for(self.but(swallowed=False))), None)

    def evidence(self) -> dict[str, Any]:
        """Return everything known as plain data: ``trace`` for machines, the other keys for people."""
        culprit, nan_origin, source = self.culprit, self.nan_origin, self.source
        trace: dict[str, Any] = {} if culprit is None else culprit.as_dict()
        if nan_origin is not None:
            inputs = [values.as_dict() for values in nan_origin.inputs]
            place = {"place": str(nan_origin.site), "module": nan_origin.module}
            trace["nan_origin"] = {"op": nan_origin.op, **place, "inputs": inputs}
        trace |= {
            "source": None if source is None else known_as_json(source.as_dict()),
            "optimizer": None if self.optimizer is None else known_as_json(asdict(self.optimizer)),
            "symptom": self.symptom,
            "loss": self.loss,
            "precision": self.precision,
            "scale": self.scale,
            "fitting_scale": self.fitting_scale,
            "bad_gradients": self.bad_gradients[:NAMED_GRADIENTS],
            "bad_gradient_count": len(self.bad_gradients) or None,
            "gradients": self.gradients or None,
            "trials": [
                {
                    "what": trial.what,
                    "code": trial.code,
                    "change": trial.change,
                    "argument": trial.argument,
                    "finite": trial.finite,
                    "loss_before": self.loss,
                    "loss_after": trial.loss,
                    "bad_gradients_before": len(self.bad_gradients),
                    "bad_gradients_after": trial.bad_gradients,
                    "earlier_batch_before": None if trial.usual is None else trial.usual[0],
                    "earlier_batch_after": None if trial.usual is None else trial.usual[1],
                }
                for trial in self.trials
            ],
            "remarks": self.remarks,
        }
        shown = {"op": None if culprit is None else culprit.op, "note": " ".join(self.remarks)}
        return {**known_as_json(shown), "trace": known_as_json(trace)}

    @property
    def culprit(self) -> Origin | None:
        """The operation to examine: the origin, or the first to read the bad value."""
        return self.origin or (self.source.first_use if self.source is not None else None)

    @property
    def site(self) -> CallSite:
        """The line to blame."""
        facts = self.optimizer
        if facts is not None:
            by_lr = (facts.has_absurd_lr and self.kind == "bad-weights") or self.kind == "exploding-update"
            by_division = self.kind == "optimizer-division" and self.origin is None
            made_at = (facts.lr_set_at if facts.lr_set_at.file else facts.made_at) if by_lr else facts.made_at
            if made_at.file and (by_lr or by_division):
                return made_at
        bounds = [each for each in self.origin.literals if each.is_bound] if self.origin is not None else []
        if bounds and bounds[0].site.file and self.kind in OF_BOUNDS:  # a guard without effect in this format
            return bounds[0].site
        if self.origin is not None and self.origin.exponential.file:
            return self.origin.exponential
        if self.source is not None and self.source.drawn is not None and self.source.drawn.site.file:
            return self.source.drawn.site
        if self.source is not None and self.source.made_at.file:
            return self.source.made_at
        return self.culprit.site if self.culprit is not None else CallSite()

    @property
    def kind(self) -> str:
        """Kind of failure, one of KINDS."""
        kind, facts = self._kind_of_cause(), self.optimizer
        return "exploding-update" if facts is not None and facts.has_exploded and kind in OF_LARGE_WEIGHTS else kind

    def _kind_of_cause(self) -> str:
        source, origin = self.source, self.origin
        if any(trial.change == COMPILER and trial.finite for trial in self.trials):
            return "compiler-fault"
        if self.not_reproduced or (source is None and origin is None):
            return "not-reproduced"
        if source is not None:
            if source.what == "parameter" and self.optimizer is not None and self.optimizer.has_divided:
                return "optimizer-division"
            return SOURCE_KINDS.get(source.what, "bad-batch")
        assert origin is not None
        if is_collective(origin.op):
            return "from-another-rank"
        if any(trial.change == KERNEL and trial.finite for trial in self.trials):
            return "kernel-fault"
        return "swallowed-infinity" if self.swallowed else self._kind_of_origin(origin)

    def _kind_of_origin(self, origin: Origin) -> str:
        if is_custom(origin.op):
            return "custom-op"
        if origin.phase == "optimizer":
            return "optimizer-division"
        if origin.by_hand:
            return "cancelled-infinities"
        if origin.from_infinities:
            return "fully-masked-row" if origin.family == "softmax" else "cancelled-infinities"
        if origin.phase == "backward" and not origin.live:
            overflowed = origin.exact == "finite" or (origin.exact is None and origin.is_narrow)
            return "gradient-overflow" if overflowed else "infinite-derivative"
        kind = self._kind_of_forward(origin)
        # In a hook, or in a custom backward pass.
        return "gradient-overflow" if origin.phase == "backward" and kind.endswith("overflow") else kind

    def _kind_of_forward(self, origin: Origin) -> str:
        if origin.made == "nan" and (origin.family == "mean" or any(0 in each.shape for each in origin.inputs)):
            return "mean-of-nothing"
        if origin.family == "softmax" and origin.made == "nan":
            return "fully-masked-row"
        in_loss = self.has_modules and (not origin.module_class or origin.module_class.endswith("Loss"))
        if in_loss and (origin.family == "exponential" or (origin.family == "logarithm" and _is_outside(origin))):
            return "unstable-loss"
        if origin.family in FIXED and not (origin.family == "normalisation" and origin.exact == "finite"):
            return FIXED[origin.family]
        if origin.zero_divisors:
            return "division-by-zero"
        if _is_outside(origin) or (origin.made == "nan" and origin.family in PARTIAL_DOMAIN):
            return "outside-domain"
        if origin.family == "division" and origin.exact != "finite":
            return "division-by-zero"
        fits_fp32 = origin.exact in ("finite", None) and (origin.exact_largest or 0.0) <= FP32_MAX
        return "half-overflow" if origin.is_narrow and fits_fp32 else "overflow"


def _is_outside(origin: Origin) -> bool:
    """Return whether an argument was outside the domain; assumed for a logarithm whose values are unknown."""
    return bool(origin.outside_domain) or (origin.output is None and origin.family in ("logarithm", "gamma", "arc"))
