"""torch.compile under the watch: as many graphs, and the same numbers."""

import pytest
import torch
from torch import nn

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
def test_a_compiled_model_is_seen_to_run():
    with Watch(timing=False) as watch:
        train("a module")
    (forward,) = watch._tracker.run_events.forwards
    assert (forward.model, forward.training) == ("Model", True)
