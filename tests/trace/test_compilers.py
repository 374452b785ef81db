"""A NaN that only compiled code has is the compiler's, with the backend that shows it; a model's own NaN never is."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampwise
from ampwise.watch.watch import Watch

GENERATED = "the code that the backend generates is at fault"
AOT = "AOTAutograd, which prepares the graph for the backend is at fault"
CAPTURE = "the capture of the graph by dynamo is at fault"


def planted(graph, inputs):
    """A backend whose code returns NaN in the first output of each forward pass."""
    from functorch.compile import make_boxed_func
    from torch._functorch.aot_autograd import aot_module_simplified

    def compiler(graph, _):
        def run(*args):
            first, *rest = graph(*args)
            return [first * math.nan, *rest]

        return make_boxed_func(run)

    return aot_module_simplified(graph, inputs, fw_compiler=compiler)


@torch._dynamo.allow_in_graph
def only_bad_when_traced(x):
    """Finite with backend="eager", which calls it; AOTAutograd traces it with tensors that have no memory."""
    return x if type(x) is torch.Tensor else x * math.nan


class Model(nn.Module):
    def __init__(self, fault=""):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.fault = fault

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        if self.fault == "capture" and torch.compiler.is_compiling():
            x = x * math.nan
        if self.fault == "aot":
            x = only_bad_when_traced(x)
        if self.fault == "model":
            x = (x - 2).log()
        return self.second(x)


def made(fault, backend, in_place=False):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(fault)
    if in_place:
        model.compile(backend=backend)
        return model, model
    return model, torch.compile(model, backend=backend)


CASES = [
    ("", planted, GENERATED, 'backend="aot_eager"'),
    ("aot", "aot_eager", AOT, 'backend="eager"'),
    ("capture", "eager", CAPTURE, "without torch.compile"),
]


@pytest.mark.parametrize(("fault", "backend", "stage", "switch"), CASES, ids=["backend", "aot", "capture"])
def test_the_stage_at_fault_and_the_switch_that_shows_it(fault, backend, stage, switch, capfd):
    model, compiled = made(fault, backend)
    engine = ampwise.Engine(compiled, torch.optim.SGD(model.parameters(), 0.1), "fp32")
    before = [each.clone() for each in (*model.parameters(), *model.buffers())]
    step = engine.step(lambda x: F.mse_loss(compiled(x), x[:, :4]), torch.randn(4, 8))
    (finding,) = engine.findings
    assert (finding.rule.code, step.skipped) == ("AMP922", True)
    assert finding.message.endswith(f"finite in eager code: {stage}")
    assert switch in finding.fix
    assert finding.fix.startswith("Tried in the replay: ")
    assert "gradients finite" in finding.fix
    assert "AMP922" in capfd.readouterr().err
    after = [*model.parameters(), *model.buffers()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)), "the replays leave nothing"


@pytest.mark.parametrize("in_place", [False, True], ids=["a module", "in place"])
def test_in_a_watched_script(in_place):
    with Watch(timing=False) as watch:
        model, compiled = made("", planted, in_place)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            x = torch.randn(4, 8)
            optimizer.zero_grad()
            loss = F.mse_loss(compiled(x), x[:, :4])
            loss.backward()
            optimizer.step()
    found = {each.finding.rule.code: each.finding for each in watch.findings}
    assert found["AMP922"].message.endswith(GENERATED)
    assert found.keys() <= {"AMP922", "AMP612", "AMP613"}
    assert not watch.failures


def test_by_a_trace_of_one_loss():
    _, compiled = made("", planted)
    (finding,) = ampwise.trace(lambda x: compiled(x).square().mean(), torch.randn(4, 8))
    assert finding.rule.code == "AMP922"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_models_own_nan_is_never_the_compilers(backend):
    _, compiled = made("model", backend)
    (finding,) = ampwise.trace(lambda x: compiled(x).square().mean(), torch.randn(4, 8))
    assert finding.rule.name == "outside-domain"


def test_what_comes_once_is_not_the_compilers():
    model, compiled = made("", "aot_eager")
    engine = ampwise.Engine(compiled, torch.optim.SGD(model.parameters(), 0.1), "fp32")
    times = iter([math.nan])
    engine.step(lambda x: F.mse_loss(compiled(x), x[:, :4]) * next(times, 1.0), torch.randn(4, 8))
    assert "AMP922" not in [finding.rule.code for finding in engine.findings]


def test_a_compiled_model_that_is_finite_has_no_finding():
    _, compiled = made("", "aot_eager")
    assert ampwise.trace(lambda x: compiled(x).square().mean(), torch.randn(4, 8)) == []
