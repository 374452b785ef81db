"""The watch on one GPU over FSDP2, inductor and CUDA graphs by reduce-overhead."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from ampwise.watch.watch import Watch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def nccl():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
@pytest.mark.parametrize("sharded", [False, True], ids=["", "fsdp2"])
def test_every_step_is_seen_and_counted(nccl, mode, sharded):
    torch._dynamo.reset()
    with Watch(timing=False) as watch:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).cuda()
        if sharded:
            fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
        called = model if mode is None else torch.compile(model, mode=mode)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        norms = []
        for number in range(16):
            generator = torch.Generator().manual_seed(number)
            x, y = (
                torch.randn(32, 64, generator=generator).cuda(),
                torch.randint(0, 8, (32,), generator=generator).cuda(),
            )
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not sharded):
                loss = F.cross_entropy(called(x), y)
            with torch.compiler.set_stance("fail_on_recompile" if number > 5 else "default"):
                loss.backward()
            grads = [each.grad.full_tensor() if sharded else each.grad for each in model.parameters()]
            norms.append(torch.cat([each.flatten() for each in grads]).norm().item())
            optimizer.step()
    assert (watch.steps, watch.failures) == (16, [])
    (health,) = watch.healths.values()
    assert health.precision == "bf16"
    seen = dict(health.norms.points)
    assert {1, 2, 4, 8, 16} <= seen.keys()
    assert [seen[step] for step in sorted(seen)] == pytest.approx([norms[step - 1] for step in sorted(seen)], rel=1e-4)
    assert not [each for each in watch.findings if each.finding.rule.code < "AMP500"]
