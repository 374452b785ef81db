"""The measurements of a comparison, one after the other, on one model that all contenders share.

Contenders run in turns, so that whatever slows the machine for a while slows all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ampwise.errors import BadInput
from ampwise.hardware.catalog import find_gpu
from ampwise.tune.bench.clocks import Clock, ClockWatch, energy_of
from ampwise.tune.bench.lineup import Contender, taking_part
from ampwise.tune.bench.loss_check import LossChecker, WeightGuard
from ampwise.tune.bench.profile_summary import (
    intensity_of,
    layer_times,
    median_summary,
    profiled_step,
    summarize,
)
from ampwise.tune.bench.speeds import BASE, GpuClocks, LayerTime, PrecisionRow, StepMemory, TimeSpread
from ampwise.tune.bench.verdict import is_noisy
from ampwise.tune.train_case import TrainCase
from ampwise.watch.profiler import events_of, profile_of

T = TypeVar("T")
Progress = Callable[[int, int, str], object]  # steps done, steps in all, what is being done
Times = dict[str, list[float]]  # seconds of a step in each round, by label

HOPELESS = 10.0  # times as long as FP32, in two passes: a first one may load kernels
NOT_LONG = 1.0  # seconds: no pass is too slow below this
GIVEN_UP = "given up after two passes"
PROFILED = 3  # steps: one of them may have been disturbed
REPORTS_PER_CONTENDER = 4  # progress reports besides the rounds: loss, warm-up, memory, profile
WARM_UP = 3  # steps; the last one is timed
TURN_S = 0.1  # seconds of a turn
MOST_STEPS = 50  # steps of a turn
ENERGY_S = 1.0  # seconds in which energy is counted: the driver updates its counter ten times as often
WANTED_S = 30.0  # seconds for all rounds together, within the limits below
DEVIATIONS = 3.0  # median deviations, about two standard deviations
FEWEST_ROUNDS, MOST_ROUNDS = 5, 15


class Measurement:
    """Measures all contenders; call ``run`` once, then read the results."""

    def __init__(
        self,
        case: TrainCase,
        contenders: Sequence[Contender],
        clock: Clock,
        rounds: int | None = None,
        steps: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._case, self._clock, self._steps, self._progress = case, clock, steps, progress
        self._asked_rounds = rounds
        self._contenders = list(contenders)
        self._failed: list[str] = []  # sentences on optional measurements that failed
        self._modules: dict[str, dict[str, float]] = {}  # seconds by label and module
        self._times: Times = {}
        self._done, self._total = 0, REPORTS_PER_CONTENDER * len(self._contenders)
        self.rounds = 0
        self.flops: float | None = None
        self.noise: float | None = None
        self.clocks: GpuClocks | None = None

    def run(self) -> None:
        """Compare losses, time steps in turns, then measure memory and profile."""
        self._check_losses()
        first = next(iter(taking_part(self._contenders)), None)
        if first is None:
            return
        self.flops = self._look(first, partial(count_flops, first), "FLOPs, counted in a step")
        again = first.again()
        lineup = [*taking_part(self._contenders), again]
        guard = WeightGuard(self._case, first.step.optimizer)
        seconds = warm_up(lineup, self._clock, partial(self._report, "warming up"), guard.look)
        for contender in taking_part(self._contenders):
            self._report("counting memory", contender.label)
            contender.found["memory"] = self._look(contender, partial(measure_peak, contender), "The memory")
        pace = plan_rounds(seconds, self._asked_rounds, self._steps)
        self.rounds = pace.rounds
        self._total += pace.rounds * len(taking_part(lineup)) + 1  # and the warm-up of FP32's second run
        for contender in lineup:
            contender.forget_steps()
        watch = ClockWatch(self._case.device)
        watch.look()
        self._times = run_rounds(lineup, self._clock, pace, partial(self._report, "measuring"), watch.look)
        self.clocks = watch.seen()
        self.noise = noise_between(self._times, first.label, again.label)
        for contender in taking_part(self._contenders):
            contender.found["skipped"] = contender.skipped
        for contender in taking_part(self._contenders) if self._case.device.type == "cuda" else ():
            calls = math.ceil(ENERGY_S / self._times[contender.label][0])
            contender.found["joules"] = self._look(
                contender, partial(energy_of, contender.uncounted, calls, self._case.device), "The energy"
            )
        guard.insist()
        for contender in taking_part(self._contenders):
            self._report("profiling", contender.label)
            self._look(contender, partial(self._profile, contender), "The profile")

    def rows(self) -> tuple[PrecisionRow, ...]:
        """Return the rows, in the order in which the contenders were given."""
        device = self._case.device
        gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        rows = []
        for contender in self._contenders:
            label, name = contender.label, contender.precision
            times = self._times.get(label)
            peak = gpu.figure(name) if gpu is not None else None
            row = PrecisionRow(
                precision=name,
                compiled=contender.compiled,
                problem=contender.problem,
                step_s=TimeSpread.of(times) if times else None,
                ratio=ratios(self._times, label, f"{BASE} compiled" if contender.compiled else BASE),
                ratio_to_eager=ratios(self._times, label, BASE),
                peak_flops=None if peak is None else peak.value,
                peak_is_approximate=peak is not None and peak.approximate,
                ridge=None if gpu is None else gpu.ridge(name),
                **contender.found,
            )
            rows.append(row)
        return tuple(rows)

    def layers(self) -> tuple[LayerTime, ...]:
        """Return the times per layer, from the profiles of eager rows."""
        eager = {one.label for one in self._contenders if not one.compiled}
        modules = {label: seconds for label, seconds in self._modules.items() if label in eager}
        if not modules:
            return ()
        step_s = {label: TimeSpread.of(self._times[label]).median for label in modules if label in self._times}
        return layer_times(self._case.model, modules, step_s, certain=not is_noisy(self.noise))

    def not_measured(self) -> Iterator[str]:
        """Yield sentences on what was not measured."""
        yield from self._failed
        yield "Time spent waiting for data is not part of a step here: `ampwise run` measures it."
        if self._case.device.type != "cuda":
            yield "Memory and clocks: measured on CUDA devices only."
        elif self.clocks is None:
            yield "GPU clocks: the driver's library does not say."
        if self.noise is None:
            yield "Noise: no precision could be measured twice."
        if any(one.compiled for one in self._contenders):
            yield "Layers of compiled rows: torch.compile fuses their modules."

    def _check_losses(self) -> None:
        checker = LossChecker(self._case, self._clock)
        base: float | None = None
        for contender in self._contenders:
            self._report("comparing losses", contender.label)
            checked = contender.attempt(partial(checker.check, contender))
            if checked is None:
                continue
            loss, seconds = checked
            contender.found["loss"] = loss
            if not loss.finite:  # a step with it would make the shared weights non-finite
                what = "gradients are not finite" if math.isfinite(loss.loss) else f"loss is {loss.loss:g}"
                if contender.is_base:
                    raise BadInput(
                        f"{self._case.name}: FP32's {what} before any comparison: first make sure that the model and "
                        "the batch give finite numbers."
                    )
                contender.problem = f"not finite: the {what}"
            elif contender.is_base:
                base = seconds
            elif base is not None and not contender.compiled and seconds > (most := max(HOPELESS * base, NOT_LONG)):
                again = contender.attempt(partial(checker.check, contender))
                if again is not None and again[1] > most:
                    contender.found["slower"] = min(seconds, again[1]) / base
                    contender.problem = GIVEN_UP

    def _profile(self, contender: Contender) -> None:
        results = [profiled_step(contender) for _ in range(PROFILED)]
        summary = median_summary([summarize(*events_of(each)) for each in results])
        products = profile_of(results[-1]).products
        self._modules[contender.label] = summary.modules
        contender.found |= {"split": summary.split, "products": products, "intensity": intensity_of(products)}

    def _look(self, contender: Contender, work: Callable[[], T], what: str) -> T | None:
        """Return the result of an optional measurement; on failure, note it and return None. The contender stays."""
        value, problem = contender.run(work)
        if problem is not None:
            self._failed.append(f"{what} of {contender.label}: {problem}.")
        return value

    def _report(self, doing: str, label: str) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total, f"{doing}: {label}")


# --- rounds ----------------------------------------------------------------------------------------------------------


class RoundPlan(NamedTuple):
    """How many rounds to run, and how many steps each contender's turn has."""

    rounds: int
    steps: Mapping[str, int]


def warm_up(
    lineup: Sequence[Contender],
    clock: Clock,
    report: Callable[[str], object],
    after: Callable[[Contender], object],
) -> dict[str, float]:
    """Run first steps, which choose kernels, allocate memory and compile; return a rough time of a step, by label.

    ``after`` is called with each contender that has run them, which may drop out.
    """
    seconds: dict[str, float] = {}
    for contender in taking_part(lineup):

        def first_steps(one: Contender = contender) -> float:
            for _ in range(WARM_UP - 1):
                one()
            return clock(one, 1)

        taken = contender.attempt(first_steps)
        if taken is not None:
            seconds[contender.label] = taken
            after(contender)
        report(contender.label)
    return {contender.label: seconds[contender.label] for contender in taking_part(lineup)}


def plan_rounds(seconds: Mapping[str, float], rounds: int | None = None, steps: int | None = None) -> RoundPlan:
    """Return the given rounds and steps; else short turns, and as many rounds as fit into half a minute.

    >>> plan_rounds({"fp32": 0.02, "bf16": 0.01})
    RoundPlan(rounds=15, steps={'fp32': 5, 'bf16': 10})
    >>> plan_rounds({"fp32": 4.0}, steps=2)
    RoundPlan(rounds=5, steps={'fp32': 2})
    """
    turns = {
        label: steps or min(MOST_STEPS, max(1, round(TURN_S / max(each, 1e-6)))) for label, each in seconds.items()
    }
    whole = sum((turns[label] + 1) * each for label, each in seconds.items())
    fitting = int(WANTED_S / whole) if whole > 0 else MOST_ROUNDS
    return RoundPlan(rounds or min(MOST_ROUNDS, max(FEWEST_ROUNDS, fitting)), turns)


def run_rounds(
    lineup: Sequence[Contender],
    clock: Clock,
    pace: RoundPlan,
    report: Callable[[str], object],
    after_turn: Callable[[], object],
) -> Times:
    """Return the times of all rounds. Each round runs every contender, in the reverse order of the round before.

    A turn begins with a step that is not timed. A contender that fails has no times.
    """
    times: Times = {contender.label: [] for contender in lineup}
    for number in range(pace.rounds):
        order = taking_part(lineup)
        for contender in reversed(order) if number % 2 else order:

            def turn(one: Contender = contender) -> float:
                one.uncounted()
                taken = clock(one, pace.steps[one.label])
                after_turn()
                return taken

            seconds = contender.attempt(turn)
            if seconds is not None:
                times[contender.label].append(seconds)
            report(contender.label)
    return {contender.label: times[contender.label] for contender in taking_part(lineup)}


def ratios(times: Times, of: str, to: str) -> TimeSpread | None:
    """Return how many times as fast ``of`` is as ``to``, over the rounds; None where one of them has no times."""
    if of not in times or to not in times:
        return None
    return TimeSpread.of([base / own for own, base in zip(times[of], times[to], strict=True)])


def noise_between(times: Times, one: str, again: str) -> float | None:
    """Return how far the ratio of two equal runs is from 1, plus three times its median deviation over the rounds.

    A round in which something else slowed the machine does not count more than any other.

    >>> round(noise_between({"fp32": [1.0, 1.0, 1.0], "again": [1.01, 1.01, 7.0]}, "fp32", "again"), 3)
    0.01
    """
    if one not in times or again not in times:
        return None
    # In logarithms, so that twice as slow is as far as twice as fast.
    logs = [math.log(other / own) for own, other in zip(times[one], times[again], strict=True)]
    middle = median(logs)
    return math.expm1(abs(middle) + DEVIATIONS * median(abs(each - middle) for each in logs))


# --- one more step ---------------------------------------------------------------------------------------------------


def count_flops(contender: Contender) -> float | None:
    """Return the FLOPs of one step's matmuls; None where there are none. Call it in the contender's turn.

    Gradients are dropped: the weights stay as they are.
    """
    ops: Any = torch.ops.aten
    for_cpu = {  # the CPU's attention, which torch's flop counter lacks
        ops._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
        ops._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **_: sdpa_backward_flop_count(
            *shapes[:4]
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=for_cpu) as counter:
        contender.step.forward_and_backward()
    contender.step.optimizer.zero_grad(set_to_none=True)
    return float(counter.get_total_flops()) or None


def measure_peak(contender: Contender) -> StepMemory | None:
    """Measure the memory of one more step; None without an allocator that counts. Call it in the contender's turn."""
    step = contender.step
    device = step.case.device
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    contender()
    torch.cuda.synchronize(device)
    states = (value for state in step.optimizer.state.values() for value in state.values())
    return StepMemory(
        peak=torch.cuda.max_memory_allocated(device),
        parameters=_bytes(step.case.model.parameters()),
        gradients=_bytes(step.case.parameters),
        optimizer=_bytes(value for value in states if isinstance(value, Tensor) and value.device.type == "cuda"),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
