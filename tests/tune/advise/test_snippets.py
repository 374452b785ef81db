"""The code to paste is Python, `ampwise check` finds nothing in it, and it trains."""

from __future__ import annotations

import itertools
import sys
import types
from functools import cache

import pytest
import torch
from torch import nn

from ampwise.cli import main
from ampwise.hardware import Cpu, gpus
from ampwise.hardware.target import target_for_cpu, unknown_target
from ampwise.tune.advise import advise
from ampwise.tune.advise.choice import PrecisionChoice
from ampwise.tune.advise.decide import decide
from ampwise.tune.advise.model import ModelFacts, ModelPart

from ...night import NIGHTLY

XEON = target_for_cpu(Cpu(model="a Xeon", features=("amx_bf16",)))
ROUTED = ModelFacts(
    parameters=10**8,
    kind="moe",
    name="train:make",
    parts=(ModelPart(kind="router", modules=("body.router",), patterns=("body.router",)),),
)


@cache
def all_code():
    """Each piece of code that there is, once."""
    advised = [
        advise(gpu=gpu, want=want, params=params, ideas=ideas)
        for gpu, want, params, ideas in itertools.product(
            gpus(), (None, "fp32", "tf32", "fp16", "bf16", "fp8"), ("1M", "7B"), ((), ("exact-numbers",))
        )
    ]
    advised += [
        decide(PrecisionChoice(target=target, model=model))
        for target in (XEON, unknown_target("x"))
        for model in (ROUTED, ModelFacts())
    ]
    return list(dict.fromkeys(code for advice in advised for code in (advice.by_hand, advice.with_engine)))


def test_there_is_code_for_everything():
    assert len(all_code()) > 25
    for words in ("torch.float16", "torch.bfloat16", "float8", 'device = "xla"', '"highest"', "Policy(", '"auto"'):
        assert any(words in code for code in all_code()), words


def test_it_has_no_mistakes_that_we_know_of(tmp_path, capsys):
    for number, code in enumerate(all_code()):
        compile(code, f"{number}.py", "exec")
        (tmp_path / f"{number}.py").write_text(code)
    assert main(["check", str(tmp_path)]) == 0, capsys.readouterr().out


def what_a_user_has():
    """A model with a router, an optimizer, a criterion and a loader."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.body, model.head = nn.Sequential(), nn.Linear(16, 3)
    model.body.first, model.body.router = nn.Linear(4, 16), nn.Linear(16, 16)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "criterion": nn.CrossEntropyLoss(),
        "loader": [(x := torch.randn(32, 4), x.argmax(-1).clamp(max=2)) for _ in range(15)],
    }


@pytest.fixture
def names(monkeypatch):
    """What the user has; and a torchao, of sorts."""
    torchao, float8 = types.ModuleType("torchao"), types.ModuleType("torchao.float8")
    float8.convert_to_float8_training = lambda model, module_filter_fn: [
        module_filter_fn(module, name) for name, module in model.named_modules()
    ]
    for module in (torchao, float8):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield what_a_user_has()
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def test_it_trains(names, capsys):
    for code in all_code() if NIGHTLY else all_code()[::2]:
        on_cpu = ['device = "cpu"' if line.startswith("device = ") else line for line in code.splitlines()]
        on_cpu = [line.replace('"tf32"', '"fp32"') for line in on_cpu]  # which a CPU does not have
        names |= what_a_user_has()
        x, y = names["loader"][0]
        before = nn.functional.cross_entropy(names["model"](x), y).item()
        exec(compile("\n".join(on_cpu), "pasted", "exec"), names)
        after = nn.functional.cross_entropy(names["model"](x), y).item()
        assert after < before - 0.1, code


def test_a_nan_does_not_reach_the_weights(names):
    """BF16 has no scaler to skip a bad step, so the loop has to."""
    names["loader"] = [(torch.full((8, 4), float("nan")), torch.zeros(8, dtype=torch.long))]
    before = [parameter.clone() for parameter in names["model"].parameters()]
    exec(decide(PrecisionChoice(target=XEON)).by_hand, names)
    assert all(map(torch.equal, before, names["model"].parameters()))


def test_what_is_found_in_the_model_is_kept(names):
    advice = decide(PrecisionChoice(target=XEON, model=ROUTED))
    seen = []
    names["model"].body.router.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    for code in (advice.by_hand, advice.with_engine):
        exec(code, names)
    assert set(seen) == {torch.float32}
    assert 'Policy("bf16").keep("fp32", "body.router")' in advice.by_hand
