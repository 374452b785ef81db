"""Cases for ranks that train with an Engine: windows of micro-batches, of which each rank has a share.

The reference is one process that has all the data of a window at once, and a loop by hand around DDP.
"""

import io
import math
from contextlib import nullcontext, redirect_stderr
from functools import partial

import torch
import torch.distributed as dist
from distributed_cases import (
    GROWTH_INTERVAL,
    INIT_SCALE,
    WRAPPERS,
    Collectives,
    digest,
    local,
    mesh_of,
    moved,
    optimizer_of,
    snapshot,
    unharmed,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ampwise import Engine
from ampwise.train import engine as engine_module

WIDE, NARROW = 32, 8  # so that the gradients are many more numbers than a small reduction has
MAX_NORM = 0.3
DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
SCALING = {"init_scale": INIT_SCALE, "growth_interval": GROWTH_INTERVAL}


def network(wrapper, norm=False):
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(WIDE)] if norm else []
    model = nn.Sequential(nn.Linear(NARROW, WIDE), *middle, nn.Tanh(), nn.Linear(WIDE, 2))
    if wrapper == "mixed":  # the head is left out of it
        fully_shard(model[0], mesh=mesh_of(2))
        return model
    return WRAPPERS[wrapper](model)


def whole(model):
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def distance(weights, others):
    return max((a - b).abs().max().item() for a, b in zip(weights, others, strict=True))


def rows_of(number, weighed):
    """How many rows of a micro-batch each rank has."""
    return (number % 3 + 1, 5 + number % 2) if weighed else (4, 4)


def batch_of(number, *, of=None, weighed=False, overflows=False):
    """Inputs and targets of a micro-batch; ``of`` a rank, or all of them."""
    counts, generator = rows_of(number, weighed), torch.Generator().manual_seed(number)
    inputs = torch.randn(sum(counts), NARROW, generator=generator)
    targets = torch.randn(sum(counts), 2, generator=generator)
    if of is not None:
        inputs, targets = inputs.split(counts)[of].clone(), targets.split(counts)[of]
    if overflows:
        inputs[0, 0] = torch.inf
    return inputs, targets


def loss_of(model, inputs, targets):
    return (model(inputs).float() - targets).square().mean()


def windows_of(micro_batches, accumulate):
    return [range(micro_batches)[start : start + accumulate] for start in range(0, micro_batches, accumulate)]


def smooth(name, model):
    """An optimizer whose first step is not all sign, so that a gradient rounded otherwise does not turn it around."""
    optimizer = optimizer_of(name, list(model.parameters()))
    for group in optimizer.param_groups:
        group["eps"] = 1e-2
    return optimizer


def decaying(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def alone(optimizer, precision, windows, due, weighed, clip):
    """One process with all the data of a window at once: weights and norms. In FP32 if nothing else is asked."""
    model = network("alone")
    optimizer = smooth(optimizer, model)
    scheduler, norms = decaying(optimizer), []
    for number, window in enumerate(windows):
        if number in due:
            continue
        inputs, targets = map(torch.cat, zip(*(batch_of(each, weighed=weighed) for each in window), strict=True))
        with torch.autocast("cpu", DTYPES[precision], enabled=precision != "fp32"):
            loss = loss_of(model, inputs, targets)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), MAX_NORM if clip else math.inf)  # noqa: AMP101 - nothing is scaled here
        norms.append(norm.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return whole(model), norms


def by_hand(optimizer, precision, windows, mine):
    """DDP with ``no_sync``, torch's scaler and clipping, as one would write it."""
    model = network("ddp")
    optimizer = smooth(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16", **SCALING)
    scheduler = decaying(optimizer)
    for window in windows:
        for number in window:
            with nullcontext() if number == window[-1] else model.no_sync():
                inputs, targets = batch_of(number, of=dist.get_rank(), overflows=number in mine)
                with torch.autocast("cpu", DTYPES[precision], enabled=precision != "fp32"):
                    loss = loss_of(model, inputs, targets)
                scaler.scale(loss / len(window)).backward()
        scaler.unscale_(optimizer)
        bad = any(not bool(p.grad.isfinite().all()) for p in model.parameters())  # noqa: AMP502 (on a CPU)
        clip_grad_norm_(model.parameters(), MAX_NORM)
        if precision == "fp16":
            scaler.step(optimizer)
            scaler.update()
        elif not bad:
            optimizer.step()
        if not bad:
            scheduler.step()
        optimizer.zero_grad()
    return digest(whole(model))


class Run:
    """An engine and what is fed to it, micro-batch by micro-batch."""

    def __init__(self, wrapper, optimizer, precision, *, accumulate, weighed, clip, norm=False):
        self.model = network(wrapper, norm)
        self.optimizer = smooth(optimizer, self.model)
        self.engine = Engine(
            self.model,
            self.optimizer,
            precision,
            accumulate=accumulate,
            weight=(lambda inputs, targets: len(inputs)) if weighed else None,
            clip_norm=MAX_NORM if clip else None,
            scheduler=decaying(self.optimizer),
            scaling=SCALING if precision == "fp16" else None,
            trace=False,  # exchanges are counted
        )
        self.weighed = weighed

    def step(self, inputs, targets):
        return self.engine.step(partial(loss_of, self.model), inputs, targets)

    def pieces(self, inputs, targets, spoil=False):
        with self.engine.autocast():
            loss = loss_of(self.model, inputs, targets)
        self.engine.backward(loss, weight=len(inputs) if self.weighed else None)
        if spoil:  # a shard of this rank
            shard = next(grad for p in self.model.parameters() if (grad := local(p.grad)).numel())
            shard.view(-1)[-1] = torch.inf
        return self.engine.apply()


def train(
    wrapper,
    optimizer="adamw-foreach",
    precision="fp32",
    style="step",
    *,
    micro_batches=6,
    accumulate=3,
    overflow=(),
    at=(),
    plant="input",
    weighed=False,
    clip=False,
    hand=False,
):
    """Train; on the ranks ``overflow``, the micro-batches ``at`` do. Windows are told by their number from 0 on."""
    rank, windows = dist.get_rank(), windows_of(micro_batches, accumulate)
    mine = at if rank in overflow else ()
    due = [number for number, window in enumerate(windows) if overflow and set(window) & set(at)]
    of = None if wrapper == "mixed" else rank  # whose head nobody exchanges: all ranks have the same data
    batches = [
        batch_of(number, of=of, weighed=weighed, overflows=plant == "input" and number in mine)
        for number in range(micro_batches)
    ]
    run = Run(wrapper, optimizer, precision, accumulate=accumulate, weighed=weighed, clip=clip)
    facts = {"elements": [], "collectives": [], "moved": [], "harmed": []}

    def feed(numbered):
        for number, batch in numbered:
            before = snapshot(run.optimizer)
            spoil = {"spoil": number in mine} if plant == "shard" else {}
            with Collectives(sizes=True) as collectives:
                step = run.pieces(*batch, **spoil) if style == "pieces" else run.step(*batch)
            facts["elements"].append(collectives.elements)
            facts["collectives"].append(collectives.count)
            note(step, before)

    def note(step, before):
        if step.closed:
            after = snapshot(run.optimizer)
            facts["moved"] += [step.number - 1] if moved(before, after) else []
            facts["harmed"] += [step.number - 1] if step.skipped and not unharmed(before, after) else []

    feed(enumerate(run.engine.batches(batches) if style == "batches" else batches))
    if style == "flush":
        before = snapshot(run.optimizer)
        with Collectives(sizes=True) as collectives:
            step = run.engine.flush()
        facts["elements"].append(collectives.elements)
        note(step, before)
    history = run.engine.history
    weights, (weights_due, norms_due) = whole(run.model), alone(optimizer, precision, windows, due, weighed, clip)
    good = [norm for norm, skipped in zip(history["grad_norm"], history["skipped"], strict=True) if not skipped]
    return facts | {
        "due": due,
        "skipped": [number for number, skipped in enumerate(history["skipped"]) if skipped],
        "scales": history["scale"],
        "lrs": [*history["lr"], run.engine.lr],
        "counts": [run.engine.applied_steps, run.engine.skipped_steps],
        "weights": digest(weights),
        "finite": all(bool(weight.isfinite().all()) for weight in weights),
        "away": distance(weights, weights_due),
        "norms_away": max((abs(a - b) / b for a, b in zip(good, norms_due, strict=True)), default=0.0),
        "by_hand": by_hand(optimizer, precision, windows, mine) if hand else None,
    }


def statistics(overflow):
    """BatchNorm under DDP: what a rank has in it after each of three windows; in the second, one overflows."""
    run = Run("ddp", "adamw-fused", "fp16", accumulate=2, weighed=False, clip=False, norm=True)
    layer, seen = run.model.module[1], []
    for number in range(6):
        bad = number == 2 and dist.get_rank() in overflow
        run.step(*batch_of(number, of=dist.get_rank(), overflows=bad))
        if number % 2:
            seen.append([layer.running_mean.tolist(), layer.running_var.tolist(), layer.num_batches_tracked.item()])
    return {"statistics": seen, "skipped": run.engine.history["skipped"], "weights": digest(whole(run.model))}


def bad_batches(wrapper, bad_on):
    """FP16 with a NaN in every third batch of some ranks: the loss scale after each step, and what both ended with."""
    model = network(wrapper)
    engine = Engine(
        model,
        smooth("adamw-fused", model),
        "fp16",
        scaling={"init_scale": 64.0, "min_scale": 32.0, "growth_interval": 5},
    )
    with redirect_stderr(io.StringIO()):
        for number in range(15):
            inputs, targets = batch_of(number, of=dist.get_rank())
            if number % 3 == 1 and dist.get_rank() in bad_on:
                inputs[0] = torch.nan
            engine.step(partial(loss_of, model), inputs, targets)
        counts = [engine.applied_steps, engine.skipped_steps]
    return {"counts": counts, "scale": engine.scaler.get_scale(), "weights": digest(whole(model))}


def resume(wrapper, precision, after, weighed=False):
    """Broken off after a number of micro-batches and taken up by another engine; weights with the break and without."""

    def run():
        return Run(wrapper, "adamw-fused", precision, accumulate=3, weighed=weighed, clip=True)

    def feed(run, numbers):
        for number in numbers:
            run.step(*batch_of(number, of=dist.get_rank(), weighed=weighed))
        return run

    unbroken, first = feed(run(), range(9)), feed(run(), range(after))
    file = io.BytesIO()
    torch.save([first.model.state_dict(), first.optimizer.state_dict(), first.engine.state_dict()], file)  # noqa: AMP204
    file.seek(0)
    second = run()
    with torch.serialization.safe_globals([DTensor]):
        model, optimizer, engine = torch.load(file, weights_only=wrapper == "ddp")
    second.model.load_state_dict(model)
    second.optimizer.load_state_dict(optimizer)
    second.engine.load_state_dict(engine)
    feed(second, range(after, 9))
    weights = [digest(whole(run.model)) for run in (unbroken, second)]
    return {"weights": weights, "lrs": [unbroken.engine.lr, second.engine.lr]}


def late_flush(wrapper):
    """flush() in the middle of a window, and what the engine does after it."""
    run = Run(wrapper, "adamw-fused", "fp32", accumulate=3, weighed=False, clip=False)
    run.step(*batch_of(0, of=dist.get_rank()))
    try:
        run.engine.flush()
        refusal = None
    except ValueError as error:
        refusal = str(error)
    steps = [run.step(*batch_of(number, of=dist.get_rank())) for number in (1, 2)]
    weights, _ = alone("adamw-fused", "fp32", [range(3)], (), False, False)
    return {"refusal": refusal, "closed": [step.closed for step in steps], "away": distance(whole(run.model), weights)}


def failing(wrapper):
    """A backward pass fails in the middle of a window: nothing of the window stays in the next."""
    run = Run(wrapper, "adamw-fused", "fp32", accumulate=2, weighed=False, clip=False)
    run.step(*batch_of(7, of=dist.get_rank()))
    try:
        run.engine.step(lambda: Failing.apply(loss_of(run.model, *batch_of(8, of=dist.get_rank()))))
    except ArithmeticError as error:
        failed = str(error)
    for number in range(2):
        run.step(*batch_of(number, of=dist.get_rank()))
    weights, _ = alone("adamw-fused", "fp32", [range(2)], (), False, False)
    return {"failed": failed, "away": distance(whole(run.model), weights)}


def options_of_ddp(**options):
    """Three windows of three micro-batches with DDP as it is made by default, and with options: all weights."""
    ended = []
    for each in ({}, options):
        model = network("alone")
        wrapped = DistributedDataParallel(model, **each)
        engine = Engine(wrapped, torch.optim.AdamW(model.parameters(), fused=True), "bf16", accumulate=3, clip_norm=0.1)
        for number in range(9):
            engine.step(partial(loss_of, wrapped), *batch_of(number, of=dist.get_rank()))
        ended.append(digest(whole(model)))
    return {"weights": ended}


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("on purpose")


def auto(alike):
    """precision="auto", with ranks that choose alike or not: what is said, and the error."""
    choose, rank, said = engine_module.choose_precision, dist.get_rank(), io.StringIO()
    if not alike and rank == 1:
        engine_module.choose_precision = lambda asked, device: choose("fp32", device)
    elif not alike:
        engine_module.choose_precision = lambda asked, device: choose("bf16", device)
    error = None
    try:
        with redirect_stderr(said):
            model = DistributedDataParallel(nn.Linear(2, 1))
            Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except ValueError as caught:
        error = str(caught)
    finally:
        engine_module.choose_precision = choose
    return {"error_text": error, "said": said.getvalue()}


def explained(wrapper, precision, fault, on, accumulate=1):
    """Four steps of which the second goes bad on some ranks: what is found, said, and left of the training."""
    ended = []
    for trace in (False, True):
        torch.manual_seed(dist.get_rank())
        model, said = network(wrapper, norm=wrapper == "ddp"), io.StringIO()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaling = (
            {"scaling": {"init_scale": 1024.0}} if precision == "fp16" else {}
        )  # where half of it rounds no otherwise
        with redirect_stderr(said):
            engine = Engine(model, optimizer, precision, trace=trace, accumulate=accumulate, **scaling)
            for number in range(4 * accumulate):
                x, y = batch_of(number, of=dist.get_rank())
                is_bad = number == 1 and dist.get_rank() in on
                if is_bad and fault == "bad batch":
                    x[0, 0] = torch.nan
                engine.step(partial(FAULTS.get(fault, loss_of) if is_bad else loss_of, model), x, y)
            findings = engine.findings
        ended.append(digest([each.reshape(-1) for each in (*whole(model), *model.buffers(), torch.get_rng_state())]))
    return {
        "weights": ended,
        "findings": [(each.rule.name, each.place.rank, each.place.step) for each in findings],
        "said": said.getvalue(),
        "skipped": engine.history["skipped"],
    }


def loss_with_an_infinite_derivative(model, inputs, targets):
    outputs = model(inputs).float()
    return (outputs - targets).square().mean() + (outputs * 0.0).square().sum().sqrt()


def loss_that_cannot_be_had_twice(model, inputs, targets):
    if hasattr(model, "was_called"):
        raise LookupError("there is no more data")
    model.was_called = True
    return loss_of(model, inputs, targets) * torch.nan


FAULTS = {
    "infinite derivative": loss_with_an_infinite_derivative,
    "once": loss_that_cannot_be_had_twice,
}

CASES = {
    "engine_explained": explained,
    "engine_train": train,
    "engine_statistics": statistics,
    "engine_bad_batches": bad_batches,
    "engine_resume": resume,
    "engine_late_flush": late_flush,
    "engine_failing": failing,
    "engine_options_of_ddp": options_of_ddp,
    "engine_auto": auto,
}
