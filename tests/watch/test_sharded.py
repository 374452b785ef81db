"""The watch over FSDP2, and over an optimizer that exchanges gradients itself, of one rank."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from ampwise.trace import ranks
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
    assert "the weights were finite" in said(watched([("2.weight", 1e30)]))
    assert "the weights were finite" in said(watched(bad_batch=3))


class SharedSGD(torch.optim.Optimizer):
    """An optimizer that averages gradients over ranks itself, as nanochat's and modded-nanogpt's do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.from_others = 0.0

    @torch.no_grad()
    def step(self):
        for each in self.param_groups[0]["params"]:
            total = each.grad + self.from_others
            dist.all_reduce(total)
            each.sub_(total, alpha=self.param_groups[0]["lr"])


def test_an_update_that_exchanges_gradients_is_not_replayed_nor_blamed(gloo, monkeypatch):
    """The other ranks do not replay theirs: the exchange would be taken for a part of the next one."""
    monkeypatch.setattr(ranks, "is_multi_rank", lambda: True)
    with Watch(timing=False) as watch:
        model = nn.Linear(4, 1)
        optimizer = SharedSGD(model.parameters())
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.from_others = math.nan if step == 3 else 0.0
            optimizer.step()
    (seen,) = watch.seen()
    assert (seen.finding.rule.code, seen.finding.place.step) == ("AMP612", 5)
    assert "the weights were not finite before this step" in seen.finding.message
    (sentence,) = (each for each in watch.not_measured() if "step 4" in each)
    assert "it exchanges values with other ranks; theirs may not have been finite" in sentence
