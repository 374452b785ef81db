"""The repr of every public object fits on a screen, whatever it holds, and controls no terminal."""

import inspect

import pytest
import torch
from torch import nn

import ampwise
from ampwise.numbers.census.algebra import Census
from ampwise.runs.reader import Run
from ampwise.train.float8.layer_stats import Float8LayerStats
from ampwise.tune.advise.advice import Advice
from ampwise.tune.align.padding_plan import Padding, UnpaddedLayer
from ampwise.tune.align.result import Alignment
from ampwise.tune.bench.result import BenchResult
from ampwise.tune.diff.result import Difference
from ampwise.tune.memory.result import MemoryEstimate

LAYERS, LONG = 1000, "x\x1b[2J\u202e" * 1000
WIDTH, LINES = 100, 25
LEFT = UnpaddedLayer(name=LONG, size=(5, 5), why="tied")


@pytest.fixture(scope="module")
def engine():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(LAYERS)))
    policy = ampwise.Policy("bf16").keep("fp32", *(str(number) for number in range(LAYERS)))
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in model.parameters()]
    engine = ampwise.Engine(model, optimizers, policy, trace=False)
    engine.step(lambda x: model(x).sum(), torch.ones(2, 2))
    return engine


def finding():
    place = ampwise.finding.Place(file=LONG, line=3)
    return ampwise.finding.registry.find_rule("AMP101").at(place, LONG, evidence={"all": list(range(LAYERS))})


def estimate():
    return MemoryEstimate(
        name=LONG, parameters=7, trained=7, shape=None, optimizer="adamw", checkpointing=False, fsdp=None, ddp=False,
        gpu=None, estimates=(), largest_batch=None,
    )  # fmt: skip


# What there is, how it is made from an engine with many layers, and what its repr says.
MADE = {
    "Engine": (lambda engine: engine, "<Engine in bf16, 1000 exceptions on cpu, 2000 × SGD>"),
    "Policy": (lambda engine: engine.policy, "Policy('bf16').keep('fp32', '0', '1', '2'"),
    "GradScaler": (lambda engine: engine.scaler, "<GradScaler on cpu, scaling off, guarded>"),
    "Guard": (lambda engine: ampwise.Guard(engine, "guarded"), "<Guard of <Engine in bf16"),
    "Ladder": (lambda _: ampwise.Ladder(), "Ladder(skips=3"),
    "Step": (lambda engine: engine.history[0], "<Step 1, bf16, loss"),
    "StepHistory": (lambda engine: engine.history, "<History of 1 steps>"),
    "DeviceCensus": (lambda engine: engine.census(), "<DeviceCensus of 2000 tensors"),
    "Census": (
        lambda _: Census(binades=dict.fromkeys(range(-149, 128), 9), zeros=4, nans=1, amin=1e-45, amax=3e38),
        "<Census of 2,498 values, 4 zero, 1 NaN, magnitudes from 1e-45 to 3e+38>",
    ),
    "Count": (lambda _: Census(binades={-30: 5}, amin=1e-9, amax=1e-9).flushed("fp16"), "Count(5)"),
    "Fp8": (lambda _: ampwise.Fp8("delayed", wide=(LONG,)), r"Fp8(recipe='delayed', wide=('x\x1b[2J"),
    "Capsules": (lambda _: ampwise.Capsules(LONG), r"<Capsules in x\x1b[2J\u202ex"),
    "Sinks": (lambda _: ampwise.Sinks(print), "<Sinks print>"),
    "Format": (lambda _: ampwise.find_format("e4m3"), "<Format e4m3fn: 4 exponent and 3 mantissa bits, max 448, sm"),
    "BlockFormat": (lambda _: ampwise.find_format("nvfp4"), "<BlockFormat nvfp4: blocks of 16 × e2m1 with one"),
    "Gpu": (lambda _: ampwise.find_gpu("NVIDIA H200"), "<Gpu h200"),
    "Machine": (lambda _: ampwise.hardware.describe_machine(), "<Machine: "),
    "Rule": (lambda _: ampwise.finding.registry.find_rule("AMP101"), "<Rule AMP101 clip-scaled-grads, error>"),
    "Finding": (lambda _: finding(), r"<Finding AMP101 clip-scaled-grads at x\x1b[2J\u202ex"),
    "Place": (lambda _: finding().place, r"Place(file='x\x1b[2J\u202ex"),
    "trace": (lambda _: ampwise.trace(lambda x: (x / 0).sum(), torch.ones(3)), "[<Finding AMP907 division-by-zero at"),
    "Advice": (lambda engine: ampwise.advise(engine.models[0], gpu="h100"), "<Advice: tf32 on H100"),
    "MemoryEstimate": (lambda _: estimate(), r"<MemoryEstimate of x\x1b[2J"),
    "Padding": (lambda _: Padding(padded=(), left=(LEFT,) * LAYERS), "<Padding: 0 weights padded"),
    "Float8LayerStats": (lambda _: Float8LayerStats(step=3, operands=(None,) * LAYERS), "<Float8LayerStats of 1000"),
    "Run": (lambda _: Run(folder=LONG, manifest={}), r"<Run x\x1b[2J"),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_a_repr_fits_on_a_screen(engine, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, said = MADE[name]
    shown = repr(make(engine))
    assert shown.startswith(said)
    assert shown.isprintable()
    assert sum(-(-len(line) // WIDTH) for line in shown.splitlines()) <= LINES


@pytest.mark.parametrize("kind", [BenchResult, Alignment, Difference])
def test_a_long_verdict_fits_on_a_screen(monkeypatch, kind):
    monkeypatch.setattr(kind, "verdict", LONG)
    shown = repr(object.__new__(kind))
    assert shown.startswith(f"<{kind.__name__}: x\\x1b[2J")
    assert len(shown) <= 2 * WIDTH


def test_every_result_has_a_repr_of_its_own():
    """None is that of a dataclass, which shows everything there is."""
    kinds = [value for name in ampwise.__all__ if inspect.isclass(value := getattr(ampwise, name))]
    kinds += [Advice, Alignment, MemoryEstimate, Padding]
    with_all = {kind.__name__ for kind in kinds if "dataclasses" in _file(kind.__repr__)}
    assert with_all <= {"Edit", "Ladder"}


def _file(method):
    return method.__code__.co_filename if hasattr(method, "__code__") else ""
