"""The loops to compare: by an engine, in both of its styles, and by hand in plain torch. Same batches, same faults."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR

from ampwise import Engine

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
CLIPS = {
    "no-clip": {},
    "norm-binds": {"clip_norm": 0.1},  # the norms met lie between 0.5 and 4
    "norm-does-not": {"clip_norm": 1e3},
    "value": {"clip_value": 0.01},
}
# By the length of windows: batches, and the one that has something in it that is not finite. A scale so high overflows
# at first, then grows, and falls again with the faulty batch. Of windows of 3, the last one has 2.
BATCHES, FAULTY = {1: 8, 3: 11}, {1: 5, 3: 7}
SCALING = {
    1: {"init_scale": 2.0**30, "backoff_factor": 2.0**-9, "growth_interval": 2},
    3: {"init_scale": 2.0**30, "backoff_factor": 2.0**-18, "growth_interval": 1},
}
USUAL = {"init_scale": 2.0**10}  # nothing overflows
STATE = {AdamW: ("step", "exp_avg", "exp_avg_sq"), SGD: ("momentum_buffer",)}


class Net(nn.Module):
    """Two towers that share nothing, so that a fault can be in one of them alone."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.body = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 5))
        self.side = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, tokens, features, others):
        joined = torch.cat([self.words(tokens), features], dim=-1)
        return self.body(joined), self.side(others)


def loss_of(model, inputs, targets):
    classes, numbers = model(*inputs)
    return cross_entropy(classes, targets) + mse_loss(numbers, inputs[2].sum(-1, keepdim=True))


# Optimizers by name. Each is given the model.


def fused(model):
    return [AdamW(model.parameters(), lr=1e-2, fused=True)]


def foreach(model):
    return [AdamW(model.parameters(), lr=1e-2, foreach=True)]


def momentum(model):
    # Dampening tells a first momentum from a later one.
    return [SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.3, weight_decay=1e-3, fused=True)]


def two(model):
    towers = [*model.words.parameters(), *model.body.parameters()], list(model.side.parameters())
    return [AdamW(towers[0], lr=1e-2, fused=True), SGD(towers[1], lr=0.05, momentum=0.9, foreach=True)]


def groups(model):
    """Weight decay for matrices alone, as is usual: not the order of the model."""
    flat = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    return [AdamW([{"params": flat, "weight_decay": 0.0, "lr": 3e-2}, {"params": matrices}], lr=1e-2, fused=True)]


OPTIMIZERS = {each.__name__: each for each in (fused, foreach, momentum, two, groups)}

# Schedulers by name. Each is given an optimizer and the number of its steps.


def warm_up(optimizer, steps):
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def one_cycle(optimizer, steps):
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=steps + 1)


def sequential(optimizer, steps):
    parts = [ConstantLR(optimizer, factor=0.5, total_iters=2), CosineAnnealingLR(optimizer, T_max=steps)]
    return SequentialLR(optimizer, parts, milestones=[2])


SCHEDULERS = {"no-scheduler": None} | {each.__name__: each for each in (warm_up, one_cycle, sequential)}


@dataclass(frozen=True)
class Arrangement:
    precision: str = "fp32"
    accumulate: int = 1
    clip: str = "no-clip"
    scheduler: str = "no-scheduler"
    optimizer: str = "fused"
    trouble: bool = True  # overflows and a faulty batch

    def __str__(self):
        return "-".join([self.precision, str(self.accumulate), self.clip, self.scheduler, self.optimizer])

    @property
    def windows(self):
        return -(-len(self.batches) // self.accumulate)

    @property
    def batches(self):
        return batches(BATCHES[self.accumulate], FAULTY[self.accumulate] if self.trouble else None)

    @property
    def scaling(self):
        return SCALING[self.accumulate] if self.trouble else USUAL


@dataclass
class Run:
    """What one can see of a run, step by step."""

    losses: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    rates: list[tuple[float, ...]] = field(default_factory=list)
    bits: list[torch.Tensor] = field(default_factory=list)  # of weights and the state of optimizers
    schedules: list[dict] = field(default_factory=list)  # at the end

    def add(self, loss, skipped, scale, rates, optimizers):
        self.losses.append(loss)
        self.skipped.append(skipped)
        self.scales.append(scale)
        self.rates.append(tuple(rates))
        self.bits.append(bits_of(optimizers))


def bits_of(optimizers):
    """All weights and all state. State that is not there yet is as good as zeros."""
    tensors = []
    for optimizer in optimizers:
        for parameter in held(optimizer):
            state = optimizer.state.get(parameter, {})
            tensors.append(parameter.detach())
            tensors += [_entry(state.get(name), name, parameter) for name in STATE[type(optimizer)]]
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).view(torch.int32)


def _entry(value, name, parameter):
    if value is None:
        return torch.zeros(1) if name == "step" else torch.zeros_like(parameter)
    return value


def held(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def rates_of(optimizers):
    return [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]


@cache
def batches(count, faulty):
    generator = torch.Generator().manual_seed(1)
    every = []
    for index in range(count):
        features, others = torch.randn(2, 6, 4, generator=generator)
        if index == faulty:
            others[2, 1] = float("inf" if count % 2 else "nan")
        tokens, targets = torch.randint(12, (6,), generator=generator), torch.randint(5, (6,), generator=generator)
        every.append(((tokens, features, others), targets))
    return every


def set_up(arrangement):
    torch.manual_seed(0)
    model = Net()
    optimizers = OPTIMIZERS[arrangement.optimizer](model)
    kind = SCHEDULERS[arrangement.scheduler]
    schedulers = [kind(optimizer, arrangement.windows) for optimizer in optimizers] if kind else []
    return model, optimizers, schedulers


def by_hand(arrangement):
    """The documented loop, with a guard: all optimizers step, or none."""
    model, optimizers, schedulers = set_up(arrangement)
    data, count, dtype = arrangement.batches, arrangement.accumulate, DTYPES[arrangement.precision]
    scaler = torch.amp.GradScaler("cpu", **arrangement.scaling, enabled=arrangement.precision == "fp16")
    parameters = list(model.parameters())  # in another order the norm may have another last bit
    run = Run()
    for start in range(0, len(data), count):
        window, loss = data[start : start + count], 0.0
        for inputs, targets in window:
            with torch.autocast("cpu", dtype) if dtype else nullcontext():
                share = loss_of(model, inputs, targets) / len(window)
            scaler.scale(share).backward()
            loss = loss + share.detach()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        finite = all(parameter.grad.isfinite().all() for parameter in parameters)
        rates = rates_of(optimizers)
        clip_by_hand_(parameters, **CLIPS[arrangement.clip])
        if finite:
            for optimizer in optimizers:
                scaler.step(optimizer)
            for scheduler in schedulers:
                scheduler.step()
        scaler.update(None if loss.isfinite() else scaler.get_scale())  # a bad batch says nothing about the scale
        for optimizer in optimizers:
            optimizer.zero_grad()
        run.add(loss.item(), not finite, scaler.get_scale(), rates, optimizers)
    run.schedules = [scheduler.state_dict() for scheduler in schedulers]
    return run


def clip_by_hand_(parameters, clip_norm=None, clip_value=None):
    if clip_norm is not None:
        clip_grad_norm_(parameters, clip_norm)
    if clip_value is not None:
        clip_grad_value_(parameters, clip_value)


def by_engine(arrangement, micro_batch):
    """``micro_batch(engine, model, inputs, targets)`` is one of the two styles, below."""
    model, optimizers, schedulers = set_up(arrangement)
    engine = Engine(
        model,
        optimizers,
        arrangement.precision,
        accumulate=arrangement.accumulate,
        scheduler=schedulers or None,
        scaling=arrangement.scaling,
        **CLIPS[arrangement.clip],
    )
    run = Run()
    for inputs, targets in engine.batches(arrangement.batches):
        step = micro_batch(engine, model, inputs, targets)
        if step.closed:
            run.add(step.loss, step.skipped, step.scale, step.lrs, optimizers)
    run.schedules = [scheduler.state_dict() for scheduler in schedulers]
    assert (engine.applied_steps, engine.skipped_steps) == (run.skipped.count(False), run.skipped.count(True))
    return run


def in_one_call(engine, model, inputs, targets):
    return engine.step(loss_of, model, inputs, targets)


def in_pieces(engine, model, inputs, targets):
    with engine.autocast():
        loss = loss_of(model, inputs, targets)
    engine.backward(loss)
    return engine.apply()


def assert_same(run, other):
    assert run.skipped == other.skipped
    assert run.scales == other.scales
    assert run.rates == other.rates
    assert torch.tensor(run.losses).view(torch.int32).tolist() == torch.tensor(other.losses).view(torch.int32).tolist()
    differing = [step for step, pair in enumerate(zip(run.bits, other.bits, strict=True)) if not torch.equal(*pair)]
    assert not differing
    assert list(map(plain, run.schedules)) == list(map(plain, other.schedules))


def plain(schedule):
    """The state of a scheduler without functions, which are of another run."""
    kept = {name: value for name, value in schedule.items() if not callable(value) and name != "lr_lambdas"}
    if "_schedulers" in kept:
        kept["_schedulers"] = list(map(plain, kept["_schedulers"]))
    return kept
