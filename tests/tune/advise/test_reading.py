"""Models as they are read: their size, a guess at their kind, and the parts that 16 bits may hurt."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampwise
from ampwise.errors import BadInput
from ampwise.hardware import Cpu
from ampwise.hardware.target import target_for_cpu
from ampwise.tune.advise import advise
from ampwise.tune.advise.choice import PrecisionChoice
from ampwise.tune.advise.decide import decide
from ampwise.tune.advise.read_model import read_module

from ...for_each import for_each


class RMSNorm(nn.Module):
    """As people write it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * (x * x).mean(-1, keepdim=True).rsqrt() * self.weight


class Experts(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        return sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class Gated(nn.Module):
    """A gated layer: its gate is no router."""

    def __init__(self, width):
        super().__init__()
        self.gate, self.up = nn.Linear(width, width), nn.Linear(width, width)


def block(inner):
    made = nn.Sequential()
    made.norm, made.attention, made.mlp = RMSNorm(8), nn.MultiheadAttention(8, 2), inner
    return made


def moe(blocks=2):
    model = nn.Sequential()
    model.blocks = nn.ModuleList(block(Experts(8)) for _ in range(blocks))
    model.lm_head = nn.Linear(8, 32)
    return model


def clip():
    model = nn.Sequential()
    model.image, model.text = nn.Linear(8, 4), nn.Linear(8, 4)
    model.logit_scale = nn.Parameter(torch.tensor(2.6))
    return model


def gan():
    model = nn.Module()
    model.generator, model.discriminator = nn.Linear(2, 4), nn.Linear(4, 1)
    return model


def unet():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8))
    model.time_embed = nn.Linear(4, 8)
    return model


@for_each(
    ("model", "kind"),
    [
        (moe(), "moe"),
        (nn.TransformerEncoderLayer(8, 2), "transformer"),
        (block(Gated(8)), "transformer"),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)), "cnn"),
        (nn.LSTM(4, 8), "rnn"),
        (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "mlp"),
        (clip(), "contrastive"),
        (gan(), "gan"),
        (unet(), "diffusion"),
        (nn.Embedding(8, 2), None),
    ],
)
def test_kinds_are_guessed(model, kind):
    facts = read_module(model, "model")
    assert (facts.kind, facts.guessed) == (kind, True)
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_parts_have_names_classes_and_patterns():
    facts = read_module(moe(), "model")
    router, norm, logits = facts.part("router"), facts.part("norm by hand"), facts.part("logits")
    assert router.modules == ("blocks.0.mlp.gate", "blocks.1.mlp.gate")
    assert (router.classes, router.patterns) == (("Linear",), ("*.gate",))
    assert (norm.classes, norm.patterns) == (("RMSNorm",), ("*.norm",))
    assert (logits.modules, logits.patterns) == (("lm_head",), ("lm_head",))
    assert facts.part("softmax") is None  # that of attention is fused, and runs in 16 bits


def test_a_gate_without_experts_is_no_router():
    assert read_module(block(Gated(8)), "model").part("router") is None


def test_patterns_match_what_is_meant_and_nothing_else():
    model = nn.Sequential()
    model.first, model.second = block(Experts(8)), nn.Sequential()
    model.second.norm = nn.LayerNorm(8)  # torch's own, which needs no keeping
    part = read_module(model, "model").part("norm by hand")
    assert part.patterns == ("first.norm",)
    for facts in (read_module(model, "model"), read_module(moe(3), "model")):
        for found in facts.parts:
            if found.patterns and found.kind in ("router", "norm by hand"):
                policy = ampwise.Policy("bf16").keep("fp32", *found.patterns)
                whole = model if facts.part("logits") is None else moe(3)
                assert set(policy.modules(whole)) == set(found.modules)


def test_norms_losses_and_temperatures():
    model = nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4), nn.BCELoss(), nn.Linear(4, 1))
    facts = read_module(model, "model")
    assert [facts.part(kind).modules for kind in ("norm", "batch norm", "bce")] == [("0",), ("1",), ("2",)]
    assert read_module(clip(), "model").part("temperature").modules == ("logit_scale",)
    text = str(advise(model, gpu="v100-sxm2-16", want="fp16"))
    assert "BCELoss: 2" in text
    assert "the temperature: logit_scale" in str(advise(clip(), gpu="v100-sxm2-16", want="fp16"))


def test_frozen_parameters_are_not_trained():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    assert read_module(model, "model").parameters == 10


def test_a_lazy_module_has_no_size():
    with pytest.raises(BadInput, match=r"0\.weight has no size yet"):
        advise(nn.Sequential(nn.LazyLinear(4)), gpu="h200")


def test_what_a_function_makes_takes_no_memory():
    def make():
        model = nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(26)))
        assert next(model.parameters()).is_meta
        return model, (torch.randn(4, 16384),), lambda x: model(x).mean()

    advice = advise(make, gpu="h100-sxm")
    assert advice.choice.model.parameters == 26 * 16384**2  # 7 B
    assert advice.choice.model.title == "an MLP of 6.98 B parameters"
    assert "(a guess, from its modules)" in str(advice)


def test_a_function_by_name_is_what_commands_are_given(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch import nn\ndef make():\n    model = nn.Linear(2, 1)\n"
        "    return model, (torch.ones(3, 2),), lambda x: model(x).mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    advice = advise("train.py:make", gpu="h200", symptom="slow")
    assert advice.choice.model.name == "train.py:make"
    assert advice.triage[0].command == "ampwise bench train.py:make"  # too small for 16 bits: all are compared
    assert advise("train.py:make", gpu="h200", arch="cnn").choice.model.kind == "cnn"


def test_a_model_and_its_size_are_one_too_many():
    with pytest.raises(BadInput, match="give either a model or params"):
        advise(nn.Linear(2, 2), params="7B", gpu="h200")


@pytest.mark.parametrize("wrong", [3, {"model": 1}])
def test_what_is_no_model(wrong):
    with pytest.raises(BadInput, match="expected a function that returns the model"):
        advise(wrong, gpu="h200")


def test_what_stays_in_fp32_is_named():
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))
    model.lm_head, model.softmax, model.criterion = nn.Linear(4, 2), nn.Softmax(-1), nn.CrossEntropyLoss()
    advice = advise(model, gpu="h200", want="bf16")
    assert advice.kept[0].by_itself
    assert advice.kept[0].modules == ("0", "1", "softmax", "criterion")
    assert "here 2 × LayerNorm, 1 × Softmax, 1 × CrossEntropyLoss" in advice.kept[0].why
    assert "not the head: lm_head" in [kept.what for kept in advice.kept]
    (norms,) = [kept for kept in _on_a_cpu(model).kept if kept.what == "norms: 0, 1"]
    assert 'if necessary: Policy(…).keep("fp32", "0")' in norms.how


def _on_a_cpu(model):
    cpu = target_for_cpu(Cpu(model="a Xeon", features=("amx_bf16",)))
    return decide(PrecisionChoice(target=cpu, model=read_module(model, "model"), want="bf16"))
