"""Updates that vanish are found where they do, and not where they are seen to."""

import torch
from torch import nn

import ampwise
from ampwise.check.source.project import Project
from ampwise.check.source_rules import matching_rules
from ampwise.finding.registry import source_rules
from ampwise.watch.watch import Watch

from ...for_each import for_each

SCRIPT = """
import torch
from ampwise import Engine

def train(build, loader, loss_fn):
    model = torch.nn.parallel.DistributedDataParallel(build().to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    {make}
    for x, y in loader:
        {backward}(loss_fn(model(x), y){end})
        {step}
        optimizer.zero_grad()
"""
BY_HAND = {"make": "", "backward": "torch.autograd.backward", "end": "", "step": "optimizer.step()"}
LOST = SCRIPT.format(**{**BY_HAND, "backward": "", "end": ".backward()"})
KEPT = SCRIPT.format(
    make='engine = Engine(model, optimizer, "bf16-pure")', backward="engine.backward", end="", step="engine.apply()"
)


def codes_in(text):
    code = Project(["train.py"], {"train.py": text}).code("train.py")
    possible = matching_rules(text.encode(), source_rules())
    return {finding.rule.code for rule in possible for finding in rule.check_source(code)}


def test_the_linter_warns_of_plain_bf16_weights_and_not_of_bf16_pure():
    assert "AMP306" in codes_in(LOST)
    assert "AMP306" not in codes_in(KEPT)


@for_each("precision", ["bf16", "bf16-pure", "bf16-pure,kahan"])
def test_the_watch_warns_of_updates_that_vanish_and_not_of_bf16_pure(precision):
    with Watch(every=1, timing=False) as watch:
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False).bfloat16()
        nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        engine = ampwise.Engine(model, optimizer, precision)
        for _ in range(30):
            engine.step(lambda x: model(x).float().square().mean(), torch.randn(8, 64))
    assert not watch.failures
    found = {seen.finding.rule.code for seen in watch.findings} & {"AMP306", "AMP611"}
    assert found == ({"AMP306", "AMP611"} if precision == "bf16" else set())
    moved = any((rest != 0).any() for rest in engine.state_dict()["fitting"].get("rests", ()))
    assert (moved or bool((model.weight != 1).any())) == (precision != "bf16")
