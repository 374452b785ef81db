"""On a GPU: two devices, what is kept and where, and how much memory that takes."""

import gc

import pytest
import torch
from torch import nn

from ampwise.tune.diff.diff import DiffOptions, compare_sides, diff
from ampwise.tune.diff.side import parse_side
from ampwise.tune.diff.tensor_store import MemoryBudget

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model_of(width=256, layers=6):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(layers)), nn.Linear(width, 1))


def peak_of(work):
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), before


@pytest.mark.parametrize("b", ["bf16", "fp16", "tf32", "e4m3", "fp64"])
def test_a_healthy_model_is_explained(b):
    model, batch = model_of().cuda(), torch.randn(64, 256, device="cuda")
    result = diff(lambda x: model(x).float().square().mean(), batch, b=b)
    assert result.first is None, result.verdict
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.cuda.memory_allocated() < 2**30


@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_two_devices_differ_by_rounding(home):
    model, batch = model_of(64, 2).to(home), torch.randn(16, 64, device=home)
    dropped = nn.Sequential(model, nn.Dropout(0.3))
    result = diff(lambda x: dropped(x).square().mean(), batch, a="fp32@cpu", b="fp32@cuda")
    assert result.first is None, result.verdict
    assert 0 < max(row.error for row in result.rows) < 1e-4
    assert {parameter.device.type for parameter in model.parameters()} == {home}
    assert [side.device.split(":")[0] for side in (result.evidence.a, result.evidence.b)] == ["cpu", "cuda"]


def test_the_memory_of_a_difference_is_little_more_than_a_steps():
    model, batch = model_of(512, 12).cuda(), torch.randn(16384, 512, device="cuda")

    def loss_fn(x):
        return model(x).float().square().mean()

    def step():
        loss_fn(batch).backward()
        model.zero_grad()

    step()
    plain, _ = peak_of(step)
    taken, _ = peak_of(lambda: diff(loss_fn, batch))
    assert taken <= 1.3 * plain


def test_what_does_not_fit_beside_the_other_side_is_left_to_a_second_round():
    model, batch = model_of(512, 12).cuda(), torch.randn(16384, 512, device="cuda")
    said = []
    options = DiffOptions(progress=said.append)
    result = compare_sides(
        lambda x: model(x).square().mean(),
        (batch,),
        {},
        {"": model},
        parse_side("fp32"),
        parse_side("tf32"),
        options,
        name="x",
    )
    assert said.count("b (tf32), forward and backward") == 2
    assert all(row.gradients for row in result.rows)


def test_the_peak_of_the_first_side_is_seen():
    device = torch.device("cuda", torch.cuda.current_device())
    budget = MemoryBudget(device)
    large = torch.empty(2**28, dtype=torch.uint8, device=device)
    budget.made(large, 0)
    before = budget.beside(1.0, 0)
    del large
    budget.made(torch.empty(2**27, dtype=torch.uint8, device=device), 0)
    assert budget.beside(1.0, 0) == before >= 0.25 * 2**28


def test_what_has_no_room_is_kept_on_the_host(monkeypatch):
    model, batch = model_of(64, 3).cuda(), torch.randn(512, 64, device="cuda")
    roomy = diff(lambda x: model(x).square().mean(), batch, b="bf16")
    monkeypatch.setattr(MemoryBudget, "forward", lambda self, saved: 0)
    monkeypatch.setattr(MemoryBudget, "beside", lambda self, share, gradients: 0)
    tight = diff(lambda x: model(x).square().mean(), batch, b="bf16")
    assert "were moved to host memory during the comparison" in tight.evidence.notes[-1]
    assert [row.error for row in tight.rows] == [row.error for row in roomy.rows]
    assert [row.gradient_error for row in tight.rows] == pytest.approx([row.gradient_error for row in roomy.rows])


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_kernels_of_attention_differ_by_rounding(kernel):
    mix = nn.Linear(128, 384, device="cuda")

    def loss_fn(x):
        query, key, value = mix(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).float().square().mean()

    batch = torch.randn(4, 64, 128, device="cuda")
    result = diff(loss_fn, batch, a="bf16,attention=math", b=f"bf16,attention={kernel}")
    assert result.first is None, result.verdict
    assert result.evidence.loss_error < 0.01
