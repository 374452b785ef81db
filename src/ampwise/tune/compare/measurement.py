"""The measurements of a comparison, one after the other, on one model that all contenders share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ampwise.errors import BadInput
from ampwise.hardware.catalog import Gpu, find_gpu
from ampwise.rules.amp5xx_speed.verdict import is_noisy
from ampwise.tune.compare.clocks import Clock
from ampwise.tune.compare.contender import AGAIN, Contender
from ampwise.tune.compare.flops import count_flops
from ampwise.tune.compare.gpu_clocks import ClockWatch
from ampwise.tune.compare.intensity import intensity_of
from ampwise.tune.compare.layer_times import layer_times
from ampwise.tune.compare.lineup import Lineup
from ampwise.tune.compare.loss_check import LossChecker
from ampwise.tune.compare.peak_memory import measure_peak
from ampwise.tune.compare.profile_summary import ProfileSummary, median_summary, profile_events, summarize
from ampwise.tune.compare.profiling import profiled_step
from ampwise.tune.compare.rounds import Times, noise_between, plan_rounds, ratios, run_rounds, warm_up
from ampwise.tune.compare.speeds import BASE, GpuClocks, LayerTime, LossCheck, PrecisionRow, StepMemory, TimeSpread
from ampwise.tune.compare.weight_guard import WeightGuard
from ampwise.tune.train_case import TrainCase
from ampwise.watch.profiler import profile_of
from ampwise.watch.time_use import ProfiledMatmul

__all__ = ["MeasureSettings", "Measurement", "Progress"]

Progress = Callable[[int, int, str], object]  # steps done, steps in all, what is being done

HOPELESS = 10.0  # times as long as FP32: one pass is enough to tell
NOT_LONG = 1.0  # seconds: no pass is too slow below this
GIVEN_UP = "given up after one pass"
PROFILED = 3  # steps: one of them may have been disturbed
REPORTS_PER_CONTENDER = 4  # progress reports besides the rounds: loss, warm-up, memory, profile


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSettings:
    """How to measure; None means: choose by how long a step takes."""

    clock: Clock
    rounds: int | None = None
    steps: int | None = None
    progress: Progress | None = None


class Measurement:
    """Measures all contenders; call ``run`` once, then read the results."""

    def __init__(self, case: TrainCase, contenders: Sequence[Contender], settings: MeasureSettings) -> None:
        self._case, self._settings = case, settings
        self._contenders = list(contenders)
        self._lineup = Lineup(contenders, case.device)
        self._losses: dict[str, LossCheck] = {}
        self._memory: dict[str, StepMemory] = {}
        self._times: Times = {}
        self._skipped: dict[str, int] = {}
        self._readings: dict[str, ProfileSummary] = {}
        self._products: dict[str, tuple[ProfiledMatmul, ...]] = {}
        self._slower: dict[str, float] = {}
        self._watch = ClockWatch(case.device)
        self._done, self._total = 0, REPORTS_PER_CONTENDER * len(self._contenders)
        self.rounds = 0
        self.flops: float | None = None
        self.noise: float | None = None
        self.clocks: GpuClocks | None = None

    def run(self) -> None:
        """Compare losses, time steps in turns, then measure memory and profile."""
        self._check_losses()
        first = next(iter(self._lineup), None)
        if first is None:
            return
        self.flops = self._lineup.look(first, partial(count_flops, first), "FLOPs, counted in a step")
        self._lineup.add(first.again())
        guard = WeightGuard(self._lineup, self._case, first.step.optimizer)
        seconds = warm_up(self._lineup, self._settings.clock, partial(self._report, "warming up"), guard.look)
        self._take_memory()
        pace = plan_rounds(seconds, self._settings.rounds, self._settings.steps)
        self.rounds = pace.rounds
        self._total += pace.rounds * len(self._lineup) + 1  # and the warm-up of FP32's second run
        for contender in self._lineup:
            contender.forget_steps()
        self._watch.look()
        self._times = run_rounds(
            self._lineup, self._settings.clock, pace, partial(self._report, "measuring"), self._watch.look
        )
        self.clocks = self._watch.seen()
        self.noise = noise_between(self._times, first.label, f"{first.label} {AGAIN}")
        self._skipped = {contender.label: contender.skipped for contender in self._lineup}
        guard.insist()
        self._profile()

    def rows(self) -> tuple[PrecisionRow, ...]:
        """Return the rows, in the order in which the contenders were given."""
        return tuple(self._row(contender) for contender in self._contenders)

    def layers(self) -> tuple[LayerTime, ...]:
        """Return the times per layer, from the profiles of eager rows."""
        eager = {one.label for one in self._contenders if not one.compiled}
        modules = {label: reading.modules for label, reading in self._readings.items() if label in eager}
        if not modules:
            return ()
        step_s = {label: TimeSpread.of(self._times[label]).median for label in modules if label in self._times}
        return layer_times(self._case.model, modules, step_s, certain=not is_noisy(self.noise))

    def not_measured(self) -> Iterator[str]:
        """Yield sentences on what was not measured."""
        yield from self._lineup.not_seen
        yield "Time spent waiting for data is not part of a step here: `ampwise run` measures it."
        if self._case.device.type != "cuda":
            yield "Memory and clocks: measured on CUDA devices only."
        elif self.clocks is None:
            yield "GPU clocks: reading them needs nvidia-ml-py (pip install nvidia-ml-py)."
        if self.noise is None:
            yield "Noise: no precision could be measured twice."
        if any(one.compiled for one in self._contenders):
            yield "Layers of compiled rows: torch.compile fuses their modules."

    def _check_losses(self) -> None:
        checkup = LossChecker(self._case, self._settings.clock)
        base: float | None = None
        for contender in self._lineup:
            self._report("comparing losses", contender.label)
            checked = self._lineup.attempt(contender, partial(checkup.check, contender))
            if checked is None:
                continue
            self._losses[contender.label] = checked.loss
            if not checked.loss.finite:
                self._refuse(contender, checked.loss)
            elif contender.is_base:
                base = checked.seconds
            elif base is not None and not contender.compiled and checked.seconds > max(HOPELESS * base, NOT_LONG):
                self._slower[contender.label] = checked.seconds / base
                self._lineup.drop(contender, GIVEN_UP)

    def _refuse(self, contender: Contender, loss: LossCheck) -> None:
        """Drop a contender that is not finite: a step with it would make the shared weights non-finite."""
        what = "gradients are not finite" if math.isfinite(loss.loss) else f"loss is {loss.loss:g}"
        if contender.is_base:
            raise BadInput(
                f"{self._case.name}: FP32's {what} before any comparison: first make sure that the model and the "
                "batch give finite numbers."
            )
        self._lineup.drop(contender, f"not finite: the {what}")

    def _take_memory(self) -> None:
        for contender in self._left():
            self._report("counting memory", contender.label)
            peak = self._lineup.look(contender, partial(measure_peak, contender), "The memory")
            if peak is not None:
                self._memory[contender.label] = peak

    def _profile(self) -> None:
        for contender in self._left():
            self._report("profiling", contender.label)
            seen = self._lineup.look(contender, partial(_profiled, contender), "The profile")
            if seen is not None:
                self._readings[contender.label], self._products[contender.label] = seen

    def _left(self) -> list[Contender]:
        """Return the contenders that are left, without FP32's second run."""
        return [contender for contender in self._lineup if contender in self._contenders]

    def _report(self, doing: str, label: str) -> None:
        self._done += 1
        if self._settings.progress is not None:
            self._settings.progress(min(self._done, self._total), self._total, f"{doing}: {label}")

    def _row(self, contender: Contender) -> PrecisionRow:
        label, name = contender.label, contender.precision
        base = f"{BASE} compiled" if contender.compiled else BASE
        times = self._times.get(label)
        gpu = _gpu(self._case.device)
        peak = gpu.figure(name) if gpu is not None else None
        reading, products = self._readings.get(label), self._products.get(label, ())
        return PrecisionRow(
            precision=name,
            compiled=contender.compiled,
            problem=self._lineup.problems.get(label),
            slower=self._slower.get(label),
            loss=self._losses.get(label),
            step_s=TimeSpread.of(times) if times else None,
            ratio=ratios(self._times, label, base),
            ratio_to_eager=ratios(self._times, label, BASE),
            peak_flops=None if peak is None else peak.value,
            peak_is_approximate=peak is not None and peak.approximate,
            ridge=None if gpu is None else gpu.ridge(name),
            memory=self._memory.get(label),
            split=None if reading is None else reading.split,
            products=products,
            intensity=intensity_of(products),
            skipped=self._skipped.get(label, 0),
        )


def _profiled(contender: Contender) -> tuple[ProfileSummary, tuple[ProfiledMatmul, ...]]:
    results = [profiled_step(contender) for _ in range(PROFILED)]
    return median_summary([summarize(*profile_events(each)) for each in results]), profile_of(results[-1]).products


def _gpu(device: torch.device) -> Gpu | None:
    return find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
