"""Which graph a pass is replayed from; that replays are right is seen on a GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ampwise import Engine
from ampwise.errors import BadInput
from ampwise.train.cuda_graphs import MAX_GRAPHS, WARM_UP, CudaGraphs


@pytest.fixture
def graphs(monkeypatch):
    """Ones that need no GPU: what is captured is what the pass gives then, for ever."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    made = CudaGraphs(torch.device("cuda"))

    def capture(one_pass, leaves, shape):
        given = f"replay of {one_pass(None)}"
        return SimpleNamespace(replay=lambda tensors: given)

    monkeypatch.setattr(made, "_capture", capture)
    return made


def loss():
    """The function: one, as it should be."""


def ran(graphs, now, graph_version=0, batch="batch"):
    return graphs.run(lambda _: now, loss, graph_version=graph_version, fixed=1, args=(batch,), parameters=())


def test_a_pass_is_captured_when_it_was_seen_often_enough(graphs):
    assert [ran(graphs, number) for number in range(WARM_UP)] == list(range(WARM_UP))
    assert [ran(graphs, "captured"), ran(graphs, "later")] == ["replay of captured"] * 2


def test_what_was_captured_before_a_change_is_never_replayed(graphs):
    for _ in range(WARM_UP + 1):
        ran(graphs, "before")
    assert ran(graphs, "after", graph_version=1) == "after"
    for _ in range(WARM_UP):
        ran(graphs, "after", graph_version=1)
    assert ran(graphs, "later", graph_version=1) == "replay of after"


def test_changes_are_no_kinds_of_batches(graphs):
    """Nor is the memory held of what is not replayed any more."""
    for phase in range(3 * MAX_GRAPHS):
        for _ in range(WARM_UP + 1):
            ran(graphs, phase, phase)
        assert ran(graphs, None, phase) == f"replay of {phase}"
    assert len(graphs._captured) == 1


def test_many_kinds_of_batches_are_refused(graphs):
    for number in range(MAX_GRAPHS):
        ran(graphs, None, batch=number)
    with pytest.raises(BadInput, match="more than 8 kinds of batches or loss functions"):
        ran(graphs, None, batch=MAX_GRAPHS)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_passes_in_no_graph_and_graphs_that_are_forgotten_give_the_same(accumulate):
    def trained(graph):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        engine = Engine(model, optimizer, "fp32", accumulate=accumulate, graph=graph)

        def its_loss(x):
            return (model(x) - x.sum(1, keepdim=True)).square().mean()

        for number in range(24 * accumulate):
            engine._plugin.bypass_graphs = number // accumulate in (0, 7, 8, 20)
            engine._plugin.graph_version = number // (9 * accumulate)
            engine.step(its_loss, torch.randn(16, 32, device="cuda"))
        return engine.history["loss"], [each.detach() for each in model.parameters()]

    (losses, weights), (expected, its_weights) = trained(True), trained(False)
    assert losses == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(weights, its_weights, rtol=1e-3, atol=1e-4)
