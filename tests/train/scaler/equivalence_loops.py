"""The loops to compare: with any scaler, and by hand without one. Same seeds, same batches, same faults."""

import inspect
import itertools
import math
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

from ...night import NIGHTLY

# Steps of a run, and those of them in which something overflows. Of the night, long enough to drift apart.
STEPS, FAULTY = (200, 20) if NIGHTLY else (60, 8)
MAX_NORM = 0.25  # the norms met lie between 0.01 and 1.1
NOT_FINITE = ("inf", "-inf", "nan")
FAULTS = (*NOT_FINITE, "huge loss")
POWER_OF_TWO = {"init_scale": 2.0**10, "growth_interval": 7}  # grows about as often as it falls
OTHER_SCALE = {"init_scale": 1000.0, "growth_factor": 1.7, "backoff_factor": 0.6, "growth_interval": 7}

REFUSED = {"Optimizer": "the base class", "LBFGS": "steps with a closure, which no scaler allows"}
# What the defaults leave out. Dampening tells a first momentum from a later one.
OPTIONS = {
    "SGD": [{"lr": 0.05}, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 1e-3}],
    "Adam": [{"amsgrad": True, "weight_decay": 1e-3}],
    "Muon": [{"ns_steps": 2}],  # of five: BF16 products are slow on a CPU
    "RMSprop": [{"lr": 1e-3, "momentum": 0.9, "centered": True}],
}


@dataclass(frozen=True)
class Arrangement:
    optimizer: str
    implementation: str
    options: tuple[tuple[str, float], ...]
    clipped: bool = False
    micro_batches: int = 1
    device: str = "cpu"
    autocast: torch.dtype | None = None

    def __str__(self):
        names = [self.optimizer, *(name for name, _ in self.options if name != "lr"), self.implementation]
        names += ["clip"] * self.clipped + ["accumulate"] * (self.micro_batches > 1)
        return "-".join([*names, self.device])

    @property
    def is_sparse(self):
        return self.optimizer == "SparseAdam"

    @property
    def is_fused_momentum(self):
        return self.implementation == "fused" and "momentum" in dict(self.options)

    def new_optimizer(self, parameters):
        choice = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}, "only": {}}
        return getattr(torch.optim, self.optimizer)(parameters, **dict(self.options), **choice[self.implementation])


def optimizers():
    """Names of all that this torch has and a scaler takes."""
    kinds = {name: kind for name, kind in vars(torch.optim).items() if inspect.isclass(kind) and name not in REFUSED}
    return sorted(name for name, kind in kinds.items() if issubclass(kind, torch.optim.Optimizer))


def implementations(name, device):
    accepted = inspect.signature(getattr(torch.optim, name)).parameters
    if "foreach" in accepted:
        yield from ("for-loop", "foreach")
    else:
        yield "only"
    if "fused" in accepted and has_fused(getattr(torch.optim, name), device):
        yield "fused"


def has_fused(kind, device):
    """Older torch takes fused=True for Adagrad, and has no kernel for CUDA."""
    if device == "cuda" and not torch.cuda.is_available():
        return False
    weight = torch.zeros(1, device=device, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    try:
        kind([weight], fused=True).step()
    except RuntimeError:
        return False
    return True


def arrangements(device):
    """Every implementation plain, and clipped with accumulation; each of the two by itself for two optimizers.

    A for-loop and foreach are the same to a scaler: by day one of them is plain and the other clipped.
    """
    return [
        Arrangement(name, implementation, tuple(options.items()), clipped, micro_batches, device)
        for name in optimizers()
        for clipped, micro_batches in itertools.product((False, True), (1, 2))
        for options in OPTIONS.get(name, [{}])
        for in_full in [name == "AdamW" or (name == "SGD" and "momentum" in options)]
        if clipped == (micro_batches > 1) or in_full
        for implementation in implementations(name, device)
        if NIGHTLY or in_full or implementation != ("for-loop" if clipped else "foreach")
    ]


@cache
def faults(arrangement, first):
    """Step to fault. The same for all implementations; ``first``: is the very first step among them."""
    dice = random.Random(f"{arrangement.optimizer} {arrangement.clipped} {arrangement.micro_batches}")
    steps = dice.sample(range(1, STEPS), FAULTY - first) + [0] * first
    return {step: dice.choice(FAULTS) for step in steps}


class Dense(nn.Module):
    """A matrix and a single number."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(48, 24) / 5)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        return self.gain * (inputs @ self.matrix).tanh()


class Sparse(nn.Module):
    """A table whose gradients are sparse, with rows met several times in a batch."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(48, 24, sparse=True)

    def forward(self, inputs):
        return self.table((inputs.abs() * 16).long().clamp_(max=47)).mean(1)


def new_model(arrangement, dtype):
    torch.manual_seed(0)
    model = Sparse() if arrangement.is_sparse else Dense()
    if arrangement.optimizer == "Muon":  # it takes matrices only
        model.gain.requires_grad_(False)
    return model.to(arrangement.device, dtype)


@cache
def batches(device, dtype):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 16, 48, generator=generator)
    targets = inputs[..., :24].sin() + 0.1 * torch.randn(8, 16, 24, generator=generator)
    return list(zip(inputs.to(device, dtype), targets.to(device, dtype), strict=True))


def backward(arrangement, model, scale, step, fault):
    """Gradients of one step; a fault is planted in one micro-batch of it."""
    count = arrangement.micro_batches
    parameters = trained(model)
    pool = batches(arrangement.device, parameters[0].dtype)
    for turn in range(count):
        inputs, targets = pool[(step * count + turn) % len(pool)]
        with torch.autocast(arrangement.device, arrangement.autocast) if arrangement.autocast else nullcontext():
            loss = mse_loss(model(inputs), targets)
        loss = scale(loss / count if count > 1 else loss)
        planted = fault if turn == step % count else None
        (loss * 1e38 * 1e38 if planted == "huge loss" else loss).backward()
        if planted in NOT_FINITE:
            plant_(random.Random(step).choice(parameters).grad, step, float(planted))


def plant_(gradient, step, value):
    values = gradient._values() if gradient.is_sparse else gradient
    values.view(-1)[step % values.numel()] = value


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass
class Run:
    parameters: list[torch.Tensor]
    start: list[torch.Tensor]
    scales: list[float] = field(default_factory=list)  # after each step
    skipped: set[int] = field(default_factory=set)
    spoiled: set[int] = field(default_factory=set)  # skipped steps that changed parameters or state all the same


def snapshot(parameters, optimizer):
    def copied(entry):
        return {name: value.clone() if torch.is_tensor(value) else value for name, value in entry.items()}

    state = [copied(optimizer.state.get(parameter, {})) for parameter in parameters]
    return [parameter.detach().clone() for parameter in parameters], state


def is_untouched(before, after):
    """Bit for bit; state a fused optimizer sets up in a skipped step must be as if it had seen nothing."""
    same = all(map(torch.equal, before[0], after[0]))
    for old, new in zip(before[1], after[1], strict=True):
        same = same and old.keys() <= new.keys()
        for name, value in new.items():
            expected = old.get(name) if name in old else value if value is None else torch.zeros_like(value)
            same = same and (torch.equal(value, expected) if torch.is_tensor(expected) else value == expected)
    return same


def with_scaler(arrangement, scaler, clip=None, *, planted=None, dtype=torch.float32):
    """The documented loop. ``clip(scaler, optimizer)`` stands between backward and step."""
    model, optimizer, run = set_up(arrangement, dtype)
    planted = faults(arrangement, first=True) if planted is None else planted
    scale = scaler.get_scale()
    for step in range(STEPS):
        before = snapshot(run.parameters, optimizer) if step in planted else None
        backward(arrangement, model, scaler.scale, step, planted.get(step))
        if clip:
            clip(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        forget_gradients_(run)
        run.scales.append(scaler.get_scale())
        if getattr(scaler, "skipped", run.scales[-1] < scale):
            run.skipped.add(step)
        if before and not is_untouched(before, snapshot(run.parameters, optimizer)):
            run.spoiled.add(step)
        scale = run.scales[-1]
    return run


def by_hand(arrangement, *, left_out, dtype=torch.float32):
    """No scaler: the steps of ``left_out`` do not happen. In float64, the clipping is written out too."""
    model, optimizer, run = set_up(arrangement, dtype)
    for step in (step for step in range(STEPS) if step not in left_out):
        backward(arrangement, model, nn.Identity(), step, None)
        if arrangement.clipped and dtype is torch.float64:
            clip_written_out_([parameter.grad for parameter in run.parameters])
        elif arrangement.clipped:
            clip_grad_norm_(run.parameters, MAX_NORM)
        optimizer.step()
        forget_gradients_(run)
    run.skipped, run.scales = set(left_out), list(scales(left_out, **POWER_OF_TWO))
    return run


def scales(skipped, init_scale, growth_interval, growth_factor=2.0, backoff_factor=0.5):
    """The documented rule: a skipped step lowers the scale, so many good ones in a row raise it. Kept in FP32."""
    scale, good = init_scale, 0
    for step in range(STEPS):
        good = 0 if step in skipped else good + 1
        factor = backoff_factor if step in skipped else growth_factor if good == growth_interval else 1.0
        scale, good = torch.tensor(scale * factor).item(), good % growth_interval
        yield scale


def forget_gradients_(run):
    for parameter in run.parameters:  # optimizer.zero_grad() takes ten times as long
        parameter.grad = None


def set_up(arrangement, dtype):
    model = new_model(arrangement, dtype)
    parameters = trained(model)
    return model, arrangement.new_optimizer(parameters), Run(parameters, [p.detach().clone() for p in parameters])


def clip_written_out_(gradients):
    values = [gradient.coalesce()._values() if gradient.is_sparse else gradient for gradient in gradients]
    norm = math.sqrt(sum(float(value.square().sum()) for value in values))
    for gradient in gradients:
        gradient.mul_(min(1.0, MAX_NORM / (norm + 1e-6)))


def are_equal(run, other):
    return all(map(torch.equal, run.parameters, other.parameters))


def distance(run, other):
    """How far apart two runs end, relative to the way the second has come."""
    ends, others, starts = map(flat, (run.parameters, other.parameters, other.start))
    return float((ends - others).norm() / (others - starts).norm())


def flat(tensors):
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])
