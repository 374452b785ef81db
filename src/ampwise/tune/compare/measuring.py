"""The measurements of a comparison, one after the other, on one model that all contenders share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ampwise.errors import BadInput
from ampwise.evidence.speed import BASE, GpuClocks, LayerTime, LossCheck, Row, Spread, StepMemory
from ampwise.evidence.speed_verdict import is_noisy
from ampwise.evidence.timing import MatrixProduct
from ampwise.hardware.catalog import Gpu, find_gpu
from ampwise.tune.compare.contender import AGAIN, Contender
from ampwise.tune.compare.gpu_clocks import ClockWatch
from ampwise.tune.compare.guarding import WeightGuard
from ampwise.tune.compare.intensity import intensity_of
from ampwise.tune.compare.layers import layer_times
from ampwise.tune.compare.lineup import Lineup
from ampwise.tune.compare.losses import LossCheckup
from ampwise.tune.compare.memory import peak_of
from ampwise.tune.compare.profiling import profiled_step
from ampwise.tune.compare.reading import Reading, read, recorded, typical
from ampwise.tune.compare.rounds import Times, noise_of, pace_for, ratios, take_rounds, warm_up
from ampwise.tune.compare.timing import Clock
from ampwise.tune.compare.work import count_flops
from ampwise.tune.subject import Subject
from ampwise.watch.profiler import profile_of

__all__ = ["Measuring", "Progress", "Settings"]

Progress = Callable[[int, int, str], object]  # steps done, steps in all, what is being done

HOPELESS = 10.0  # times as long as FP32: one pass has said it all
NOT_LONG = 1.0  # seconds, which any pass may take
GIVEN_UP = "given up after one pass"
PROFILED = 3  # steps: one of them may have been held up
TIMES_TOLD = 4  # besides the rounds: loss, warm-up, memory, profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How it is measured; None: by how long a step takes."""

    clock: Clock
    rounds: int | None = None
    steps: int | None = None
    progress: Progress | None = None


class Measuring:
    """Runs once; then it has rows and the rest of what was measured."""

    def __init__(self, subject: Subject, contenders: Sequence[Contender], settings: Settings) -> None:
        self._subject, self._settings = subject, settings
        self._contenders = list(contenders)
        self._lineup = Lineup(contenders, subject.device)
        self._losses: dict[str, LossCheck] = {}
        self._memory: dict[str, StepMemory] = {}
        self._times: Times = {}
        self._skipped: dict[str, int] = {}
        self._readings: dict[str, Reading] = {}
        self._products: dict[str, tuple[MatrixProduct, ...]] = {}
        self._slower: dict[str, float] = {}
        self._watch = ClockWatch(subject.device)
        self._done, self._total = 0, TIMES_TOLD * len(self._contenders)
        self.rounds = 0
        self.flops: float | None = None
        self.noise: float | None = None
        self.clocks: GpuClocks | None = None

    def run(self) -> None:
        """Is it the same computation; how long does a step take; what does it do in that time."""
        self._check_losses()
        first = next(iter(self._lineup), None)
        if first is None:
            return
        self.flops = self._lineup.look(first, partial(count_flops, first), "FLOPs, counted in a step")
        self._lineup.add(first.again())
        guard = WeightGuard(self._lineup, self._subject, first.step.optimizer)
        seconds = warm_up(self._lineup, self._settings.clock, partial(self._told, "warming up"), guard.look)
        self._take_memory()
        pace = pace_for(seconds, self._settings.rounds, self._settings.steps)
        self.rounds = pace.rounds
        self._total += pace.rounds * len(self._lineup) + 1  # and the warm-up of the one that runs twice
        for contender in self._lineup:
            contender.forget_steps()
        self._watch.look()
        self._times = take_rounds(
            self._lineup, self._settings.clock, pace, partial(self._told, "measuring"), self._watch.look
        )
        self.clocks = self._watch.seen()
        self.noise = noise_of(self._times, first.label, f"{first.label} {AGAIN}")
        self._skipped = {contender.label: contender.skipped for contender in self._lineup}
        guard.insist()
        self._profile()

    def rows(self) -> tuple[Row, ...]:
        """In the order in which contenders were given."""
        return tuple(self._row(contender) for contender in self._contenders)

    def layers(self) -> tuple[LayerTime, ...]:
        """By the profiles of those that are not compiled."""
        eager = {one.label for one in self._contenders if not one.compiled}
        modules = {label: reading.modules for label, reading in self._readings.items() if label in eager}
        if not modules:
            return ()
        step_s = {label: Spread.of(self._times[label]).median for label in modules if label in self._times}
        return layer_times(self._subject.model, modules, step_s, certain=not is_noisy(self.noise))

    def not_measured(self) -> Iterator[str]:
        """What one may look for and is not there, as sentences."""
        yield from self._lineup.not_seen
        yield "Waiting for data is not part of a step here: `ampwise run` measures it."
        if self._subject.device.type != "cuda":
            yield "Memory and the clock of the device: only CUDA devices are asked for them."
        elif self.clocks is None:
            yield "The clocks of the GPU: they are asked for through nvidia-ml-py (pip install nvidia-ml-py)."
        if self.noise is None:
            yield "Noise: no precision could be measured twice."
        if any(one.compiled for one in self._contenders):
            yield "Layers of compiled rows: their modules are fused."

    def _check_losses(self) -> None:
        checkup = LossCheckup(self._subject, self._settings.clock)
        base: float | None = None
        for contender in self._lineup:
            self._told("comparing losses", contender.label)
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
        """What is not finite is not trained by: the weights are those of the others, too."""
        what = "gradients are not finite" if math.isfinite(loss.loss) else f"loss is {loss.loss:g}"
        if contender.is_base:
            raise BadInput(
                f"{self._subject.name}: FP32's {what} before any precision is compared: first see that the model and "
                "the batch give numbers."
            )
        self._lineup.drop(contender, f"not finite: the {what}")

    def _take_memory(self) -> None:
        for contender in self._left():
            self._told("counting memory", contender.label)
            peak = self._lineup.look(contender, partial(peak_of, contender), "The memory")
            if peak is not None:
                self._memory[contender.label] = peak

    def _profile(self) -> None:
        for contender in self._left():
            self._told("profiling", contender.label)
            seen = self._lineup.look(contender, partial(_looked_into, contender), "The profile")
            if seen is not None:
                self._readings[contender.label], self._products[contender.label] = seen

    def _left(self) -> list[Contender]:
        """Without the one that runs a second time."""
        return [contender for contender in self._lineup if contender in self._contenders]

    def _told(self, doing: str, label: str) -> None:
        self._done += 1
        if self._settings.progress is not None:
            self._settings.progress(min(self._done, self._total), self._total, f"{doing}: {label}")

    def _row(self, contender: Contender) -> Row:
        label, name = contender.label, contender.precision
        base = f"{BASE} compiled" if contender.compiled else BASE
        times = self._times.get(label)
        gpu = _gpu(self._subject.device)
        peak = gpu.figure(name) if gpu is not None else None
        reading, products = self._readings.get(label), self._products.get(label, ())
        return Row(
            precision=name,
            compiled=contender.compiled,
            problem=self._lineup.problems.get(label),
            slower=self._slower.get(label),
            loss=self._losses.get(label),
            step_s=Spread.of(times) if times else None,
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


def _looked_into(contender: Contender) -> tuple[Reading, tuple[MatrixProduct, ...]]:
    results = [profiled_step(contender) for _ in range(PROFILED)]
    return typical([read(*recorded(each)) for each in results]), profile_of(results[-1]).products


def _gpu(device: torch.device) -> Gpu | None:
    return find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
