"""The cases, as each rank runs them: train a little, overflow where told, report the facts.

A job is something to train: parameters arranged over the ranks, gradients for every step, the whole weights at the
end. The same job arranged for one rank is the reference, which torch steps without any scaler.
"""

import hashlib
import itertools
from functools import partial

import torch
import torch._dynamo  # which fully_shard imports when first used: here once, for both ranks
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

STEPS = 20
OVERFLOWS = (0, 4, 5, 11)  # the first step too: there optimizers make their state
GROWTH_INTERVAL = 2
INIT_SCALE = 1024.0
MAX_NORM = 0.3  # below every norm that occurs here, so that every step is clipped

OPTIMIZERS = {
    "adamw-loop": partial(torch.optim.AdamW, lr=1e-3, foreach=False),
    "adamw-foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "sgd-foreach": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=True),
    "sgd-fused": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
}


def scaler_of(contender, *, agree=False, **options):
    """A contender's scaler; ``agree``: told to agree over all ranks, where it has to be told."""
    options = {"device": "cpu", "init_scale": INIT_SCALE, "growth_interval": GROWTH_INTERVAL, **options}
    if contender == "ampwise":
        from ampwise import GradScaler

        return GradScaler(**options, process_group=dist.group.WORLD if agree else None)
    return {"torch": torch.amp.GradScaler, "sharded": ShardedGradScaler}[contender](**options)


def local(tensor):
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def tensor_parallel(model):
    """Cut by columns over one dimension of the mesh, by FSDP2 over the other: shards of shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


WRAPPERS = {
    "alone": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp1": partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu")),
    "fsdp2": lambda model: fully_shard(model, mesh=mesh_of(2)),
    "hsdp-1x2": lambda model: fully_shard(model, mesh=mesh_of(1, 2)),
    "hsdp-2x2": lambda model: fully_shard(model, mesh=mesh_of(2, 2)),
    "fsdp2-tensor-parallel": tensor_parallel,
    "hsdp-2x1": lambda model: fully_shard(model, mesh=mesh_of(2, 1)),
}


class Network:
    """A small network under some kind of data parallelism. Its overflows are planted in one rank's input, which
    spreads with the reduction, or in one rank's shard of a gradient."""

    def __init__(self, wrapper, *, widths=(4, 8, 2), plant="shard", dtype="float32", ranks_alike=1):
        torch.manual_seed(0)
        self.dtype, self.widths, self.plant = getattr(torch, dtype), widths, plant
        # Of the batch; ranks_alike of them get the same.
        mine, of = (0, 1) if wrapper == "alone" else (dist.get_rank(), dist.get_world_size())
        self.share = slice(mine // ranks_alike, None, max(of // ranks_alike, 1))
        layers = [nn.Linear(*pair, dtype=self.dtype) for pair in itertools.pairwise(widths)]
        self.model = WRAPPERS[wrapper](nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())]))
        self.parameters = list(self.model.parameters())

    def backward(self, step, scaler, overflows):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, self.widths[0], generator=generator).to(self.dtype)[self.share]
        targets = torch.randn(8, self.widths[-1], generator=generator).to(self.dtype)[self.share]
        if overflows and self.plant == "input":
            inputs[0, 0] = torch.inf
        loss = (self.model(inputs) - targets).square().mean()
        (scaler.scale(loss) if scaler else loss).backward()
        if overflows and self.plant == "shard":
            shard = next(grad for p in self.parameters if p.grad is not None and (grad := local(p.grad)).numel())
            shard.view(-1)[-1] = torch.inf

    def whole(self):
        if isinstance(self.model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(self.model):
                return [p.detach().clone() for p in self.model.parameters()]
        return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in self.parameters]


class Tensors:
    """Parameters of chosen kinds, with made-up gradients; ``hit`` is the index of the one that overflows.

    Kinds: plain (equal on all ranks), half (plain too, with other rows on each rank), first (rank 0 has it, rank 1
    an empty one without gradient), and DTensors: sharded, uneven (rank 1 has nothing), replicated, grid (sharded over
    another mesh), partial (replicated, with a gradient still to be summed over the ranks).
    """

    def __init__(self, kinds, *, hit=0, alone=False):
        self.kinds = ["plain"] * len(kinds) if alone else kinds
        self.shapes = [(1, 5) if kind == "uneven" else (4, 3) for kind in kinds]
        self.hit, self.shared_hit = hit, self.kinds[hit] in ("plain", "replicated")
        self.line, self.grid = (None, None) if alone else (mesh_of(2), mesh_of(1, 2))
        self.parameters = [nn.Parameter(tensor) for tensor in self.arranged(-1)]

    def arranged(self, seed):
        generator = torch.Generator().manual_seed(1000 + seed)
        for kind, shape in zip(self.kinds, self.shapes, strict=True):
            yield self.arrange(torch.randn(shape, generator=generator), kind, gradient=seed >= 0)

    def arrange(self, full, kind, gradient):
        if kind == "plain":
            return full
        if kind == "half":
            return full.chunk(2)[dist.get_rank()].clone()
        if kind == "first":
            return full if dist.get_rank() == 0 else None if gradient else full[:0]
        part = partial(DTensor.from_local, run_check=False, shape=full.shape, stride=full.stride())
        if kind == "partial" and gradient:
            return part(full * (0.25, 0.75)[dist.get_rank()], self.line, [Partial()])
        if kind in ("replicated", "partial"):
            return part(full, self.line, [Replicate()])
        rows = full.tensor_split([(len(full) + 1) // 2])[dist.get_rank()].clone()
        return part(rows, self.grid, [Replicate(), Shard(0)]) if kind == "grid" else part(rows, self.line, [Shard(0)])

    def backward(self, step, scaler, overflows):
        scale = scaler.scale(torch.ones(())).item() if scaler else 1.0
        for parameter, gradient in zip(self.parameters, self.arranged(step), strict=True):
            parameter.grad = None if gradient is None else gradient * scale
        if overflows:
            local(self.parameters[self.hit].grad).view(-1)[-1] = torch.inf

    def whole(self):
        return [self.joined(p.detach(), kind) for p, kind in zip(self.parameters, self.kinds, strict=True)]

    def joined(self, parameter, kind):
        if kind not in ("half", "first"):
            return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, parameter)
        return torch.cat(parts)


JOBS = {
    "ddp": (Network, {"wrapper": "ddp", "plant": "input"}),
    "fsdp1": (Network, {"wrapper": "fsdp1"}),
    "fsdp2": (Network, {"wrapper": "fsdp2"}),
    "fsdp2-input": (Network, {"wrapper": "fsdp2", "plant": "input"}),
    "fsdp2-uneven": (Network, {"wrapper": "fsdp2", "widths": (5, 3, 1)}),
    "fsdp2-empty": (Network, {"wrapper": "fsdp2", "widths": (5, 1)}),  # rank 1 holds nothing at all
    "fsdp2-bf16": (Network, {"wrapper": "fsdp2", "dtype": "bfloat16"}),
    "ddp-bf16": (Network, {"wrapper": "ddp", "dtype": "bfloat16", "plant": "input"}),
    "fsdp2-tensor-parallel": (Network, {"wrapper": "fsdp2-tensor-parallel", "ranks_alike": 2}),
    "hsdp-1x2": (Network, {"wrapper": "hsdp-1x2"}),
    "hsdp-2x2": (Network, {"wrapper": "hsdp-2x2", "plant": "input"}),
    "hsdp-2x1": (Network, {"wrapper": "hsdp-2x1", "plant": "input"}),
}


def job_of(job, hit=0):
    """A job by name and its reference; a name with ``+`` is a list of kinds of tensors: sharded+plain."""
    if job in JOBS:
        kind, options = JOBS[job]
        return kind(**options), kind(**{**options, "wrapper": "alone"})
    kinds = job.split("+")
    return Tensors(kinds, hit=hit), Tensors(kinds, alone=True)


# What a training loop may do between backward() and step(): each returns the norm, if it has one.
PATHS = {
    "step": lambda scaler, optimizer, parameters: None,
    "clip": lambda scaler, optimizer, parameters: scaler.clip_(optimizer, MAX_NORM),
    "unscale": lambda scaler, optimizer, parameters: scaler.unscale_(optimizer),
    "unscale, clip": lambda scaler, optimizer, parameters: (
        scaler.unscale_(optimizer),
        scaler.clip_(optimizer, MAX_NORM),
    )[-1],
    "unscale, torch's clip": lambda scaler, optimizer, parameters: (
        scaler.unscale_(optimizer),
        clip_grad_norm_(parameters, MAX_NORM),
    )[-1],
}


class Collectives(TorchDispatchMode):
    """Counts collectives by the process groups' own numbering; with ``sizes``, also looks at what is sent."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        self.elements = []

    @staticmethod
    def number():
        return sum(group._get_sequence_number_for_group() for group in distributed_c10d._world.pg_map)

    def __enter__(self):
        self.before = self.number()
        return super().__enter__() if self.sizes else self

    def __exit__(self, *error):
        self.count = self.number() - self.before
        if self.sizes:
            super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor take it apart: its collectives come by again
        if "c10d" in function.namespace and "reduce" in function.__name__:
            tensors = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
            self.elements.append(sum(tensor.numel() for tensor in tensors))
        return function(*args, **(kwargs or {}))


def snapshot(optimizer):
    """This rank's bits of parameters and optimizer state."""
    tensors = {}
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        tensors[index, "parameter"] = local(parameter)
        state = optimizer.state.get(parameter, {})
        tensors |= {(index, name): local(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: tensor.contiguous().reshape(-1).view(torch.uint8).clone() for name, tensor in tensors.items()}


def moved(before, after):
    return any(not torch.equal(bits, after[name]) for name, bits in before.items() if name[1] == "parameter")


def unharmed(before, after):
    """State that a skipped step has made must be zero, which is what the optimizer would begin with."""
    return all(torch.equal(bits, before[name]) if name in before else not bits.any() for name, bits in after.items())


def digest(tensors):
    return hashlib.sha256(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)).hexdigest()


def optimizer_of(name, parameters):
    """One optimizer. Torch's foreach and fused ones take DTensors and plain tensors only in groups apart."""
    groups = itertools.groupby(parameters, lambda parameter: "loop" in name or isinstance(parameter, DTensor))
    return OPTIMIZERS[name]([{"params": list(members)} for _, members in groups])


def reference(job, optimizer, due, clip):
    """The norm of every good step, of the same job on one rank without a scaler."""
    optimizer = optimizer_of(optimizer, job.parameters)
    norms = []
    for step in (step for step in range(STEPS) if step not in due):
        optimizer.zero_grad()
        job.backward(step, None, overflows=False)
        norms.append(clip_grad_norm_(job.parameters, MAX_NORM if clip else torch.inf).item())
        optimizer.step()
    return norms


def scales_due(due, enabled):
    scale, good = INIT_SCALE, 0
    for step in range(STEPS):
        if enabled and step in due:
            scale, good = scale / 2, 0
        elif enabled:
            good += 1
            scale, good = (scale * 2, 0) if good == GROWTH_INTERVAL else (scale, good)
        yield scale if enabled else 1.0


def outcome(job, same_alone):
    weights, weights_due = job.whole(), same_alone.whole()
    return {
        "holds": sum(local(parameter).numel() for parameter in job.parameters),
        "weights": digest(weights),
        "finite": all(bool(weight.isfinite().all()) for weight in weights),
        "tolerance": 1e-6 if weights[0].dtype == torch.float32 else 1e-2,
        "away": max((a - b).abs().max().item() for a, b in zip(weights, weights_due, strict=True)),
    }


def train(contender, job, optimizer, overflow, path="step", *, hit=0, at=OVERFLOWS, sizes=False, **options):
    """Train for STEPS, overflowing at the steps ``at`` on the ranks ``overflow``; say what was skipped and came out."""
    job, same_alone = job_of(job, hit)
    due = at if overflow else ()
    mine = due if dist.get_rank() in overflow or (overflow and getattr(job, "shared_hit", False)) else ()
    facts = {"due": list(due), "scales_due": list(scales_due(due, options.get("enabled", True)))}
    facts["norms_due"] = reference(same_alone, optimizer, due, "clip" in path)
    facts |= {"skipped": [], "scales": [], "collectives": [], "elements": [], "harmed": [], "norms": []}

    optimizer, scaler = optimizer_of(optimizer, job.parameters), scaler_of(contender, **options)
    facts["said"] = [] if hasattr(scaler, "skipped") else None
    for step in range(STEPS):
        optimizer.zero_grad()
        job.backward(step, scaler, step in mine)
        before = snapshot(optimizer)
        with Collectives(sizes) as collectives:
            norm = PATHS[path](scaler, optimizer, job.parameters)
            scaler.step(optimizer)
            scaler.update()
        after = snapshot(optimizer)
        facts["skipped"] += [] if moved(before, after) else [step]
        facts["said"] = [*facts["said"], step] if getattr(scaler, "skipped", False) else facts["said"]
        facts["harmed"] += [step] if step in due and not unharmed(before, after) else []
        facts["scales"].append(scaler.get_scale())
        facts["collectives"].append(collectives.count)
        facts["elements"] += collectives.elements
        if norm is not None and step not in due:
            facts["norm_kind"] = f"{type(norm).__name__} {norm.dtype} {list(norm.shape)}"
            facts["norms"].append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
    counted = getattr(scaler, "skipped_steps", None)
    return facts | {"counted": counted, "state": scaler.state_dict()} | outcome(job, same_alone)


def two_optimizers(contender, overflow, path="step", **options):
    """One optimizer holds shards, which overflow, the other plain tensors, which do not."""
    shards, plain = Tensors(["sharded", "uneven"]), Tensors(["plain"])
    optimizers = [OPTIMIZERS["adamw-fused"](job.parameters) for job in (shards, plain)]
    scaler = scaler_of(contender, **options)
    due = OVERFLOWS if overflow else ()
    facts = {"skipped": [[], []], "said": [[], []], "scales": [], "norms": [], "norms_due": [], "collectives": []}
    for step in range(STEPS):
        shards.backward(step, scaler, step in due and dist.get_rank() in overflow)
        plain.backward(step, scaler, False)
        gradients = [g for job in (["plain", "uneven"], ["plain"]) for g in Tensors(job, alone=True).arranged(step)]
        before = [snapshot(optimizer) for optimizer in optimizers]
        with Collectives(sizes=False) as collectives:
            norm = scaler.clip_(optimizers, MAX_NORM) if path == "clip" else None
            for optimizer in optimizers:
                scaler.step(optimizer)
            skips = [scaler.skipped_for(optimizer) for optimizer in optimizers]
            scaler.update()
        for index, optimizer in enumerate(optimizers):
            facts["skipped"][index] += [] if moved(before[index], snapshot(optimizer)) else [step]
            facts["said"][index] += [step] if skips[index] else []
        facts["scales"].append(scaler.get_scale())
        facts["collectives"].append(collectives.count)
        if norm is not None and step not in due:
            facts["norms"].append(norm.item())
            facts["norms_due"].append(torch.cat([gradient.reshape(-1) for gradient in gradients]).norm().item())
    weights = digest(shards.whole() + plain.whole())
    return facts | {"due": list(due), "scales_due": list(scales_due(due, enabled=True)), "weights": weights}


def collapse(contender, overflow):
    """Every step overflows, from a scale two above the floor: when does a rank give up, and with what?"""
    job = Tensors(["replicated", "sharded"], hit=1)
    optimizer = OPTIMIZERS["adamw-fused"](job.parameters)
    scaler = scaler_of(contender, min_scale=INIT_SCALE / 4)
    before = snapshot(optimizer)
    for step in range(STEPS):
        job.backward(step, scaler, dist.get_rank() in overflow)
        scaler.step(optimizer)
        try:
            scaler.update()
        except ArithmeticError as error:
            facts = {"gave_up_at": step, "with": type(error).__name__, "scale": scaler.get_scale()}
            return facts | {"unharmed": unharmed(before, snapshot(optimizer))}
    return {"gave_up_at": None}


def log_on_rank_0(contender):
    """Only one rank asks how the step went: were that a collective, it would wait for the other in vain."""
    job, same_alone = job_of("fsdp2")
    optimizer = optimizer_of("adamw-fused", job.parameters)
    scaler = scaler_of(contender)
    facts = {"norms": [], "norms_due": reference(same_alone, "adamw-fused", (), clip=False), "collectives": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        job.backward(step, scaler, overflows=False)
        with Collectives(sizes=False) as collectives:
            scaler.step(optimizer)
            scaler.update()
            if dist.get_rank() == 0:
                facts["norms"].append(scaler.grad_norm)
                _ = scaler.skipped, scaler.applied_steps, scaler.get_scale(), scaler.state_dict()
        facts["collectives"].append(collectives.count)
    return facts


CASES = {"train": train, "two_optimizers": two_optimizers, "collapse": collapse, "log_on_rank_0": log_on_rank_0}
