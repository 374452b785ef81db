"""A kernel at fault: found with the switch that avoids it; a model's own NaN is never blamed on one."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampwise
from ampwise.hardware.kernel_faults import KernelFault, kernel_faults
from ampwise.trace.op_inspection import _attention_in_fp64

BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
FORWARD = "_scaled_dot_product_flash_attention_for_cpu"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 8)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).reshape(x.shape[0], 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))  # here


HERE = next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "# here" in line)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Attention()


@pytest.fixture
def planted(recwarn):
    """Replace a kernel of torch on the CPU by another, until the test ends."""
    library = torch.library.Library("aten", "IMPL")
    yield lambda name, kernel: library.impl(name, kernel, "CPU")
    library._destroy()


def bad_gradients(grad_out, query, key, value, *_, **__):
    made = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    made[0][..., 0] = math.nan
    return made


def bad_output(query, key, value, *_, **__):
    return torch.full_like(query, math.nan), query.new_zeros(query.shape[:-1], dtype=torch.float32)


def found(model, x, mask=None):
    return ampwise.trace(lambda x: model(x, mask).float().square().mean(), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "kernel"), [(BACKWARD, bad_gradients), (FORWARD, bad_output)])
def test_a_planted_fault_is_the_kernels_and_not_the_models(model, planted, name, kernel, dtype):
    planted(name, kernel)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        (finding,) = found(model, torch.randn(4, 16, 32))
    assert (finding.rule.name, finding.place.line) == ("kernel-fault", HERE)
    assert "the kernel is at fault, not the model; in FP64 the result is no larger than" in finding.message
    assert "SDPBackend.MATH" in finding.fix
    assert "gradients finite" in finding.fix
    assert "clamp" not in finding.fix


def test_with_a_causal_mask_of_infinities_it_is_still_the_kernels(model, planted):
    planted(BACKWARD, bad_gradients)
    mask = torch.full((16, 16), -math.inf).triu(1)
    (finding,) = found(model, torch.randn(4, 16, 32), mask)
    assert finding.rule.name == "kernel-fault"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_models_own_nan_is_never_the_kernels(model, dtype):
    x = torch.randn(4, 16, 32)
    masked = torch.zeros(16, 16)
    masked[3] = -math.inf
    bad = x.clone()
    bad[2, 3, 4] = math.nan
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        causes = [found(model, bad), found(model, x, masked), found(model, x * 1e38)]
    assert all(finding.rule.name != "kernel-fault" for findings in causes for finding in findings)
    assert causes[0][0].rule.name == "bad-batch"


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "added"])
def test_attention_in_fp64_is_torchs_own(heads, mask):
    torch.manual_seed(1)
    query = torch.randn(2, 4, 6, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, heads, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    given = torch.rand(6, 5) > 0.4
    given[:, 0] = True
    attn_mask = {"bool": given, "added": torch.randn(6, 5).double()}.get(mask)
    causal = mask == "causal"
    out = F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=causal, enable_gqa=True)
    upper = torch.randn_like(out)
    arguments = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, "is_causal": causal}
    torch.testing.assert_close(_attention_in_fp64(arguments)[0], out)
    gradients = _attention_in_fp64({**arguments, "grad_out": upper})
    torch.testing.assert_close(gradients[0], torch.autograd.grad(out, query, upper)[0])
    assert _attention_in_fp64({**arguments, "dropout_p": 0.1}) == []


def test_the_list_of_known_faults_is_well_formed():
    for fault in kernel_faults():
        assert fault.link.startswith("https://github.com/")
        assert hasattr(torch.backends.cuda, fault.switch)
        compile(fault.avoid, "avoid", "exec")
        assert not fault.what.endswith(".")


def test_a_fault_concerns_its_versions_gpus_and_shapes():
    fault = KernelFault(
        ops="cudnn_attention",
        torch="2.11",
        fixed="2.14",
        gpus=(9,),
        calls={"mask": True, "keys": [128, 64]},
        what="",
        avoid="",
        link="",
        switch="",
    )
    assert fault.concerns("2.11.0+cu130", (9, 0))
    assert fault.concerns("2.13.1", (9, 0))
    assert not fault.concerns("2.10.0", (9, 0))
    assert not fault.concerns("2.14.0", (9, 0))
    assert not fault.concerns("2.12.0", (8, 0))
    assert not fault.concerns("2.12.0", None)
    assert fault.matches(704, mask=True)
    assert not fault.matches(704, mask=False)
    assert not fault.matches(640, mask=True)
    assert fault.is_about("scaled_dot_product_cudnn_attention_backward")
    assert not fault.is_about("scaled_dot_product_flash_attention")
