"""Inductor, CUDA graphs by reduce-overhead, and FSDP2 on one GPU, by the Engine and the GradScaler."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from ampwise import Engine, GradScaler, Policy

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture
def nccl():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def build():
    torch._dynamo.reset()
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8)).cuda()


def batch(number):
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(32, 64, generator=generator), torch.randint(0, 8, (32,), generator=generator)
    return x.cuda(), y.cuda()


def whole(model):
    found = [each.detach() for each in model.parameters()]
    return torch.cat([(each.full_tensor() if hasattr(each, "placements") else each).flatten() for each in found])


def by_engine(precision, *, mode=None, sharded=False, init_scale=2.0**10, steps=20):
    model = build()
    if sharded:
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)
        fully_shard(model[2], mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    called = model if mode is None else torch.compile(model, mode=mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = Engine(called, optimizer, precision, clip_norm=1.0, scaling={"init_scale": init_scale}, trace=False)
    for number in range(steps):
        x, y = batch(number)
        with torch.compiler.set_stance("fail_on_recompile" if number > 5 else "default"):
            engine.step(lambda x, y: F.cross_entropy(called(x).float(), y), x, y)
    return engine.history, whole(model)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("sharded", [False, True], ids=["", "fsdp2"])
def test_compiled_the_engine_trains_as_eagerly(nccl, precision, mode, sharded):
    eager, compiled = by_engine(precision), by_engine(precision, mode=mode, sharded=sharded)
    assert eager[0]["skipped"] == compiled[0]["skipped"] == [False] * 20
    if precision == "fp16":
        history, _ = by_engine(precision, mode=mode, sharded=sharded, init_scale=2.0**26, steps=2)
        assert history["skipped"][0] is True, f"2**26 overflows: {[step.as_dict() for step in history]}"
    assert (eager[1] - compiled[1]).norm() < 0.02 * eager[1].norm()


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("sharded", [False, True], ids=["", "fsdp2"])
def test_a_compiled_step_with_a_scaler(nccl, scaler, sharded):
    def train(*, compiled):
        model = build()
        if sharded:
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if compiled:
            optimizer.step = torch.compile(optimizer.step)
        scaling = scaler("cuda", init_scale=2.0**26)
        for number in range(12):
            x, y = batch(number)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaling.scale(loss).backward()
            scaling.step(optimizer)
            scaling.update()
        return scaling.get_scale(), whole(model)

    (scale, eager), (same, compiled) = train(compiled=False), train(compiled=True)
    assert scale == same < 2.0**26
    torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_fp32_out_by_the_tensor_cores(dtype, compiled):
    """By ``torch.mm(out_dtype=...)`` where torch has it, and FP64 as the oracle."""
    model, x = build(), batch(0)[0]
    with Policy("bf16").keep("fp32-out", "4").apply(model), torch.autocast("cuda", dtype):
        inside = []
        model[4].register_forward_pre_hook(lambda _, args: inside.append(args[0].detach()))
        scores = model(x)
        if compiled:
            model[4]._forward_pre_hooks.clear()
            scores = torch.compile(model)(x)
    exact = inside[0].double() @ model[4].weight.detach().to(dtype).double().t() + model[4].bias.detach().double()
    assert scores.dtype == torch.float32
    # Inductor keeps in FP32 what eager code rounds to 16 bits before the layer.
    assert (scores - exact).abs().max() < (2e-2 if compiled else 1e-4)
    scores.sum().backward()
    assert all(each.grad.isfinite().all() for each in model.parameters())
