"""Train a user's model in several precisions, and compare the time to the same held-back loss."""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ampwise.errors import BadInput
from ampwise.hardware.cpu import describe_cpu
from ampwise.trace.capsule.capsule_replay import device_named
from ampwise.train.engine import Engine
from ampwise.train.float8.recipe import MEASURED, Fp8
from ampwise.train.precision.policy import Policy
from ampwise.train.precision.precision import precisions_of
from ampwise.train.random_state import capture_random, restore_random
from ampwise.tune.bench.bench import CLIP_NORM, OPTIMIZER
from ampwise.tune.bench.equal_loss_result import EqualLoss, TrainingCurve, compare_curves
from ampwise.tune.bench.lineup import FP8, checked_names, make_plan
from ampwise.tune.bench.measurement import Progress
from ampwise.tune.bench.speeds import BASE
from ampwise.tune.train_case import CaseFactory, TrainCase, arguments_of, make_factory, make_optimizer, moved
from ampwise.watch.time_use import HALVES

FP8_MEASURED = "fp8-measured"
LR = 3e-4  # unless the function returns an optimizer
BUDGET_S, SEEDS = 300.0, 3
POINTS = 16  # at which losses are measured
FEWEST_STEPS = 4 * POINTS
PILOT, WARM_UP = 12, 4  # steps to find the pace, of which the first do not count
DATA_BATCHES, HELD_BATCHES = 32, 4  # rows made where the function takes a batch size, and held back of them
FROM_LOADER = 8  # batches held back of a single DataLoader
MOST_COMPILED = 64  # versions of a function: every run has its own weights

Arms = Mapping[str, str | Policy | Fp8]  # what an Engine takes, by label


def equal_loss(
    make: Callable[..., Any] | str,
    precisions: Iterable[str] | Arms | None = None,
    *,
    budget_s: float = BUDGET_S,
    seeds: int = SEEDS,
    compiled: bool = False,
    batch: int | None = None,
    device: str | torch.device | None = None,
    optimizer: str = OPTIMIZER,
    clip_norm: float | None = CLIP_NORM,
    keep_fp32: Sequence[str] = (),
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> EqualLoss:
    """Train in each precision from the same weights on the same batches, and compare the time to the same loss.

    Args:
        make: as for ``bench``. For new data in each step, its batch is a DataLoader or an iterator of batches, or a
            pair: one to train on, and one that is held back. If the function takes a batch size instead, so many rows
            are asked for that some can be held back.
        precisions: names as for ``bench``, or ``"fp8-measured"``; or what an Engine takes, by label. The others are
            compared with the first.
        budget_s: seconds of training in all. Compiling, FP8's timing and held-back losses come on top.
        seeds: runs of each precision.
        compiled, batch, device, optimizer, clip_norm, keep_fp32, progress: as for ``bench``.
        clock: replaces the host's.

    Returns:
        times, losses and ratios with their intervals; ``print`` shows them.

    Raises:
        BadInput: an argument or the data does not fit; the message says what to pass.
    """
    if not budget_s > 0 or seeds < 2:
        raise BadInput(f"equal loss: expected a budget above 0 s and at least 2 seeds, got {budget_s:g} s and {seeds}.")
    factory = make_factory(make)
    target = device_named(None if device is None else str(device), "cuda")
    arms = _arms(precisions, target, keep_fp32)
    setting = _Setting(
        factory=factory, device=target, batch=batch, optimizer=optimizer, clip_norm=clip_norm, compiled=compiled,
        clock=clock,
    )  # fmt: skip
    report = progress or (lambda done, total, doing: None)
    random_before = capture_random(target)
    try:
        with _many_versions():
            points, runs = _train_all(arms, setting, budget_s, seeds, report)
    finally:
        restore_random(random_before, target)
    base = next(iter(arms))
    return EqualLoss(
        name=factory.name,
        device_name=torch.cuda.get_device_name(target) if target.type == "cuda" else describe_cpu().model or "CPU",
        base=base,
        points=tuple(points),
        runs=tuple(runs),
        rows=compare_curves(runs, points, base),
        notes=(
            f"×at equal loss: time of {base} over its own, to the lowest held-back loss that both reach; intervals: "
            f"95%, by a bootstrap over {seeds} seeds in pairs and over held-back batches.",
            f"Constant learning rate{'' if setting.own_optimizer else f' of {LR:g}, {optimizer}'}; time without "
            "compiling and held-back losses.",
        ),
    )


def _train_all(
    arms: Mapping[str, Any], setting: _Setting, budget_s: float, seeds: int, report: Progress
) -> tuple[list[int], list[TrainingCurve]]:
    """Train each arm with each seed, as many steps as the budget allows; return at which steps losses were measured."""
    total = len(arms) * (seeds + 1)
    pace: dict[str, float] = {}
    for label, arm in arms.items():
        report(len(pace), total, f"finding the pace: {label}")
        pace[label] = _Training(setting, arm, 0).pace()
        _forget(setting.device)
    a_step_of_all = seeds * sum(pace.values())
    steps = int(budget_s / a_step_of_all)
    if steps < FEWEST_STEPS:
        raise BadInput(
            f"equal loss: {budget_s:g} s are enough for {steps} steps a run, and {FEWEST_STEPS} are needed. "
            f"Give at least {a_step_of_all * FEWEST_STEPS:.0f} s, or fewer precisions or seeds."
        )
    points = [steps * point // POINTS for point in range(POINTS + 1)]
    runs: list[TrainingCurve] = []
    for seed in range(seeds):
        for label in reversed(list(arms)) if seed % 2 else arms:
            report(len(arms) + len(runs), total, f"training: {label}, seed {seed}")
            runs.append(_Training(setting, arms[label], seed).curve(label, points))
            _forget(setting.device)
    return points, runs


def _arms(asked: Iterable[str] | Arms | None, device: torch.device, kept: Sequence[str]) -> dict[str, Any]:
    if isinstance(asked, Mapping):
        arms = dict(asked)
    else:
        names = None if asked is None else list(asked)
        plain = None if names is None else [FP8 if name == FP8_MEASURED else name for name in names]
        facts = precisions_of(device)
        entries, left_out = make_plan(None if plain is None else checked_names(plain), facts, device, compiled=False)
        if names is None:
            names = [name for name, _ in entries]
        elif left_out:
            raise BadInput(f"equal loss: {left_out[0].precision} is {left_out[0].problem}")
        arms = {name: _arm(name, kept) for name in dict.fromkeys(names)}
    if len(arms) < 2:
        raise BadInput(f"equal loss: expected at least two precisions, got {', '.join(arms)}.")
    return arms


def _arm(name: str, kept: Sequence[str]) -> str | Policy | Fp8:
    if name in (FP8, FP8_MEASURED):
        return Fp8(MEASURED) if name == FP8_MEASURED else Fp8()
    return Policy(name).keep(BASE, *kept) if kept and name in HALVES else name


@dataclass(kw_only=True)
class _Setting:
    factory: CaseFactory
    device: torch.device
    batch: int | None
    optimizer: str
    clip_norm: float | None
    compiled: bool
    clock: Callable[[], float]
    own_optimizer: bool = False


class _Training:
    """A model in training: weights and batches depend on the seed alone."""

    def __init__(self, setting: _Setting, arm: str | Policy | Fp8, seed: int) -> None:
        self._setting, self._seed, device = setting, seed, setting.device
        _seed_all(seed)
        case = setting.factory.make(device, setting.batch)
        self._batches, self._held_back = _data(setting, case, seed)
        optimizer = case.optimizer
        setting.own_optimizer = optimizer is not None
        if optimizer is None:
            optimizer = make_optimizer(setting.optimizer, case.parameters, fused=device.type == "cuda", lr=LR)
        self._engine = Engine(case.model, optimizer, arm, clip_norm=setting.clip_norm, trace=False)
        if setting.compiled:
            case = replace(case, loss_fn=torch.compile(case.loss_fn, dynamic=False))
        self._case = case

    def pace(self) -> float:
        """Return the seconds of a step, roughly, once everything is compiled."""
        self._losses()
        self._train(WARM_UP)
        return self._train(PILOT) / PILOT

    def curve(self, label: str, points: Sequence[int]) -> TrainingCurve:
        """Train through all points."""
        losses, paces = [self._losses()], []
        for before, after in pairwise(points):
            paces.append(self._train(after - before) / (after - before))
            losses.append(self._losses())
        return TrainingCurve(
            label=label,
            seed=self._seed,
            step_s=median(paces[1:]),  # the first stretch has the compiling in it
            losses=tuple(losses),
            skipped=self._engine.skipped_steps,
        )

    def _train(self, steps: int) -> float:
        """Return the seconds that so many steps take."""
        self._wait()
        begin = self._setting.clock()
        for args, kwargs in islice(self._batches, steps):
            self._engine.step(self._loss, *args, **kwargs)
        self._wait()
        return self._setting.clock() - begin

    def _loss(self, *args: Any, **kwargs: Any) -> Tensor:
        return replace(self._case, args=args, kwargs=kwargs).loss()

    @torch.no_grad()
    def _losses(self) -> tuple[float, ...]:
        """Return the loss of each held-back batch."""
        model = self._case.model
        was_training = model.training
        model.eval()
        with self._engine.autocast():
            losses = [self._loss(*args, **kwargs).float() for args, kwargs in self._held_back]
        model.train(was_training)
        return tuple(torch.stack(losses).tolist())

    def _wait(self) -> None:
        if self._setting.device.type == "cuda":
            torch.cuda.synchronize(self._setting.device)


Batch = tuple[tuple[Any, ...], Mapping[str, Any]]


def _data(setting: _Setting, case: TrainCase, seed: int) -> tuple[Iterator[Batch], list[Batch]]:
    """Return the batches to train on, which do not end, and those held back."""
    name, source = setting.factory.name, case.batches
    if source is None:
        return _of_rows(setting, case, seed)
    if setting.batch is not None and setting.factory.size_name is None:
        raise BadInput(f"{name}: set the batch size in its DataLoader, or give the function a parameter `batch`.")

    def batches(source: Iterable[Any]) -> Iterator[Batch]:
        return (arguments_of(moved(each, setting.device)) for each in source)

    if case.held_back is not None:
        held_back = list(batches(case.held_back))
        if not held_back:
            raise BadInput(f"{name}: the batches to hold back, the second of the pair it returned, are none.")
        return _again_and_again(lambda: batches(source), name), held_back
    one_pass = batches(source)
    held_back = list(islice(one_pass, FROM_LOADER))
    # An exhausted iterator has no second epoch: which of its batches would be those held back is unknown.
    return _again_and_again(lambda: one_pass, name), held_back


def _again_and_again(begin: Callable[[], Iterator[Batch]], name: str) -> Iterator[Batch]:
    """Yield batches, epoch after epoch."""
    for epoch in iter(begin, None):
        seen = False
        for batch in epoch:
            seen = True
            yield batch
        if not seen:
            raise BadInput(
                f"{name}: its batches came to an end. Return a pair as the batch, a DataLoader to train on and one "
                "that is held back: then the first is read again in each epoch."
            )


def _of_rows(setting: _Setting, case: TrainCase, seed: int) -> tuple[Iterator[Batch], list[Batch]]:
    """Ask for many rows, hold some back, and draw batches from the others, epoch after epoch."""
    rows = case.rows
    if setting.factory.size_name is None or rows is None:
        raise BadInput(
            f"{setting.factory.name}: it returns one batch, and a comparison at equal loss needs data that is held "
            "back. Return a DataLoader as the batch, or give the function a parameter `batch` that sets its rows."
        )
    random_after_weights = capture_random(setting.device)
    _seed_all(seed)
    whole = setting.factory.make(setting.device, rows * DATA_BATCHES)
    restore_random(random_after_weights, setting.device)
    data = (whole.args, dict(whole.kwargs))  # without the model
    trained = rows * (DATA_BATCHES - HELD_BATCHES)

    def part(chosen: Tensor | slice) -> Batch:
        def choose(leaf: Any) -> Any:
            has_rows = isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == rows * DATA_BATCHES
            return leaf[chosen] if has_rows else leaf

        found: Batch = tree_map(choose, data)
        return found

    def batches() -> Iterator[Batch]:
        numbers = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(trained, generator=numbers).to(setting.device)
            for first in range(0, trained, rows):
                yield part(order[first : first + rows])

    ends = range(trained, rows * DATA_BATCHES, rows)
    return batches(), [part(slice(first, first + rows)) for first in ends]


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _many_versions() -> AbstractContextManager[object]:
    """Let torch.compile keep a version for each precision and mode, and not go on uncompiled where that is too few."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    limit = next(name for name in ("recompile_limit", "cache_size_limit") if hasattr(config, name))  # now, in torch 2.6
    patched: AbstractContextManager[object] = config.patch({limit: MOST_COMPILED, f"fail_on_{limit}_hit": True})
    return patched


def _forget(device: torch.device) -> None:
    """Free the memory of a run: modules with a bound forward are cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
