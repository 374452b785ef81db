"""torch.compile under the watch: as many graphs, and the same numbers."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from ampwise import GradScaler
from ampwise.watch.watch import Watch


class Model(nn.Module):
    """Does within what the watch has wrappers around."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.first(x)
        return self.second(hidden.float()) + 0 * sum(each.sum() for each in self.parameters())


def train(way):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    torch.manual_seed(0)
    counter, model = CompileCounter(), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if way == "a module":
        compiled = torch.compile(model, backend=counter, fullgraph=True)
    elif way == "in place":
        model.compile(backend=counter, fullgraph=True)
        compiled = model
    else:
        compiled = torch.compile(lambda x: model(x).sum(), backend=counter, fullgraph=True)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = compiled(torch.ones(4, 8)).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return counter.frame_count, counter.op_count, losses


@pytest.mark.filterwarnings("ignore")
def test_the_precision_of_a_compiled_model_is_that_of_its_passes():
    torch._dynamo.reset()
    with Watch(timing=False) as watch:
        model = nn.Linear(8, 2)
        compiled, optimizer = torch.compile(model, backend="eager"), torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = compiled(torch.ones(4, 8)).float().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [health.precision for health in watch.healths.values()] == ["bf16"]


@pytest.mark.half_by_day
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["a module", "in place", "a function"])
def test_a_watched_run_has_as_many_graphs(way):
    plain = train(way)
    with Watch(timing=False) as watch:
        assert train(way) == plain
    assert not watch.failures
    assert not list(watch.findings)
    assert watch.steps == 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["a module", "in place"])
def test_a_compiled_model_is_seen_to_run(way):
    with Watch(timing=False) as watch:
        train(way)
    (forward,) = watch._tracker.run_events.forwards
    assert (forward.model, forward.training, watch._tracker.run_events.forwards[forward]) == ("Model", True, 4)


SCALERS = {"torch": torch.amp.GradScaler, "ampwise": GradScaler}


def train_with_compiled_step(scaler, *, fused, watched):
    """Train with ``torch.compile(optimizer.step)``: what was compiled by each step, the weights, and the watch."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = []
    with Watch(timing=False) if watched else nullcontext() as watch:
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        scaling = SCALERS[scaler]("cpu", init_scale=64.0) if scaler else None
        for number in range(8):
            optimizer.zero_grad()
            x = torch.ones(4, 8) * (math.inf if number == 5 else 1)
            loss = model(x).square().mean()
            (loss if scaling is None else scaling.scale(loss)).backward()
            if scaling is None:
                optimizer.step()
            else:
                scaling.step(optimizer)
                scaling.update()
            compiled.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    return compiled, weights, watch


@pytest.mark.filterwarnings("ignore")
@pytest.mark.half_by_day
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("scaler", [None, *SCALERS])
def test_a_compiled_step_is_followed_and_compiled_as_often(scaler, fused):
    plain, weights, _ = train_with_compiled_step(scaler, fused=fused, watched=False)
    seen, same, watch = train_with_compiled_step(scaler, fused=fused, watched=True)
    assert len(set(plain[1:])) == len(set(seen[1:])) == 1, "nothing is compiled again after the first step"
    assert [number - seen[0][0] for number, _ in seen] == [number - plain[0][0] for number, _ in plain]
    assert torch.equal(weights, same) or not weights.isfinite().all()
    assert (watch.steps, watch.failures) == (8, [])
    (health,) = watch.healths.values()
    assert health.norms.points[0][1] > 0
    assert health.streaks.total == 1, "only the bad step was skipped, or spoilt the weights"


@pytest.mark.filterwarnings("ignore")
def test_steps_inside_of_a_compiled_function_are_said_to_be_unseen():
    with Watch(timing=False) as watch:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = torch.compile(lambda: optimizer.step(), backend="eager")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            step()
    assert watch.steps == 0
    assert "No step of an optimizer was seen, perhaps because a compiled function takes them." in str(
        watch.not_measured()
    )
