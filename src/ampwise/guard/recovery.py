"""The rungs of the ladder, taken: back to a good state, on to a wider precision, or to an end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ampwise.engine.capsules import Capsules
from ampwise.engine.engine import Engine
from ampwise.engine.precision.policy import Policy
from ampwise.engine.precision.precision import EMULATE, facts_of
from ampwise.evidence.faults import (
    ClimbedBack,
    LossSpike,
    PrecisionChanged,
    RolledBack,
    ScaleAtFloor,
    StepSkipped,
    TrainingStopped,
)
from ampwise.evidence.spikes import SpikeWatch
from ampwise.finding import Finding
from ampwise.guard.agreement import Agreement
from ampwise.guard.checkpointing import Checkpointing
from ampwise.guard.ends import STOPPED, Stopped
from ampwise.guard.ladder import Facts, Ladder, Move, Standing
from ampwise.guard.position import Position
from ampwise.guard.resuming import Resuming
from ampwise.guard.saving import not_finite
from ampwise.guard.snapshots import Snapshot
from ampwise.guard.state import Whole
from ampwise.guard.telling import Telling
from ampwise.low_bit.pure import PURE
from ampwise.trace.ranges import local

__all__ = ["Diagnosis", "Recovery", "diagnosis"]

WIDER = ("fp16", "bf16", "tf32", "fp32")  # each has more range or more bits than the one before
EXACT = ("tf32", "fp32")  # in which no module gains anything from FP32
SAVED_FROM = 2  # bad steps in a row: one alone is not worth the weights of a model on disk


class Diagnosis(NamedTuple):
    """What the tracer has to say about bad steps, plain enough to be told to other ranks."""

    kind: str = ""  # of an incident, such as "half-overflow"
    words: str = ""
    patterns: tuple[str, ...] = ()  # modules that help if they are kept in FP32: it was tried
    capsule: str = ""
    build: str = ""  # what makes the model of the capsule
    narrow: tuple[str, ...] = ()  # layers whose values FP8 does not hold


def diagnosis(found: Sequence[Finding]) -> Diagnosis:
    """Of the step that was explained last."""
    if not found:
        return Diagnosis()
    first = found[0]
    trials = [trial for finding in found for trial in finding.evidence.get("trace", {}).get("trials") or ()]
    kept = [trial["argument"] for trial in trials if trial.get("change") == "keep" and trial.get("finite")]
    saved = next((each.evidence for each in found if each.evidence.get("capsule")), {})
    file, line = first.place.file, first.place.line
    where = "" if file is None else f" ({Path(file).name}:{line})"
    words = first.message.partition(";")[0]  # what it was, without what it was given
    capsule, build = (str(saved.get(name, "")) for name in ("capsule", "build"))
    return Diagnosis(first.rule.name, f"{words}{where}", tuple(dict.fromkeys(kept)), capsule, build)


class Recovery:
    """Judges each step, and does what the ladder calls for."""

    def __init__(
        self,
        ladder: Ladder,
        engine: Engine,
        whole: Whole,
        checkpointing: Checkpointing,
        resuming: Resuming,
        position: Position,
        agreement: Agreement,
        telling: Telling,
        capsules: Path,
    ) -> None:
        self._ladder, self._engine, self._whole = ladder, engine, whole
        self._checkpointing, self._resuming, self._position = checkpointing, resuming, position
        self._agreement, self._telling = agreement, telling
        self._capsules = Capsules(capsules)
        self._spikes = SpikeWatch()
        self._before: list[Policy] = []  # precisions that were left for wider ones
        self._last_applied = 0
        self._capsule = self._build = ""  # the last: few are saved in a run
        self.standing = Standing(ladder)
        self.rollbacks = 0  # in all
        self.times_back = 0  # to an earlier state, by a rollback or for another precision

    def begin(self, step: int, state: Mapping[str, Any]) -> None:
        """From this step on; ``state`` is that of a run that is resumed."""
        self._last_applied = step
        self._before = [Policy.from_dict(each) for each in state.get("policies_before", ())]
        self.standing.widened = len(self._before)
        if state.get("spikes") is not None:
            self._spikes.load(state["spikes"])
        if self._ladder.skips == 1:  # there will be no second
            self._engine.save_bad_steps(self._capsules)

    def state(self) -> dict[str, Any]:
        """For a run that is resumed."""
        return {"policies_before": [policy.as_dict() for policy in self._before], "spikes": self._spikes.state()}

    def judge(self, facts: Facts) -> bool:
        """Whether the state was changed, so that what came after this step is void."""
        facts = self._with_spike(facts)
        if not facts.skipped:
            self._last_applied = facts.number
        move = self.standing.move(facts)
        if move is Move.GO_ON:
            self._go_on(facts)
        elif move is Move.SKIP:
            self._skip(facts)
        elif move is Move.CLIMB:
            self._climb(facts)
        elif move is Move.ROLL_BACK:
            return self._next_rung(facts)
        return False

    def _with_spike(self, facts: Facts) -> Facts:
        if facts.bad:
            return facts
        spike = self._spikes.add(facts.number, facts.loss)
        if spike is None:
            return facts
        goes_back = self._ladder.on_spike == "rollback"
        self._telling.tell(
            LossSpike(
                step=facts.number,
                loss=spike.loss,
                usual=spike.usual,
                spreads=spike.spreads,
                action="rollback" if goes_back else "none",
            ),
            facts.number,
        )
        return facts._replace(spike=True)

    def _go_on(self, facts: Facts) -> None:
        if self.standing.healthy == 1 and self._ladder.skips > 1:
            self._engine.save_bad_steps(None)
        if self.standing.healthy >= self._ladder.healthy:
            self._checkpointing.trust(facts.number, self._ladder.healthy)

    def _skip(self, facts: Facts) -> None:
        streak = len(self.standing.streak)
        if streak == SAVED_FROM - 1:
            self._engine.save_bad_steps(self._capsules)
        if facts.at_floor and math.isfinite(facts.loss):  # a loss that is NaN by itself is not the scale's fault
            self._telling.tell(ScaleAtFloor(step=facts.number, scale=facts.scale, streak=streak), facts.number)
            return
        scale = facts.scale if facts.scaled else None
        self._telling.tell(
            StepSkipped(step=facts.number, loss=facts.loss, scale=scale, streak=streak, scaled=facts.scaled),
            facts.number,
        )

    # The rungs

    def _next_rung(self, facts: Facts) -> bool:
        seen = diagnosis(self._engine.explained)._replace(narrow=_too_narrow(self._engine))
        found = self._agreement.first_says(seen)
        if found.capsule:
            self._capsule, self._build = found.capsule, found.build
        goes_back = facts.spike or self._would_change()
        policy = self._wider(found.patterns, found.narrow)
        spike = facts.spike and not facts.bad
        rung = self.standing.rung(goes_back=goes_back, cause=found.kind, wider=policy is not None, spike=spike)
        cause = _cause(facts, len(self.standing.streak), found)
        if rung is Move.ROLL_BACK:
            self._roll_back(facts, cause)
        elif rung is Move.WIDEN and policy is not None:
            self._widen(facts, cause, policy, goes_back)
        elif rung is Move.STOP:
            self._stop(facts, cause)
        return rung is not Move.GO_ON

    def _would_change(self) -> bool:
        """Whether the state is another than that of the last good snapshot: after a step, or because someone wrote."""
        good = self._checkpointing.snapshots.good
        assert good is not None, "there is one from the beginning"
        live = self._whole.live()
        values = {name: local(tensor) for name, tensor in live.tensors.items() if name not in live.transient}
        return any(self._agreement.all_of(self._last_applied > good.step or bool(not_finite(values, live.moving))))

    def _roll_back(self, facts: Facts, cause: str) -> None:
        began = time.perf_counter()
        streak = list(self.standing.streak)
        passed = self._position.batches_of(streak)
        to_step, source = self._restore(older=self.standing.rollbacks > 0)
        rewound = self._position.pass_over(passed)
        self._engine_is_anew(to_step)
        self.rollbacks += 1
        self.standing.taken(Move.ROLL_BACK, f"going back to step {to_step}")
        self._telling.tell(
            RolledBack(
                step=facts.number,
                to_step=to_step,
                source=source,
                milliseconds=(time.perf_counter() - began) * 1e3,
                streak=len(streak),
                cause=cause,
                passed_over=tuple(passed),
                rewound=rewound,
            ),
            facts.number,
        )

    def _restore(self, *, older: bool) -> tuple[int, Literal["memory", "disk"]]:
        """The last good snapshot; or what is older on disk, where that one has not helped."""
        self.times_back += 1
        good = self._checkpointing.snapshots.good
        assert good is not None, "there is one from the beginning"
        if older and (resumed := self._resuming.earlier(good.step)) is not None:
            checkpoint, plain = resumed
            self._position.go_to(plain.get("data"))
            self._checkpointing.undo_after(checkpoint.step)
            self._checkpointing.begin(checkpoint.step, checkpoint)
            return checkpoint.step, "disk"
        self._put_back(good)
        self._position.go_to(good.plain.get("data"))
        self._checkpointing.undo_after(good.step)
        return good.step, "memory"

    def _put_back(self, good: Snapshot) -> None:
        """A state of, or into, BF16 weights in its own precision, which loses nothing; then on in that at hand."""
        good.wait()
        policy, then = self._engine.policy, Policy.from_dict(good.plain["engine"]["policy"])
        by_way_of_it = policy != then and PURE in (policy.base.partition(",")[0], then.base.partition(",")[0])
        if by_way_of_it:
            self._engine.change_precision(then)
        try:
            self._whole.put_back(good.values, good.plain, other_precision=True)
        finally:
            if by_way_of_it:
                self._engine.change_precision(policy)

    def _engine_is_anew(self, step: int) -> None:
        self._last_applied = step
        self._spikes.forget(step + 1)

    def _wider(self, patterns: Sequence[str], narrow: Sequence[str] = ()) -> Policy | None:
        """The policy to go on with: modules that are flagged in FP32; else the next precision that the device runs.

        Layers that FP8 does not hold go to BF16 first, and all of them next.
        """
        policy, precision = self._engine.policy, self._engine.precision
        if self._engine.precision_stays:
            return None
        known = {rule.pattern for rule in policy.rules}
        flagged = [name for name in narrow if name not in known]
        if flagged and len(flagged) < len(self._engine.fp8_layers):
            return Policy(precision, policy.rules).keep("bf16", *flagged)
        new = [pattern for pattern in patterns if pattern not in known]
        if new and precision not in EXACT:
            return Policy(precision, policy.rules).keep("fp32", new[0])
        runs = facts_of(self._engine.device).runs
        wider = next((name for name in _wider_than(precision) if name in runs), None)
        return None if wider is None else Policy(wider, policy.rules)

    def _widen(self, facts: Facts, cause: str, policy: Policy, goes_back: bool) -> None:
        was, rules = self._engine.precision, self._engine.policy.rules
        self._before.append(self._engine.policy)
        if goes_back:
            to_step, _ = self._restore(older=False)
            self._engine_is_anew(to_step)
        self._engine.change_precision(policy)
        new = [rule for rule in policy.rules if rule not in rules]
        modules = tuple(rule.pattern for rule in new)
        kept = f" with {', '.join(modules)} in {new[0].precision.upper()}" if new else ""
        self.standing.taken(Move.WIDEN, f"{self._engine.precision.upper()}{kept}")
        self._telling.tell(
            PrecisionChanged(step=facts.number, before=was, after=self._engine.precision, modules=modules, cause=cause),
            facts.number,
        )

    def _climb(self, facts: Facts) -> None:
        before, healthy = self._engine.precision, self.standing.climb_after or 0
        self._engine.change_precision(self._before.pop())
        self.standing.taken(Move.CLIMB, f"{self._engine.precision.upper()} again")
        self._telling.tell(
            ClimbedBack(step=facts.number, before=before, after=self._engine.precision, healthy_steps=healthy),
            facts.number,
        )

    def _stop(self, facts: Facts, cause: str) -> None:
        self._checkpointing.collect(wait=True)
        good = self._checkpointing.last_good or self._checkpointing.last
        finding = self._telling.tell(
            TrainingStopped(
                step=facts.number,
                cause=cause,
                tried=tuple(self.standing.tried),
                capsule=self._capsule,
                build=self._build,
                checkpoint="" if good is None else str(good.path),
            ),
            facts.number,
        )
        raise Stopped(STOPPED, finding.message)


def _too_narrow(engine: Engine) -> tuple[str, ...]:
    """Layers in FP8 that a finding is about."""
    layers = engine.fp8_layers
    places = (finding.place.module for finding in (engine.findings if layers else ()))
    return tuple(dict.fromkeys(name for name in places if name in layers))


def _wider_than(precision: str) -> Sequence[str]:
    """The precisions to try next; of what runs in 16 bits with narrower layers or weights, 16 bits by themselves."""
    if precision in WIDER:
        return WIDER[WIDER.index(precision) + 1 :]
    return WIDER[-1:] if precision.startswith(EMULATE) else WIDER[1:]


def _cause(facts: Facts, streak: int, found: Diagnosis) -> str:
    if facts.spike and not facts.bad:
        return f"the loss jumped to {facts.loss:.4g}"
    if found.words:
        return found.words
    what = "gradients were not finite" if math.isfinite(facts.loss) else f"the loss was {facts.loss:g}"
    return f"{what} in {streak} steps in a row" if streak > 1 else what
