"""Autocast: which operations run in which type."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .claim import claim

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def on_cpu(compute, dtype=BF16):
    """In which type a CPU's autocast gives what it computes of 16 bits."""
    with torch.autocast("cpu", dtype):
        return compute(torch.ones(2, 4, 8, dtype=dtype)).dtype


@claim(
    "Autocast runs LayerNorm in FP32.",
    verdict="depends",
    truth="On CUDA it does, and GroupNorm; RMSNorm in torch 2.13 and not yet in 2.6. A CPU's autocast leaves them in "
    "16 bits. BatchNorm is on neither list: its output has the dtype of its input.",
    also=[
        "tests/tune/memory/test_autocast_ops.py::test_each_list_is_the_headers",
        "tests/rules/amp7xx_choice/test_facts.py::test_what_cuda_autocast_keeps_in_fp32",
        "tests/rules/amp7xx_choice/test_facts.py::test_what_a_cpu_keeps",
    ],
)
def test_norms(cuda):
    assert (cuda["layer_norm"], cuda["group_norm"], cuda["batch_norm"]) == ("float32", "float32", "float16")
    if VERSION >= (2, 13) or VERSION <= (2, 6):
        assert cuda["rms_norm"] == ("float32" if VERSION >= (2, 13) else "float16")
    for norm in (lambda x: F.layer_norm(x, (8,)), lambda x: F.group_norm(x, 2), lambda x: F.rms_norm(x, (8,))):
        assert on_cpu(norm) == BF16
    assert on_cpu(lambda x: F.batch_norm(x, None, None, training=True)) == BF16
    assert on_cpu(lambda x: F.batch_norm(x.float(), None, None, training=True)) == FP32


@claim(
    "Autocast runs sum and mean in FP32.",
    verdict="depends",
    truth="On CUDA `sum` gives FP32 and `mean` does not. On a CPU neither does: a sum of 70,000 ones in FP16 is inf.",
    also=["tests/rules/amp7xx_choice/test_facts.py::test_what_cuda_autocast_keeps_in_fp32"],
)
def test_sums(cuda):
    assert (cuda["sum"], cuda["mean"]) == ("float32", "float16")
    assert (on_cpu(torch.sum), on_cpu(torch.mean)) == (BF16, BF16)
    with torch.autocast("cpu", FP16):
        assert torch.ones(70_000, dtype=FP16).sum().isinf()


@claim(
    "softmax overflows in FP16.",
    verdict="false",
    truth="It subtracts the largest score first, and CUDA's autocast also computes it in FP32. One written with "
    "`exp` and a division does overflow, from a score of 11.09 on.",
    also=["tests/rules/amp7xx_choice/test_facts.py::test_what_cuda_autocast_keeps_in_fp32"],
)
def test_softmax(cuda):
    scores = torch.tensor([60_000.0, 50_000.0, 11.1]).half()
    assert scores.softmax(-1).tolist() == [1, 0, 0]
    assert (scores.exp() / scores.exp().sum()).isnan().any()
    assert (scores[2:].exp() / scores[2:].exp().sum()).isnan().all()
    assert cuda["softmax"] == "float32"


@claim(
    "Under autocast, weights and gradients are in FP16.",
    verdict="false",
    truth="Weights, their gradients and the optimizer's state are kept in FP32. Only activations and "
    "temporary copies of the weights are in 16 bits. A gradient is computed from these in 16 bits and then "
    "cast, so what FP16 loses is lost before. There is nothing to convert before a checkpoint or an evaluation.",
    also=["tests/tune/memory/test_tracker.py::test_autocasts_copies_of_weights_are_distinguished_from_those_of_inputs"],
)
def test_what_stays_in_fp32():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.autocast("cpu", BF16):
        outputs = model(torch.ones(2, 8))
    outputs.float().sum().backward()
    optimizer.step()
    state = [tensor for each in optimizer.state.values() for tensor in each.values()]
    assert outputs.dtype == BF16
    assert {tensor.dtype for weight in model.parameters() for tensor in (weight, weight.grad)} == {FP32}
    assert len(state) == 6
    assert {tensor.dtype for tensor in state} == {FP32}
    with torch.autocast("cpu", FP16):
        outputs = nn.functional.linear(torch.tensor([[1e-5]]), weight := nn.Parameter(torch.ones(1, 1)))
    outputs.backward(torch.full((1, 1), 1e-4, dtype=FP16))
    assert (weight.grad.dtype, weight.grad.item()) == (FP32, 0), "1e-9 in FP32"


@claim(
    "A sigmoid and `BCELoss` work under autocast.",
    verdict="depends",
    truth="CUDA's autocast refuses `binary_cross_entropy`, in any type; a CPU's computes it in FP32. "
    "`binary_cross_entropy_with_logits`, without a sigmoid before, is computed in FP32 on both.",
)
def test_binary_cross_entropy(cuda):
    assert "unsafe to autocast" in cuda["binary_cross_entropy"]
    assert cuda["binary_cross_entropy_with_logits"] == "float32"
    assert on_cpu(lambda x: F.binary_cross_entropy(x, x)) == FP32
    assert on_cpu(lambda x: F.binary_cross_entropy_with_logits(x, x)) == FP32


class Product(torch.autograd.Function):
    """As people write it: no word of autocast."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class CastProduct(Product):
    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cpu"))


@claim(
    "A `torch.autograd.Function` of one's own works under autocast as it is.",
    verdict="depends",
    truth="Its forward pass is autocast and its backward pass, outside the block, is not: a product of the 16-bit "
    "gradient with the FP32 tensors that it saved raises. `torch.amp.custom_fwd` and `custom_bwd` give both the same "
    "state. A backward pass inside the block hides it, and torch advises against that.",
)
def test_custom_functions():
    def gradient(function, inside=False):
        x, weight = torch.ones(2, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
        with torch.autocast("cpu", BF16):
            outputs = function.apply(x, weight)
            assert outputs.dtype == BF16
            if inside:
                outputs.sum().backward()  # noqa: AMP111
        if not inside:
            outputs.sum().backward()
        return x.grad.tolist()

    right = [[4.0] * 4] * 2
    with pytest.raises(RuntimeError, match="same dtype"):
        gradient(Product)
    assert gradient(CastProduct) == gradient(Product, inside=True) == right


@claim(
    "The loss is computed in FP16.",
    verdict="false",
    truth="It is one number, and FP32 for it costs nothing. Near 10 an FP16 loss moves in steps of 0.008, and the "
    "first gradient that goes through it is the loss scale: 65536 is inf in FP16. CUDA's autocast computes "
    "`cross_entropy` in FP32.",
)
def test_a_loss_in_fp16(cuda):
    assert torch.tensor([10.0, 10.003]).half().unique().numel() == 1
    assert torch.tensor(10.008).half() > 10
    loss = torch.ones((), dtype=FP16, requires_grad=True)
    (loss * torch.tensor(65536.0)).backward()
    assert loss.grad.isinf()
    assert cuda["cross_entropy"] == "float32"


@claim(
    "Validation has to run under autocast, too.",
    verdict="depends",
    truth="Not to be right: weights are FP32, and without autocast the outputs are nearer to those of FP64. It is "
    "for speed and memory, and to measure what will be deployed where that is in 16 bits.",
)
def test_validation_without_autocast():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)), torch.randn(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        with torch.autocast("cpu", BF16):
            loss = model(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        plain = model(x)
        with torch.autocast("cpu", BF16):
            cast = model(x)
        exact = model.double()(x.double())
    assert plain.dtype == FP32
    assert (plain - exact).abs().max() < 1e-5 < 1e-3 < (cast - exact).abs().max()


@claim(
    "`@torch.cuda.amp.autocast(enabled=False)` fixes a loss that overflows.",
    verdict="false",
    truth="It is deprecated, it switches off CUDA's autocast only, and it casts nothing: what comes in 16 bits is "
    "computed in 16 bits. `torch.autocast(device_type, enabled=False)` with `.float()` on the inputs does fix it.",
    also=["tests/rules/amp7xx_choice/test_facts.py::test_switching_autocast_off_casts_nothing"],
)
def test_autocast_off_around_a_loss():
    def loss(scores):
        return scores.exp().sum().log()

    with pytest.warns(FutureWarning, match="deprecated"):
        off = torch.cuda.amp.autocast(enabled=False)  # noqa: AMP310
    with torch.autocast("cpu", FP16):
        scores = F.linear(torch.full((1, 8), 2.0), torch.ones(4, 8))
        with off:
            assert F.linear(scores.float(), torch.ones(4, 4)).dtype == FP16, "on a CPU it is still on"
            assert loss(scores).isinf()
        with torch.autocast("cpu", enabled=False):
            assert loss(scores).isinf()
            assert loss(scores.float()) == pytest.approx(16 + torch.tensor(4.0).log().item())


COMPILED = """
import torch

def loss(x, weight):
    with torch.autocast("cpu", enabled=False):
        return (x.float() @ weight.float()).sum() * 1e5

def gradient(function):
    x, weight = torch.ones(2, 4, requires_grad=True), torch.ones(4, 2, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        value = function(x, weight)
    value.backward()
    return x.grad[0, 0].item()

print(gradient(loss), gradient(torch.compile(loss, backend="aot_eager")))
"""


@pytest.mark.nightly
@claim(
    "A compiled model under autocast computes what the eager one does.",
    verdict="false",
    truth="The backward pass is traced under the forward pass's autocast, so products that were kept in FP32 by "
    "`autocast(enabled=False)` have their gradients computed in 16 bits: in FP16, a gradient of 200,000 is inf "
    "compiled and 200,000 eager. Seen with torch 2.6 and 2.13 (pytorch#153044, pytorch#177287).",
)
def test_compiled_backward_passes(warm, tmp_path):
    done = warm.run("-c", COMPILED, cwd=tmp_path)
    assert done.stdout.split() == ["200000.0", "inf"], done.stderr
