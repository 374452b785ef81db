"""Recovery actions: roll back to a good state, widen the precision, or stop."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ampwise.finding import Finding
from ampwise.guard.checkpointing import Checkpointing, GuardedRun, non_finite_tensors
from ampwise.guard.data_position import DataPosition
from ampwise.guard.events import (
    LossSpike,
    PrecisionChanged,
    PrecisionRestored,
    RolledBack,
    ScaleAtFloor,
    StepSkipped,
    TrainingStopped,
)
from ampwise.guard.ladder import Ladder, LadderFacts, LadderState, RecoveryAction
from ampwise.guard.resuming import CheckpointLoader
from ampwise.guard.script_loop import SCRIPTS_OWN
from ampwise.guard.stopping import STOPPED_EXIT_CODE, Stopped
from ampwise.guard.training import GuardedTraining
from ampwise.trace.capsule.saving import Capsules
from ampwise.trace.value_ranges import local_shard
from ampwise.train.low_bit.pure_bf16 import PURE
from ampwise.train.precision.policy import Policy
from ampwise.train.precision.precision import EMULATE, precisions_of
from ampwise.watch.spikes import SpikeDetector

WIDER = ("fp16", "bf16", "tf32", "fp32")  # each has more range or more bits than the one before
EXACT = ("tf32", "fp32")  # precisions in which keeping single modules in FP32 gains nothing
CAPSULES = "capsules"  # folder in the guard's directory with capsules of steps that stopped the training
CAPSULE_AFTER = 2  # bad steps in a row from which capsules are saved: each holds all weights


class Diagnosis(NamedTuple):
    """The tracer's diagnosis of bad steps, as plain data that can be sent to other ranks."""

    kind: str = ""  # rule name, such as "half-overflow"
    text: str = ""
    patterns: tuple[str, ...] = ()  # modules that, as the tracer has tried, fix it if kept in FP32
    capsule: str = ""
    build: str = ""  # function that builds the capsule's model
    narrow: tuple[str, ...] = ()  # FP8 layers that a finding is about: their values do not fit


def diagnose(found: Sequence[Finding]) -> Diagnosis:
    """Return the diagnosis in the findings about the step that was traced last."""
    if not found:
        return Diagnosis()
    first = found[0]
    trials = [trial for finding in found for trial in finding.evidence.get("trace", {}).get("trials") or ()]
    kept = [trial["argument"] for trial in trials if trial.get("change") == "keep" and trial.get("finite")]
    saved = next((each.evidence for each in found if each.evidence.get("capsule")), {})
    file, line = first.place.file, first.place.line
    where = "" if file is None else f" ({Path(file).name}:{line})"
    text = first.message.partition(";")[0]  # the failure, without its inputs
    capsule, build = (str(saved.get(name, "")) for name in ("capsule", "build"))
    return Diagnosis(first.rule.name, f"{text}{where}", tuple(dict.fromkeys(kept)), capsule, build)


class Recovery:
    """Judges each step and carries out the ladder's decision."""

    def __init__(
        self,
        run: GuardedRun,
        ladder: Ladder,
        checkpointing: Checkpointing,
        resuming: CheckpointLoader,
        position: DataPosition,
    ) -> None:
        directory, self._engine, self._training_state, self._agreement, self._reporter = run
        self._ladder, self._checkpointing, self._resuming, self._position = ladder, checkpointing, resuming, position
        self._capsules = Capsules(directory / CAPSULES)
        self._spikes = SpikeDetector()
        self._before: list[Policy] = []  # precisions before each widening
        self._last_applied = 0
        self._capsule = self._build = ""  # the last one saved
        self.standing = LadderState(ladder)
        self.rollbacks = 0  # in total
        self.restores = 0  # of an earlier state, by a rollback or a change of precision

    def begin(self, step: int, state: Mapping[str, Any]) -> None:
        """Start after this step; ``state`` is the saved state of a resumed run."""
        self._last_applied = step
        self._before = [Policy.from_dict(each) for each in state.get("policies_before", ())]
        self.standing.widened = len(self._before)
        if state.get("spikes") is not None:
            self._spikes.load(state["spikes"])
        # If one bad step is all that is skipped, the first is also the last.
        self._engine.save_bad_steps(self._capsules, streak=min(CAPSULE_AFTER, self._ladder.skips))

    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {"policies_before": [policy.as_dict() for policy in self._before], "spikes": self._spikes.state()}

    def judge(self, facts: LadderFacts) -> bool:
        """Judge a step; return whether that changed the state, so that later steps no longer count."""
        facts = self._with_spike(facts)
        if not facts.skipped:
            self._last_applied = facts.number
        move = self.standing.move(facts)
        if move is RecoveryAction.GO_ON and self.standing.healthy >= self._ladder.healthy:
            self._checkpointing.trust(facts.number, self._ladder.healthy)
        elif move is RecoveryAction.SKIP:
            streak = len(self.standing.streak)
            if facts.at_floor and math.isfinite(facts.loss):  # a NaN loss is not caused by the scale
                self._reporter.report(ScaleAtFloor(step=facts.number, scale=facts.scale, streak=streak))
            else:
                scale = facts.scale if facts.scaled else None
                self._reporter.report(
                    StepSkipped(step=facts.number, loss=facts.loss, scale=scale, streak=streak, scaled=facts.scaled)
                )
        elif move is RecoveryAction.CLIMB:
            before, healthy = self._engine.precision, self.standing.climb_after or 0
            self._engine.change_precision(self._before.pop())
            after = self._engine.precision
            self.standing.taken(RecoveryAction.CLIMB, f"{after.upper()} again")
            self._reporter.report(
                PrecisionRestored(step=facts.number, before=before, after=after, healthy_steps=healthy)
            )
        elif move is RecoveryAction.ROLL_BACK:
            return self._next_rung(facts)
        return False

    def _with_spike(self, facts: LadderFacts) -> LadderFacts:
        if facts.bad:
            return facts
        spike = self._spikes.add(facts.number, facts.loss)
        if spike is None:
            return facts
        action: Literal["rollback", "none"] = "rollback" if self._ladder.on_spike == "rollback" else "none"
        self._reporter.report(
            LossSpike(step=facts.number, loss=spike.loss, usual=spike.usual, spreads=spike.spreads, action=action)
        )
        return facts._replace(spike=True)

    # The rungs

    def _next_rung(self, facts: LadderFacts) -> bool:
        seen = diagnose(self._engine.explained)._replace(narrow=_too_narrow(self._engine))
        # What one rank found out, such as a bad batch, explains the step of all.
        found = max(self._agreement.gather(seen), key=lambda each: (bool(each.kind), each.kind != "from-another-rank"))
        if found.capsule:
            self._capsule, self._build = found.capsule, found.build
        goes_back = facts.spike
        if not facts.spike:  # a rollback changes the state if a step was applied since, or weights are not finite
            good = self._checkpointing.snapshots.good
            assert good is not None, "there is one from the beginning"
            live = self._training_state.live()
            values = {name: local_shard(tensor) for name, tensor in live.tensors.items() if name not in live.transient}
            changes = self._last_applied > good.step or bool(non_finite_tensors(values, live.moving))
            # A script's own step cannot be traced: its batches may be at fault, and nothing else can be tried.
            goes_back = any(self._agreement.gather(changes)) or self._engine.precision == SCRIPTS_OWN
        policy = self._wider(found.patterns, found.narrow)
        spike = facts.spike and not facts.bad
        streak = len(self.standing.streak)
        if spike:
            cause = f"the loss jumped to {facts.loss:.4g}"
        elif found.text:
            cause = found.text
        else:
            cause = "gradients were not finite" if math.isfinite(facts.loss) else f"the loss was {facts.loss:g}"
            cause += f" in {streak} steps in a row" if streak > 1 else ""
        rung = self.standing.rung(goes_back=goes_back, cause=found.kind, wider=policy is not None, spike=spike)
        if rung is RecoveryAction.ROLL_BACK:
            self._roll_back(facts, cause)
        elif rung is RecoveryAction.WIDEN and policy is not None:
            self._widen(facts, cause, policy, goes_back)
        elif rung is RecoveryAction.STOP:
            self._stop(facts, cause)
        return rung is not RecoveryAction.GO_ON

    def _roll_back(self, facts: LadderFacts, cause: str) -> None:
        began = time.perf_counter()
        streak = list(self.standing.streak)
        passed = self._position.batches_of(streak)
        to_step, source = self._restore(older=self.standing.rollbacks > 0)
        rewound = self._position.pass_over(passed)
        self._forget_after(to_step)
        self.rollbacks += 1
        self.standing.taken(RecoveryAction.ROLL_BACK, f"rollback to step {to_step}")
        self._reporter.report(
            RolledBack(
                step=facts.number,
                to_step=to_step,
                source=source,
                milliseconds=(time.perf_counter() - began) * 1e3,
                streak=len(streak),
                cause=cause,
                passed_over=tuple(passed),
                rewound=rewound,
            )
        )

    def _restore(self, *, older: bool) -> tuple[int, Literal["memory", "disk"]]:
        """Restore the last good snapshot; or, if that did not help before, an older checkpoint from disk."""
        self.restores += 1
        good = self._checkpointing.snapshots.good
        assert good is not None, "there is one from the beginning"
        if older:
            self._checkpointing.saver.mark_pending()  # only good ones are loaded
        if older and (resumed := self._resuming.earlier(good.step)) is not None:
            checkpoint, plain = resumed
            self._position.go_to(plain.get("data"))
            self._checkpointing.undo_after(checkpoint.step)
            self._checkpointing.begin(checkpoint.step, checkpoint)
            return checkpoint.step, "disk"
        good.wait()
        policy, then = self._engine.policy, Policy.from_dict(good.plain["engine"]["policy"])
        # BF16 weights are restored in their own precision, without loss, and then changed to the engine's.
        convert = policy != then and PURE in (policy.base.partition(",")[0], then.base.partition(",")[0])
        if convert:
            self._engine.change_precision(then)
        try:
            self._training_state.restore(good.values, good.plain, other_precision=True)
        finally:
            if convert:
                self._engine.change_precision(policy)
        self._position.go_to(good.plain.get("data"))
        self._checkpointing.undo_after(good.step)
        return good.step, "memory"

    def _forget_after(self, step: int) -> None:
        self._last_applied = step
        self._spikes.forget(step + 1)

    def _wider(self, patterns: Sequence[str], narrow: Sequence[str] = ()) -> Policy | None:
        """Return the next wider policy: flagged modules in FP32; else the next precision that the device supports.

        FP8 layers with values out of range go to BF16 first, then all FP8 layers. None if there is nothing wider.
        """
        policy, precision = self._engine.policy, self._engine.precision
        if self._engine.precision_locked_because:
            return None
        known = {rule.pattern for rule in policy.rules}
        flagged = [name for name in narrow if name not in known]
        if flagged and len(flagged) < len(self._engine.fp8_layers):
            return Policy(precision, policy.rules).keep("bf16", *flagged)
        new = [pattern for pattern in patterns if pattern not in known]
        if new and precision not in EXACT:
            return Policy(precision, policy.rules).keep("fp32", new[0])
        runs = precisions_of(self._engine.device).runs
        wider = next((name for name in _wider_than(precision) if name in runs), None)
        return None if wider is None else Policy(wider, policy.rules)

    def _widen(self, facts: LadderFacts, cause: str, policy: Policy, goes_back: bool) -> None:
        was, rules = self._engine.precision, self._engine.policy.rules
        self._before.append(self._engine.policy)
        if goes_back:
            to_step, _ = self._restore(older=False)
            self._forget_after(to_step)
        self._engine.change_precision(policy)
        new = [rule for rule in policy.rules if rule not in rules]
        modules = tuple(rule.pattern for rule in new)
        kept = f" with {', '.join(modules)} in {new[0].precision.upper()}" if new else ""
        self.standing.taken(RecoveryAction.WIDEN, f"{self._engine.precision.upper()}{kept}")
        self._reporter.report(
            PrecisionChanged(step=facts.number, before=was, after=self._engine.precision, modules=modules, cause=cause)
        )

    def _stop(self, facts: LadderFacts, cause: str) -> None:
        self._checkpointing.collect(wait=True)
        good = self._checkpointing.last_good or self._checkpointing.last
        stopped = self._reporter.report(
            TrainingStopped(
                step=facts.number,
                cause=cause,
                tried=tuple(self.standing.tried),
                capsule=self._capsule,
                build=self._build,
                checkpoint="" if good is None else str(good.path),
                not_widened=self._engine.precision_locked_because if self._ladder.change_precision else "",
            )
        )
        raise Stopped(STOPPED_EXIT_CODE, stopped.message)


def _too_narrow(engine: GuardedTraining) -> tuple[str, ...]:
    """Return the FP8 layers that a finding is about."""
    layers = engine.fp8_layers
    places = (finding.place.module for finding in (engine.findings if layers else ()))
    return tuple(dict.fromkeys(name for name in places if name in layers))


def _wider_than(precision: str) -> Sequence[str]:
    """Return the precisions to try next; from FP8 layers or low-bit weights, that is BF16 first."""
    if precision in WIDER:
        return WIDER[WIDER.index(precision) + 1 :]
    return WIDER[-1:] if precision.startswith(EMULATE) else WIDER[1:]
