"""Cases for FSDP2 with a MixedPrecisionPolicy: under the engine, the watch and a guard, on any number of ranks."""

import io
import math
from contextlib import nullcontext, redirect_stderr
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_cases import digest, local
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ampwise import Engine, GradScaler, Guard
from ampwise.watch.watch import Watch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, None: None}
SCALERS = {"torch": torch.amp.GradScaler, "ampwise": GradScaler}
BATCH = 12  # of all ranks together: 1, 2 or 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(6, 10), nn.Linear(10, 8), nn.Linear(8, 3)
        self.plain = None

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x))))).float()

    def add_plain(self):
        """Add a vector that is not sharded; its gradient is averaged by hand."""
        self.plain = nn.Parameter(torch.ones(3))
        self.register_forward_hook(lambda module, args, output: output * module.plain)
        return self.plain


def network(layout="fsdp2", compute=None, reduce=None, output=None, compiled=False):
    model, ranks = Net(), dist.get_world_size()
    meshes = {"hsdp": (2, ranks // 2), "tensor": (ranks // 2, 2)}
    mesh = init_device_mesh(
        "cpu", meshes.get(layout, (ranks,)), mesh_dim_names=("a", "b")[: len(meshes.get(layout, "1"))]
    )
    if layout == "tensor":
        plan = {
            "first": ColwiseParallel(output_layouts=Replicate()),
            "second": ColwiseParallel(),
            "head": RowwiseParallel(),
        }
        parallelize_module(model, mesh["b"], plan)
    else:
        policy = MixedPrecisionPolicy(DTYPES[compute], DTYPES[reduce], DTYPES[output])
        for layer in (model.first, model.second, model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    if layout == "mixed":
        model.add_plain().register_hook(_mean_over_ranks)
    if compiled:
        model.compile(backend="aot_eager")
    return model


def _mean_over_ranks(gradient):
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def batch_of(number, layout="fsdp2"):
    """This rank's part of the batch; all of it where ranks are parts of one model."""
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(BATCH, 6, generator=generator), torch.randint(0, 3, (BATCH,), generator=generator)
    if layout == "tensor":
        return x, y
    share = slice(dist.get_rank(), None, dist.get_world_size())
    return x[share], y[share]


def whole(model):
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y)


def adamw(model, kind="foreach"):
    """An optimizer with all parameters in one group; its first step is not all sign."""
    options = {"foreach": {"foreach": True}, "loop": {"foreach": False}, "fused": {"fused": True}}[kind]
    return torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-2, **options)


def engine(layout="fsdp2", precision="fp32", optimizer="foreach", spoilt=None, steps=5, **dtypes):
    """Train by the engine; ``spoilt``: a rank whose shard gets an infinity in the third step.

    With tensor parallelism, that rank of each pair: pairs are replicas, which nothing keeps alike here.
    """
    model = network(layout, **dtypes)
    run = Engine(model, adamw(model, optimizer), precision, clip_norm=0.2, trace=False, scaling={"init_scale": 1024.0})
    norms, losses = [], []
    for number in range(steps):
        with run.autocast():
            loss = loss_of(model, *batch_of(number, layout))
        run.backward(loss)
        if number == 2 and spoilt == dist.get_rank() % (2 if layout == "tensor" else dist.get_world_size()):
            local(model.first.weight.grad).view(-1)[0] = math.inf
        step = run.apply()
        losses.append(step.loss)
        norms.append(step.grad_norm)
    weights = whole(model)
    return {
        "norms": norms,
        "losses": losses,
        "skipped": run.history["skipped"],
        "scale": run.scaler.get_scale(),
        "weights": digest(weights),
        "away": max((a - b).abs().max().item() for a, b in zip(weights, alone(layout, steps, spoilt), strict=True)),
    }


def alone(layout, steps, spoilt):
    """The weights after the same steps in FP32, in one process without anything."""
    model = Net()
    if layout == "mixed":
        model.add_plain()
    optimizer = adamw(model)
    for number in range(steps):
        if number == 2 and spoilt is not None:
            continue
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(BATCH, 6, generator=generator), torch.randint(0, 3, (BATCH,), generator=generator)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def watched(layout="fsdp2", scaler="torch", compute="fp16", watching=(0, 1, 2, 3), steps=9, compiled=False):
    """A plain loop under the watch on some ranks: what it saw, and what there was to see."""
    here = dist.get_rank() in watching
    with Watch(timing=False) if here else nullcontext() as watch:
        model = network(layout, compute=compute, reduce="fp32", compiled=compiled)
        optimizer = adamw(model, "loop")
        scaling = SCALERS[scaler]("cpu", init_scale=256.0) if scaler else None
        norms = []
        for number in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, *batch_of(number, layout))
            (loss if scaling is None else scaling.scale(loss)).backward()  # noqa: AMP108
            if scaling is None:
                norms.append(norm_of(model))
                optimizer.step()
            else:
                norms.append(norm_of(model) / 256)
                scaling.step(optimizer)
                scaling.update()
    if not here:
        return {"norms": norms}
    (health,) = watch.healths.values()
    return {
        "norms": norms,
        "seen": [norm for _, norm in health.norms.points],
        "counted": {name: census.count for name, census in (health.recent[-1].layers if health.recent else {}).items()},
        "numbers": {name: each.numel() for name, each in model.named_parameters()},
        "samples": health.samples,
        "precision": health.precision,
        "steps": health.steps,
        "findings": [str(each.finding) for each in watch.findings],
        "failures": watch.failures,
        "not_counted": [sentence for sentence in watch.not_measured() if sentence.startswith("Gradients of")],
    }


def norm_of(model):
    whole_gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return torch.cat([each.flatten() for each in whole_gradients]).norm().item()


def guarded(folder, compute="bf16"):
    """Two more steps under a guard, from its last checkpoint on: the whole state before and after."""
    model = network(compute=compute, reduce="fp32")
    optimizer = adamw(model)
    run = Engine(model, optimizer, compute, trace=False)

    def state():
        moments = [each for parameter in model.parameters() for each in optimizer.state.get(parameter, {}).values()]
        return digest([*whole(model), *[each.full_tensor() for each in moments if isinstance(each, DTensor)]])

    with redirect_stderr(io.StringIO()):
        guard = Guard(run, folder, every="100 steps")
        guard.begin()
        before, steps = state(), run.applied_steps
        for number in (0, 1):
            guard.step(partial(loss_of, model), *batch_of(steps + number))
        guard.save()
        guard.close()
    return {"before": before, "after": state(), "steps": [steps, run.applied_steps]}


CASES = {"fsdp2_engine": engine, "fsdp2_watched": watched, "fsdp2_guarded": guarded}
