"""The same on a GPU: passes in another thread, native 16 bits, graphs."""

import pytest
import torch

from ampwise.train.engine import Engine
from ampwise.tune.search.search import search

from .models import Net, deep

pytestmark = pytest.mark.gpu


def net_on_gpu():
    torch.manual_seed(0)
    model = Net().cuda()
    batches = [tuple(torch.randint(32, (4, 8), device="cuda") for _ in range(2)) for _ in range(3)]
    return model, batches


def test_planted_layers_are_found():
    model, function, batches = deep(24, cancelling=[5, 17], batches=2)
    model.cuda()
    found = search(function, [(x.cuda(),) for (x,) in batches], tolerance=0.05, model=model)
    assert {name for name, fmt in found.modules.items() if fmt != "e4m3"} == {"layers.5", "layers.17"}
    assert all("its sums cancel" in each.reasons[0] for each in found.ranking[:2])
    assert found.noise < 1e-4


@pytest.mark.parametrize("formats", [("e4m3", "bf16", "fp32"), ("mxfp8", "fp16", "fp32"), ("fp16", "fp32")])
def test_what_is_found_runs_and_passes(formats):
    model, batches = net_on_gpu()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    found = search(model, batches, tolerance=0.01, formats=formats)
    assert found.narrower
    assert found.error <= 0.01
    assert found.gain.gpu is None or found.gain.why_no_time or found.gain.faster_than_fp32 > 1
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(each.estimates for each in found.ranking if each.name)


@pytest.mark.parametrize("graph", [False, True])
def test_an_engine_trains_inside_also_by_graphs(graph):
    model, batches = net_on_gpu()
    found = search(model, batches, tolerance=0.05)
    assert "e4m3" in found.modules.values()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with found.apply(model):
        engine = Engine(model, optimizer, precision=found.policy, graph=graph, trace=False)
        losses = [engine.step(model, *batches[0]).loss for _ in range(20)]
    assert losses[-1] < losses[0] / 2
