"""The comparison on a CUDA device: events, kernels, memory, a real out-of-memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.tune.bench.bench import bench

from .bench_toys import fielded, mlp

# The warnings are of the compiler's own.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Block(nn.Module):
    def __init__(self, width=256, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        query, key, value = self.mix(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


def attending(batch=8):
    model = nn.Sequential(*(Block() for _ in range(3)))
    return model, (torch.randn(batch, 128, 256),), lambda x: model(x).float().square().mean()


@pytest.fixture(scope="module")
def result():
    return bench(attending, compiled=True, rounds=3, steps=2)


def test_every_row_is_measured_and_computes_the_same(result):
    rows = [row for row in result.rows if row.problem is None]
    problems = [(row.label, row.problem) for row in result.rows]
    assert {row.label for row in rows} >= {"fp32", "fp16", "fp32 compiled", "fp16 compiled"}, problems
    for row in rows:
        assert row.loss.same, row.label
        assert row.step_s.median > 0
        assert row.ratio is not None
        assert row.memory.rest > 0
        assert row.split.on_device
        assert 0 <= row.idle_share < 1
    assert result.speeds.noise is not None


def test_kernels_are_distinguished(result):
    fp32 = result.rows[0]
    assert {"matrix", "attention", "elementwise", "optimizer"} <= set(fp32.split.seconds)
    assert fp32.split.seconds.get("other", 0.0) < 0.1 * sum(fp32.split.seconds.values())
    fp16 = next(row for row in result.rows if row.label == "fp16")
    assert fp16.split.seconds["casts"] > 0
    layers = {layer.name: layer for layer in result.speeds.layers}
    assert {"#.mix", "#.out", "#.norm"} <= set(layers)
    assert layers["#.mix"].times == 3


def test_flops_are_those_of_the_products_and_of_attention(result):
    rows, length, width = 8, 128, 256
    forward = 3 * (2 * rows * length * width * 4 * width + 4 * rows * length * length * width)
    assert forward * 2.5 < result.speeds.flops < forward * 3.5


def test_there_is_no_room(result):
    room = torch.cuda.get_device_properties(0).total_memory

    def make():
        model, batch, loss_fn = attending()

        def loss(x):
            if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.float16:
                torch.empty(2 * room, dtype=torch.uint8, device="cuda")
            return loss_fn(x)

        return model, batch, loss

    found = bench(make, ["fp16", "bf16"], rounds=2, steps=1)
    assert [row.problem for row in found.rows] == [None, "out of memory", None]
    assert torch.cuda.memory_allocated() < 2**30


def test_fp32_runs_without_tf32_whatever_the_script_has_set():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        seen = {}

        def make():
            model, batch, loss_fn = attending()

            def loss(x):
                seen.setdefault(torch.get_float32_matmul_precision(), 0)
                return loss_fn(x)

            return model, batch, loss

        found = bench(make, ["tf32"], rounds=2, steps=1)
        assert set(seen) == {"highest", "high"}
        assert found.speeds.tf32_was_on == ("matmuls",)
        assert "tf32-already-on" in [finding.rule.name for finding in found.findings]
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_contender_leaves_no_gradients_on_the_device():
    subject, (contender,) = fielded(mlp, "fp32")
    with contender.turn():
        contender()
    assert all(parameter.grad is None for parameter in subject.parameters)
