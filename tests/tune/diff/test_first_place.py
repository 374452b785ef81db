"""What rounding explains stays silent; what it does not is named, at the place where it begins."""

from pathlib import Path

import pytest
import torch
from torch import nn

from ampwise import Policy
from ampwise.tune.diff.diff import diff

from ...for_each import for_each

HERE = Path(__file__).name


def loss_of(model):
    def loss_fn(x):
        made = model(x).float()
        return (made - torch.linspace(-1, 1, made.shape[-1])).square().mean()

    return loss_fn


# What is explained


def chain(width=16, layers=8):
    steps = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width))]
    return nn.Sequential(*steps, nn.Linear(width, 1))


class Block(nn.Module):
    """A transformer's, with its code between modules."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        query, key, value = self.mix(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two, self.head = (
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 3),
            nn.Linear(4, 1),
        )

    def forward(self, x):
        x = torch.relu_(self.norm(self.one(x)))
        return self.head(nn.functional.max_pool2d(torch.relu(self.two(x)), 2).mean((2, 3)))


HEALTHY = {
    "chain": (chain, (8, 16)),
    "blocks": (lambda: nn.Sequential(Block(), Block(), Block()), (2, 6, 16)),
    "convolutions": (Convolved, (4, 1, 12, 12)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 6, 16)),
}


FORMATS, OTHERS = ["bf16", "fp16", "e4m3"], ["mxfp8", "nvfp4", "tf32,emulated", "fp64"]
CASES = [*((name, b) for name in HEALTHY for b in FORMATS), *(("blocks", b) for b in OTHERS)]


@pytest.mark.few_by_day(4)
@pytest.mark.parametrize(("name", "b"), CASES)
def test_a_healthy_model_is_explained(name, b):
    make, shape = HEALTHY[name]
    torch.manual_seed(1)
    result = diff(loss_of(make()), torch.randn(shape), b=b, floor=False)
    assert result.first is None, result.verdict
    assert {finding.rule.name for finding in result.findings} <= {"rounding-piles-up", "gradient-direction-lost"}


def test_the_error_of_a_deep_chain_is_explained_though_it_grows():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(40)))
    for layer in model:
        nn.init.orthogonal_(layer.weight)
    result = diff(loss_of(model), torch.randn(8, 16), floor=False)
    growth = result.evidence.growth()
    assert result.first is None
    assert growth.modules == 40
    assert 3 < growth.last / growth.first < 10  # as the root of the number of roundings, about
    assert growth.largest_at.isdecimal()


@pytest.mark.half_by_day
@pytest.mark.parametrize("seed", [1, 2])
def test_gradients_that_jump_at_a_kink_are_explained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(*(each for _ in range(20) for each in (nn.Linear(16, 16), nn.ReLU())), nn.Linear(16, 1))
    for layer in model[::2]:
        nn.init.kaiming_normal_(layer.weight)
    result = diff(lambda x: (model(x) - 1).square().mean(), torch.randn(32, 16), b="tf32,emulated", floor=False)
    assert result.first is None
    assert result.evidence.growth("backward").largest > 5 * result.evidence.growth().largest


def test_kernels_of_attention_differ_by_rounding_alone():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    result = diff(loss_of(model), torch.randn(2, 6, 16), a="fp32,attention=math", b="fp32,attention=flash")
    assert result.first is None
    assert result.rows[0].error < 1e-6


# What is not


class Opposed(nn.Module):
    """Two heads that are nearly the same."""

    def __init__(self, apart=1e-3):
        super().__init__()
        self.body, self.one, self.two, self.out = (nn.Linear(16, 16) for _ in range(4))
        with torch.no_grad():
            self.two.weight.copy_(self.one.weight + apart * torch.randn(16, 16))
            self.two.bias.copy_(self.one.bias)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.out(self.one(x) - self.two(x))  # here


class Inside(nn.Module):
    """The same, one level down."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(16, 16), Opposed()

    def forward(self, x):
        return self.inner(torch.tanh(self.first(x)))


class IllConditioned(nn.Module):
    """A product whose terms cancel: what is large in the input is not seen by the weights."""

    def __init__(self):
        super().__init__()
        self.first, self.bad, self.last = nn.Linear(16, 16), nn.Linear(16, 4, bias=False), nn.Linear(4, 1)
        with torch.no_grad():
            self.bad.weight -= self.bad.weight.mean(1, keepdim=True)

    def forward(self, x):
        return self.last(self.bad(self.first(x) + 30))


class Sharp(nn.Module):
    """A softmax of logits that have a large part in common, in which the rest is rounded away."""

    def __init__(self):
        super().__init__()
        self.logits, self.soft, self.last = nn.Linear(16, 16), nn.Softmax(-1), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.soft(self.logits(x) * 4 + 200))


class Exponential(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        grown = torch.exp(self.first(x).float() + 12)
        return self.last(grown.half() if torch.is_autocast_enabled("cpu") else grown)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.first(x) * 1e-8) * 1e4


PLANTED = {
    "cancellation": (Opposed, "bf16", "the code of `Opposed` before `out`", "cancellation-amplifies-rounding"),
    "nested": (Inside, "bf16", "the code of `inner` before `inner.out`", "cancellation-amplifies-rounding"),
    "ill-conditioned": (IllConditioned, "bf16", "`bad`", "cancellation-amplifies-rounding"),
    "softmax": (Sharp, "bf16", "`soft`", "steep-function-amplifies-rounding"),
    "overflow": (Exponential, "fp16", "the code of `Exponential` before `last`", "overflow-on-one-side"),
    "underflow": (Tiny, "fp16", "the code of `Tiny` before `last`", "lost-in-narrow-format"),
}


@for_each("name", PLANTED)
def test_a_planted_fault_is_the_first_place(name):
    make, b, where, rule = PLANTED[name]
    torch.manual_seed(2)
    result = diff(loss_of(make()), torch.randn(12, 16), b=b, floor=False)
    assert result.first.where == where
    assert result.findings[0].rule.name == rule
    assert not result.explained
    assert result.verdict.startswith(f"{b} against fp32: rounding does not explain {where}")


def test_the_operation_and_its_line_are_named():
    torch.manual_seed(0)
    result = diff(loss_of(Opposed()), torch.randn(12, 16), floor=False)
    op = result.first.op
    line = next(n for n, text in enumerate(Path(__file__).read_text().split("\n"), 1) if "# here" in text)
    assert op.op == "aten.sub.Tensor"
    assert (Path(op.site.file).name, op.site.line) == (HERE, line)
    assert op.shrinks > 50
    assert result.findings[0].place.line == line


def test_a_difference_that_is_large_enough_is_explained():
    torch.manual_seed(0)
    assert diff(loss_of(Opposed(apart=0.3)), torch.randn(12, 16), floor=False).first is None


def test_what_fixes_it_is_seen_to():
    torch.manual_seed(0)
    model, batch = Inside(), torch.randn(12, 16)
    broken = diff(loss_of(model), batch, floor=False)
    assert '.keep("fp32", "inner")' in broken.findings[0].fix
    mended = diff(loss_of(model), batch, b=Policy("bf16").keep("fp32", "inner"), floor=False)
    assert mended.first is None or mended.first.compared.error < broken.first.compared.error / 2
    worst = [max(row.compared.error for row in result.parameters) for result in (broken, mended)]
    assert worst[1] < worst[0]


def test_gradients_that_vanish_without_a_scale_are_the_first_place():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def loss_fn(x):
        return model(x).float().square().mean() * 1e-6

    batch = torch.randn(12, 16)
    lost = diff(loss_fn, batch, b="fp16,scale=1", floor=False)
    assert (lost.first.phase, lost.first.cause) == ("backward", "underflow")
    assert lost.first.where == "the gradient of what `2` returns, from the derivative of the code after it"
    assert lost.findings[0].rule.name == "lost-in-narrow-format"
    assert "and the loss is not scaled" in lost.findings[0].message
    scaled = diff(loss_fn, batch, b="fp16", floor=False)
    assert scaled.first is None
    assert scaled.evidence.b.scale == 2**16


def test_a_softmax_that_has_nearly_decided_has_gradients_that_rounding_decides():
    class Saturated(Sharp):
        def forward(self, x):
            return self.last(self.soft(self.logits(x)))

    torch.manual_seed(0)
    model = Saturated()
    with torch.no_grad():
        model.logits.weight.mul_(400)
    first = diff(loss_of(model), torch.randn(64, 16), floor=False).first
    assert first.where in ("`soft`", "the gradient of what `logits` returns, from the derivative of `soft`")
    assert first.cause == "steep"


def test_a_scale_that_overflows_is_halved_until_it_does_not():
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    result = diff(lambda x: model(x).float().square().sum() * 30, torch.randn(12, 16), b="fp16", floor=False)
    assert 1 < result.evidence.b.scale < 2**16
    assert result.first is None
    assert max(row.compared.error for row in result.parameters) < 0.01


class Routed(nn.Module):
    """Two experts, between which a router decides by almost nothing."""

    def __init__(self):
        super().__init__()
        self.router, self.experts, self.out = nn.Linear(16, 2), nn.ModuleList(nn.Linear(16, 16) for _ in "ab"), None
        with torch.no_grad():
            self.router.weight[1] = self.router.weight[0] + 1e-3 * torch.randn(16)
            self.router.bias.zero_()

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        made = torch.zeros(x.shape)
        for number, expert in enumerate(self.experts):
            made[chosen == number] = expert(x[chosen == number]).float()
        return made


def test_a_choice_that_flips_is_the_first_place():
    torch.manual_seed(0)
    result = diff(loss_of(Routed()), torch.randn(64, 16), floor=False)
    assert result.first.where == "the code of `Routed` before `experts.0`"
    assert result.first.cause == "choice"
    assert result.findings[0].rule.name == "discrete-choice-flips"
    assert "×16 in a, " in result.findings[0].message


def test_a_sum_that_is_left_to_chance_is_no_fault_of_the_precision():
    torch.manual_seed(0)
    model, runs = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1)), iter(range(1000))

    def loss_fn(x):
        return model(x + 0.01 * next(runs)).square().mean()

    result = diff(loss_fn, torch.randn(8, 16))
    assert [finding.rule.name for finding in result.findings] == ["not-repeatable"]
    assert "it takes the next items of `runs`, which differ each time" in result.findings[0].message
    assert result.evidence.floor > 0.001
    assert "they differ no more than two runs of a do" in result.verdict
    assert result.rows[1].outputs[0].floor > 0
    assert diff(loss_fn, torch.randn(8, 16), floor=False).evidence.floor is None
