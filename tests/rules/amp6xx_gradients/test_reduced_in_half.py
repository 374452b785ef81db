import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ampwise.rules.amp6xx_gradients.reduced_in_half import BF16_RANKS, RULE, check_gradients
from ampwise.watch.gradient_health import GradientHealth
from ampwise.watch.watch import Watch

from .runs import gradients, sample_of

RNG = np.random.default_rng(0)


def reduced(dtype, *, size=2.0**-24, precision="bf16", ranks=8):
    """A run whose first gradient has this size, after it was summed in a dtype without a loss scale."""
    health = GradientHealth(precision=precision)
    health.reduced_in, health.ranks = dtype, ranks
    for step in range(1, 6):
        values = {**gradients(RNG), "layers.0.weight": np.exp2(RNG.normal(np.log2(size), 2, 4000))}
        health.add_sample(sample_of(step, values, None, fp16=dtype == "fp16"))
    return health


def test_gradients_that_fp16_flushes_in_the_sum_are_found():
    (finding,) = check_gradients(reduced("fp16"))
    assert finding.rule is RULE
    assert (finding.place.parameter, finding.place.step) == ("layers.0.weight", 5)
    # The median is at 2**-24 and the limit at 2**-25, half a standard deviation below: 31%.
    assert 0.15 < finding.evidence["lost_share_at_least"] < 0.5
    assert "reduce_dtype=torch.float32" in finding.fix


@pytest.mark.parametrize(
    "near",
    [
        {"dtype": "fp16", "size": 1e-3},  # large enough
        {"dtype": "fp16", "precision": "fp16"},  # lost in the backward pass already: AMP601
        {"dtype": "fp32"},
        {"dtype": "bf16"},
        {"dtype": "bf16", "ranks": BF16_RANKS},
        {"dtype": "fp32", "ranks": 4096},
        {"dtype": ""},  # no policy
    ],
    ids=str,
)
def test_near_misses(near):
    assert not list(check_gradients(reduced(**near)))


def test_bf16_over_more_ranks_than_it_can_count():
    total = torch.zeros((), dtype=torch.bfloat16)  # noqa: AMP408 (it shows that)
    for _ in range(2 * BF16_RANKS):
        total += 1
    assert total == BF16_RANKS, "the shares of later ranks vanish"
    (finding,) = check_gradients(reduced("bf16", ranks=2 * BF16_RANKS))
    assert finding.message == "FSDP sums these gradients over 512 ranks in BF16"


@pytest.mark.parametrize(("dtype", "found"), [(torch.float16, ["AMP614"]), (torch.float32, [])])
def test_in_a_run(dtype, found):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with Watch(timing=False) as watch:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))
            fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype))
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for _ in range(8):
                optimizer.zero_grad()
                loss = (model(torch.randn(8, 32)).float() * 1e-6).square().sum().sqrt()
                loss.backward()
                optimizer.step()
    finally:
        dist.destroy_process_group()
    assert [each.finding.rule.code for each in watch.findings] == found
    assert not watch.failures
