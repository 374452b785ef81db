"""The watch over FSDP2, of one rank."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from ampwise.watch.watch import Watch


@pytest.fixture
def gloo():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def watched(spoiled=(), *, bad_batch=None):
    """Train six steps; ``spoiled`` are weights as uninitialised memory may be."""
    torch.manual_seed(0)
    with Watch(timing=False) as watch:
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        with torch.no_grad():
            for name, value in spoiled:
                model.get_parameter(name)[0] = value
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for step in range(6):
            x = torch.randn(8, 4) * (math.nan if step == bad_batch else 1.0)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            clip_grad_norm_(model.parameters(), 1.0)  # tries its operations on fake tensors first
            optimizer.step()
    assert not watch.failures
    return watch


def test_weights_that_were_never_initialised_are_named(gloo):
    """As in pytorch/examples, distributed/FSDP2: ``reset_parameters`` of a model on meta that leaves out its layers."""
    first = watched([("1.weight", math.nan)]).seen()[0].finding
    assert first.rule.code == "AMP902"
    assert first.message.startswith("the parameter `1.weight` (LayerNorm) had 1 NaN among 8 values before the step")
    assert first.place.step == 1


def test_weights_are_called_finite_only_where_they_were(gloo):
    def said(watch):
        return " ".join(each.finding.message for each in watch.seen() if each.finding.rule.code == "AMP612")

    assert "the weights were not finite before this step" in said(watched([("1.weight", math.nan)]))
    assert "whether the weights were finite before is unknown" in said(watched([("2.weight", 1e30)]))
    assert "the weights were finite" in said(watched(bad_batch=3))
