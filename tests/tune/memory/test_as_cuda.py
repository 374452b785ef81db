"""CPU tensors that take CUDA's ways: the types that operations run in, what they keep, and that all of it is undone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampwise.tune.memory.allocation_log import ACTIVATIONS, PARAMETERS
from ampwise.tune.memory.as_cuda import as_cuda
from ampwise.tune.memory.fake_tensors import without_memory
from ampwise.tune.memory.tracker import FORWARD, AllocationTracker

from ...for_each import for_each

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def calls(make):
    """Operations by name, on tensors that ``make`` makes."""
    half, full, square, row = make(4, 8, dtype=BF16), make(4, 8), make(8, 8), make(8)
    places, image, kernel, double = (
        make(4, dtype=torch.long),
        make(2, 4, 8, 8),
        make(4, 4, 3, 3),
        make(4, 8, dtype=FP64),
    )
    narrow = image.to(BF16)
    return {
        "linear": lambda: F.linear(full, square),
        "matmul": lambda: full @ square,
        "mv": lambda: square.mv(row),
        "addmv": lambda: torch.addmv(row, square, row),
        "einsum": lambda: torch.einsum("ij,jk->ik", full, square),
        "prelu": lambda: F.prelu(full, row),
        "conv2d": lambda: F.conv2d(image, kernel),
        "attention": lambda: F.scaled_dot_product_attention(image, image, image),
        "layer_norm": lambda: F.layer_norm(half, (8,)),
        "group_norm": lambda: F.group_norm(half.view(4, 8, 1), 2),
        "softmax": lambda: half.softmax(-1),
        "softmax in a type": lambda: half.softmax(-1, dtype=BF16),
        "log_softmax": lambda: half.log_softmax(-1),
        "sum": lambda: half.sum(),
        "sum of a dimension": lambda: half.sum(0),
        "mean": lambda: half.mean(),
        "cumsum": lambda: half.cumsum(0),
        "exp": lambda: half.exp(),
        "pow": lambda: half**2,
        "rsqrt": lambda: half.rsqrt(),
        "norm": lambda: half.norm(),
        "norm of a dimension": lambda: half.norm(dim=0),
        "vector_norm": lambda: torch.linalg.vector_norm(half),
        "mse_loss": lambda: F.mse_loss(half, half),
        "cross_entropy": lambda: F.cross_entropy(half, places),
        "nll_loss": lambda: F.nll_loss(half, places),
        "bce": lambda: F.binary_cross_entropy_with_logits(half, half),
        "cdist": lambda: torch.cdist(half, half),
        "logsumexp": lambda: half.logsumexp(0),
        "addcmul": lambda: torch.addcmul(full, half, half),
        "addcmul of one type": lambda: torch.addcmul(half, half, half),
        "atan2": lambda: torch.atan2(half, full),
        "index_put": lambda: full.index_put((places,), half),
        "cat": lambda: torch.cat([half, full]),
        "stack": lambda: torch.stack([half, half]),
        "add": lambda: half + full,
        "gelu": lambda: F.gelu(half),
        "embedding": lambda: F.embedding(places, square),
        "batch_norm": lambda: F.batch_norm(narrow, None, None, training=True),
        "max_pool": lambda: F.max_pool2d(narrow, 2),
        "pad": lambda: F.pad(narrow, (1, 1, 1, 1), mode="reflect"),
        "interpolate": lambda: F.interpolate(narrow, scale_factor=2),
        "dropout": lambda: F.dropout(half, 0.5),
        "of FP64": lambda: double.exp(),
    }


def types(make):
    found = {}
    for name, call in calls(make).items():
        try:
            found[name] = call().dtype
        except RuntimeError:  # what fake CUDA tensors cannot do where there is no GPU
            found[name] = None
    return found


def fake_cuda_types():
    """Torch's own answer: fake tensors on a CUDA device can be computed with anywhere, if not trained."""
    with FakeTensorMode(), torch.no_grad():
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", BF16)
        try:
            return types(lambda *shape, dtype=FP32: torch.empty(shape, dtype=dtype, device="cuda"))
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.clear_autocast_cache()


def test_operations_run_in_the_types_that_they_run_in_on_cuda():
    with without_memory(), as_cuda(), torch.autocast("cpu", BF16):
        ours = types(lambda *shape, dtype=FP32: torch.empty(shape, dtype=dtype))
    assert None not in ours.values()
    known = {name: dtype for name, dtype in fake_cuda_types().items() if dtype is not None}
    assert len(known) > 30
    assert {name: ours[name] for name in known} == known


def test_afterwards_the_cpu_is_as_before():
    def answers():
        half, places = torch.zeros(4, 8, dtype=BF16), torch.zeros(4, dtype=torch.long)
        with torch.autocast("cpu", BF16):
            return [
                F.layer_norm(half, (8,)).dtype,
                half.sum().dtype,
                half.exp().dtype,
                torch.einsum("ij->ji", half.float()).dtype,
                F.cross_entropy(half, places).dtype,
                F.scaled_dot_product_attention(*[half[None, None]] * 3).dtype,
                F.dropout(half, 0.5).dtype,
                F.pad(half[None], (1, 1), mode="reflect").dtype,
            ]

    before = answers()
    with without_memory(), as_cuda():
        pass
    assert answers() == before
    with pytest.raises(ZeroDivisionError), without_memory(), as_cuda():
        _ = 1 / 0
    assert answers() == before
    x = torch.randn(2, 1, 4, 8)  # and values come from the CPU's own kernels again
    assert torch.equal(F.scaled_dot_product_attention(x, x, x), F.scaled_dot_product_attention(x, x, x))
    assert x.softmax(-1).sum(-1).allclose(torch.ones(2, 1, 4))


def activations(module, *inputs, dtype=None):
    """Bytes that a module's forward pass leaves, and that its backward pass works."""
    with without_memory(), as_cuda():
        module = module()
        arguments = [torch.zeros(shape, requires_grad=True) for shape in inputs]
        with AllocationTracker() as tracker:
            tracker.adopt(PARAMETERS, module.parameters())
            tracker.adopt("inputs", arguments)
            with tracker.phase(FORWARD), torch.autocast("cpu", dtype or BF16, enabled=dtype is not None):
                out = module(*arguments)
            sum(
                part.float().sum() for part in (out if isinstance(out, tuple) else (out,)) if part is not None
            ).backward()
        log = tracker.log()
        assert all(argument.grad.dtype == FP32 for argument in arguments)
        return log.split(log.phase(FORWARD).end).get(ACTIVATIONS, 0)


def test_dropout_keeps_a_byte_for_each_number():
    shape = (512, 1024)
    assert activations(lambda: nn.Dropout(0.5), shape) == 512 * 1024 * (4 + 1)
    assert activations(lambda: nn.Dropout(0.0), shape) == 0


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, **self.options)


@for_each("dtype", [None, BF16, FP16])
@for_each("options", [{}, {"is_causal": True}, {"dropout_p": 0.1}])
def test_attention_keeps_no_matrix_of_scores(dtype, options):
    rows, heads, length, width = 2, 4, 256, 64
    shape = (rows, heads, length, width)
    kept = activations(lambda: Attention(**options), shape, shape, shape, dtype=dtype)
    numbers = rows * heads * length * width
    cast = 3 * numbers * 2 if dtype else 0  # query, key and value, in 16 bits
    result = numbers * (2 if dtype else 4)
    assert kept - cast - result - rows * heads * length * 4 <= 2 * 512  # a sum for each row, and a seed


def test_attention_that_no_fused_kernel_takes_keeps_its_scores():
    shape = (2, 4, 256, 63)  # a head that no kernel is made for
    scores = 2 * 4 * 256 * 256 * 4
    assert activations(Attention, shape, shape, shape) > scores


class Masked(nn.Module):
    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=torch.ones(256, 256, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [None, BF16])
def test_attention_with_a_mask_keeps_the_mask_as_a_bias(dtype):
    shape = (2, 4, 256, 64)
    kept, plain = (activations(module, shape, shape, shape, dtype=dtype) for module in (Masked, Attention))
    assert kept - plain == 256 * 256 * (2 if dtype else 4)


@pytest.mark.nightly
def test_multihead_attention_takes_the_same_ways():
    module = lambda: nn.TransformerEncoderLayer(128, 4, 256, 0.1, batch_first=True, norm_first=True)  # noqa: E731
    assert activations(module, (4, 64, 128), dtype=BF16) < activations(module, (4, 64, 128))


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="this torch has no kernel for it")
def test_rms_norm_keeps_its_input_and_a_number_a_row():
    kept = activations(lambda: nn.RMSNorm(512), (1024, 512))
    assert kept == 1024 * 512 * 4 + 1024 * 4  # the result, and the numbers; the input is not its own


def test_from_fp16_softmax_makes_no_copy_in_fp32():
    class Softmax(nn.Module):
        def forward(self, x):
            return (x @ x).softmax(-1)

    shape = (512, 512)
    result, cast = 512 * 512 * 4, 512 * 512 * 2
    assert activations(Softmax, shape, dtype=FP16) == result + cast
    peaks = {}
    for dtype in (FP16, BF16):
        with without_memory(), as_cuda():
            x = torch.zeros(shape)
            with AllocationTracker() as tracker, torch.autocast("cpu", dtype):
                tracker.adopt("inputs", [x])
                y = Softmax()(x)
            peaks[dtype] = tracker.log().peak()
            del y
    assert peaks[BF16] - peaks[FP16] == result


def test_a_cell_casts_its_weights_once_for_all_steps():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(64, 64)

        def forward(self, x):
            state = None
            for _ in range(5):
                state = self.cell(x, state)
            return state[0]

    with without_memory(), as_cuda():
        module, x = Recurrent(), torch.zeros(8, 64)
        with AllocationTracker() as tracker, torch.autocast("cpu", BF16):
            tracker.adopt(PARAMETERS, module.parameters())
            with tracker.phase(FORWARD):
                y = module(x)
        weights = sum(parameter.numel() for parameter in module.parameters())
        assert tracker.log().most()["cast cache"] <= weights * 2 + 4 * 512
        del y
