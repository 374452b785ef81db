"""Formats that five models tolerate, module by module; whether the result trains like FP32; the cost of the search.

A policy is searched for on a model that has been trained for a while in FP32. Then the model is trained from the
beginning, with the policy and in FP32, on the same batches in the same order. FP32 on those batches from another start
shows how much runs differ by chance. On a GPU passes are replayed as graphs, emulation and all; on a CPU there
are fewer steps.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from ampwise.train.engine import Engine
from ampwise.train.precision.policy import Policy
from ampwise.tune.search.arrangement import arrange_formats, parse_formats
from ampwise.tune.search.build_result import unit_costs
from ampwise.tune.search.fp32_error import ErrorTally, Fp32Reference, ParameterGroups
from ampwise.tune.search.passes import PassRunner, SearchBatch
from ampwise.tune.search.result import SearchResult
from ampwise.tune.search.search import search
from ampwise.tune.search.units import find_units
from benchmarks.harness import Result, note, publish_parts
from benchmarks.search_models import MODELS, Task, chain

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SUFFIX = "gpu" if ON_GPU else "cpu"
TOLERANCES = {
    "resnet": 0.2
}  # gradients jump where a ReLU or a maximum does, and batch norms spread it: BF16 is 0.1 off
TOLERANCE = 0.01  # of the others
ANY = 1e9  # a tolerance that everything meets
WARM_UP = 100  # steps in FP32 before a search
STEPS = 1000 if ON_GPU else 40
LAST = STEPS // 10  # whose losses are the final one
CLIP = 1.0
LADDERS = (
    ("fp16", "fp32"),
    ("bf16", "fp32"),
    ("e4m3", "bf16", "fp32"),
    ("mxfp8", "bf16", "fp32"),
    ("mxfp8+up", "bf16", "fp32"),
)
SEEDS = {"fp16": 1, "bf16": 1, "e4m3": 2, "mxfp8": 1, "mxfp8+up": 1}
ANOTHER = 100  # the seed of another start
GPUS = {
    "mxfp8": "b200",
    "mxfp8+up": "b200",
}  # whose datasheet says how fast matmuls are; the H200 has no tensor cores for these formats
GPU = "h200"
UNSEEN = 10**6  # where the batches begin that a search is given
SIZES = (12, 48, 192)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How a run ended."""

    loss: float
    seconds: float


Make = Callable[[torch.device], Task]


def trained(make: Make, seed: int, found: SearchResult | None, *, start: int | None = None) -> Trained:
    """A run from the beginning, by a policy or in FP32; ``start``: another seed for the weights, not for the data."""
    try:
        return _trained(_made(make, seed, start), seed, found, graph=ON_GPU)
    except RuntimeError as error:
        if not ON_GPU:
            raise
        note(f"not as a graph: {error}")
        return _trained(_made(make, seed, start), seed, found, graph=False)


def _made(make: Make, seed: int, start: int | None) -> Task:
    torch.manual_seed(seed)
    task = make(DEVICE)
    if start is not None:
        torch.manual_seed(start)
        task.model.load_state_dict(make(DEVICE).model.state_dict())
    return task


def _trained(task: Task, seed: int, found: SearchResult | None, *, graph: bool) -> Trained:
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=task.lr, fused=ON_GPU)
    policy = Policy("fp32") if found is None else found.policy
    losses = []
    began = time.perf_counter()
    with nullcontext() if found is None else found.apply(task.model):
        engine = Engine(
            task.model,
            optimizer,
            precision=policy,
            clip_norm=CLIP,
            scaling={"init_scale": 2.0**10},  # no steps lost to finding it
            graph=graph,
            trace=False,
        )
        for step in range(STEPS):
            taken = engine.step(task.loss, *task.batch(seed * STEPS + step))
            if step >= STEPS - LAST:
                losses.append(taken.loss)
    return Trained(loss=statistics.fmean(losses), seconds=time.perf_counter() - began)


def warmed(make: Make) -> Task:
    """A model after a while in FP32."""
    torch.manual_seed(0)
    task = make(DEVICE)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=task.lr)
    for step in range(WARM_UP):
        loss = task.loss(*task.batch(step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), CLIP)
        optimizer.step()
    return task


def one_model(name: str) -> Result:
    """All formats on a model: what has to stay wide, why, and how it trains."""
    make, tolerance = MODELS[name], TOLERANCES.get(name, TOLERANCE)
    task = warmed(make)
    result = Result(
        name=f"search_{name}_{SUFFIX}",
        title=f"Formats for the modules of {task.name}, and how it trains with them",
        claim=f"What is found at a tolerance of {tolerance} trains as FP32 does: the final loss within 1%.",
        columns=[
            "formats",
            "modules",
            "kept wide",
            "error",
            "loss, FP32",
            "loss, found",
            "apart",
            "bits of FP32's",
            "products at best",
            "trials",
        ],
    )
    wide = {seed: trained(make, seed, None) for seed in range(max(SEEDS.values()))}
    other = trained(make, 0, None, start=ANOTHER)
    result.rows.append(["fp32, another start", "", "", "", *_losses([wide[0]], [other]), "100%", "", ""])
    for formats in LADDERS:
        batches = [task.batch(UNSEEN + number) for number in range(4)]
        gpu = GPUS.get(formats[0], GPU)
        found = search(task.loss, batches, tolerance=tolerance, formats=formats, model=task.model, gpu=gpu)
        note(f"{name}, {formats[0]}: {found!r}")
        seeds = range(SEEDS[formats[0]])
        runs = [trained(make, seed, found) for seed in seeds]
        note(f"{name}, {formats[0]}: trained {len(runs)} × {STEPS} steps, {runs[0].seconds:.0f} s each")
        result.rows.append(
            [
                " ".join(formats),
                _counted(found),
                _kept(found),
                f"{found.error:.2g}",
                *_losses([wide[seed] for seed in seeds], runs),
                f"{found.gain.cost:.1%}",
                _faster(found),
                str(found.trials),
            ]
        )
    result.notes += [*_everywhere(task), _setting(wide[0])]
    return result


def _losses(wide: Sequence[Trained], runs: Sequence[Trained]) -> list[str]:
    """Of FP32, of the others, and how far the farthest is from its own FP32."""
    apart = [run.loss / its.loss - 1 for its, run in zip(wide, runs, strict=True)]
    means = [statistics.fmean(run.loss for run in each) for each in (wide, runs)]
    return [*(f"{mean:.4f}" for mean in means), f"{max(apart, key=abs):+.2%}"]


def _faster(found: SearchResult) -> str:
    times = found.gain.faster_than_fp32
    return "" if times is None else f"{times:.1f}× FP32's speed ({found.gain.gpu})"


def _counted(found: SearchResult) -> str:
    return ", ".join(f"{count} {fmt}" for fmt, count in found.counts.items() if count)


def _kept(found: SearchResult) -> str:
    raised = [each.name or "(itself)" for each in found.ranking if each.narrower is not None]
    return ", ".join(raised[:4]) + (f" and {len(raised) - 4} more" if len(raised) > 4 else "")


def _everywhere(task: Task) -> list[str]:
    """What each format does where all modules have it, and to which one the most."""
    told = []
    for formats in LADDERS:
        fmt, batches = formats[0], [task.batch(UNSEEN + number) for number in range(2)]
        found = search(task.loss, batches, tolerance=ANY, formats=(fmt, "fp32"), model=task.model)
        worst = max(found.ranking, key=lambda each: each.estimates.get(fmt, 0.0))
        told.append(
            f"{fmt} everywhere: error {found.error:.2g} (loss {found.loss_error:.1g}, gradient "
            f"{found.gradient_error:.2g} in {found.worst or 'the model itself'}); most sensitive: {worst.name}."
        )
    return told


def _setting(wide: Trained) -> str:
    return (
        f"AdamW, clipped to {CLIP}, {STEPS} steps; with e4m3 from {SEEDS['e4m3']} seeds, the one farthest apart shown. "
        f"The final loss is the mean of the last {LAST} steps. FP32: {wide.seconds:.1f} s a run. Another start: FP32 "
        "on the same batches from other weights, which is how far apart runs are by chance. Products at best: by the "
        "peaks of a datasheet, other work not counted."
    )


def cost() -> Result:
    """Trials and time against the number of modules, with one, two and three that do not stand E4M3."""
    result = Result(
        name=f"search_cost_{SUFFIX}",
        title="What a search costs",
        claim="k sensitive modules among n are found in at most 4·log2(n)·k trials.",
        columns=["modules", "sensitive", "found", "trials", "at most", "passes", "seconds", "in FP32 passes"],
    )
    for count in SIZES:
        for sensitive in (1, 2, 3):
            torch.manual_seed(count + sensitive)
            planted = tuple(sorted(torch.randperm(count)[:sensitive].tolist()))
            task = chain(count, planted, DEVICE)
            batches = [task.batch(number) for number in range(2)]
            pass_s = _pass_seconds(task, batches[0])
            found = search(task.loss, batches, tolerance=0.05, formats=("e4m3", "bf16", "fp32"), model=task.model)
            raised = {name for name, fmt in found.modules.items() if fmt != "e4m3"}
            right = {f"layers.{place}" for place in planted}
            most = int(4 * math.log2(count) * sensitive)
            row = [count, sensitive, f"{len(raised & right)} and {len(raised - right)} more", found.trials, most]
            result.rows.append(
                [*map(str, row), str(found.passes), f"{found.seconds:.1f}", f"{found.seconds / pass_s:.0f}"]
            )
            note(f"{count} modules, {sensitive} planted: {found.trials} trials, {found.seconds:.1f} s")
    result.notes.append(
        "Trials include those in which each sensitive module is alone in the narrower format, and those on the batch "
        "held back. Passes include FP32's, two for each batch, and the one in which each module is run by itself."
    )
    return result


def _pass_seconds(task: Task, batch: Sequence[torch.Tensor]) -> float:
    """Of forward and backward in FP32."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        torch.autograd.grad(task.loss(*batch), list(task.model.parameters()))
        if ON_GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def optimum() -> Result:
    """Against all there are: six modules in three formats."""
    formats, count = ("e4m3", "bf16", "fp32"), 6 if ON_GPU else 4
    torch.manual_seed(0)
    task = chain(count, (2,), DEVICE)
    batches = [task.batch(0)]
    every = _all_errors(task, batches, formats)
    result = Result(
        name=f"search_optimum_{SUFFIX}",
        title=f"All {len(every)} assignments of {len(formats)} formats to {count} modules, tried",
        claim="The search finds the cheapest that passes, or says how far off it can be.",
        columns=["tolerance", "passing", "cheapest", "found", "off by", "at most, as told", "trials"],
    )
    for tolerance in (1e-5, 3e-5, 1e-4, 1e-3, 2e-3, 3e-3, 5e-3, 0.01, 0.05, 0.2):
        best = min(cost for error, cost in every.values() if error <= tolerance)
        passing = sum(error <= tolerance for error, _ in every.values())
        found = search(task.loss, batches, tolerance=tolerance, formats=formats, model=task.model)
        own = found.gain.cost
        result.rows.append(
            [
                f"{tolerance:g}",
                str(passing),
                f"{best:.3f}",
                f"{own:.3f}",
                f"{1 - best / own:.1%}",
                f"{found.gap:.1%}",
                str(found.trials),
            ]
        )
        note(f"tolerance {tolerance:g}: cheapest {best:.3f}, found {own:.3f} in {found.trials} trials")
    result.notes.append("Costs are bits of operands weighed by FLOPs; FP32 everywhere is 1.")
    return result


def _all_errors(
    task: Task, batches: Sequence[Sequence[torch.Tensor]], formats: Sequence[str]
) -> dict[object, tuple[float, float]]:
    choices, passes = parse_formats(formats), PassRunner(task.loss, task.model, DEVICE)
    given = [SearchBatch(tuple(batch), {}) for batch in batches]
    units = find_units(task.model, lambda: passes.forward(given[0]))
    costs = unit_costs(units, choices)
    reference = Fp32Reference(ParameterGroups(task.model, passes.parameters), map(passes.outcome, given), len(given))
    found: dict[object, tuple[float, float]] = {}
    for number, places in enumerate(itertools.product(range(len(choices)), repeat=len(units))):
        tally = ErrorTally(reference)
        for batch in given:
            tally.add(passes.outcome(batch, arrange_formats(units, [choices[place] for place in places], DEVICE)))
        found[places] = (tally.difference.error, sum(costs[unit][place] for unit, place in enumerate(places)))
        if number % 100 == 99:
            note(f"{number + 1} assignments tried")
    return found


PARTS: dict[str, Callable[[], Result]] = {
    **{name: partial(one_model, name) for name in MODELS},
    "cost": cost,
    "optimum": optimum,
}


def main(arguments: Sequence[str] | None = None) -> None:
    publish_parts("search", (__doc__ or "").partition("\n")[0], PARTS, (), arguments)


if __name__ == "__main__":
    main()
