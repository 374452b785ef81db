"""A profile read: synthetic ones with known answers, and a real step."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._C._autograd import DeviceType

from ampwise.tune.bench.profile_summary import (
    OUTSIDE,
    SCOPE,
    UPDATE,
    kind_of_kernel,
    kind_of_op,
    median_summary,
    profiled_step,
    summarize,
)
from ampwise.watch.profile import DeviceKernel, HostOp, OperatorCall
from ampwise.watch.profiler import events_of

from ...for_each import for_each
from .bench_toys import fielded, mlp

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without BF16

MS = 1_000_000  # nanoseconds


def op(name, start, end, *, id=0, thread=1, number=-1, backward=False, formats=()):
    call = OperatorCall(name=name, shapes=[[4]], formats=formats)
    return HostOp(call, start * MS, end * MS, thread, id, number, backward)


def kernel(name, start, duration, launched_by=0):
    return DeviceKernel(name, duration * MS, launched_by, start * MS)


def test_kernels_are_of_the_kind_of_the_operator_that_launched_them():
    ops = [
        op("aten::linear", 0, 10),
        op("aten::addmm", 1, 9, id=1),
        op("aten::scaled_dot_product_attention", 10, 20),
        op("aten::_scaled_dot_product_flash_attention", 11, 19),
        op("aten::_flash_attention_forward", 12, 18, id=2),
        op("aten::to", 20, 30),
        op("aten::copy_", 21, 29, id=3, formats=("c10::BFloat16", "float")),
        op("aten::copy_", 30, 32, id=4, formats=("float", "float")),
        op("aten::gelu", 32, 34, id=5),
        op(UPDATE, 40, 60),
        op("aten::_foreach_norm", 41, 42, id=6),
        op("Optimizer.step#AdamW.step", 45, 55),
        op("aten::_fused_adamw_", 46, 54, id=7),
    ]
    kernels = [kernel("k", 10 * number, number, number) for number in range(1, 8)]
    found = summarize(ops, kernels).split
    assert {kind: round(1e3 * seconds) for kind, seconds in found.seconds.items()} == {
        "matrix": 1,
        "attention": 2,
        "casts": 3,
        "copies": 4,
        "elementwise": 5,
        "optimizer": 6 + 7,
    }
    assert found.launches == 7
    assert found.on_device
    assert found.share("optimizer") == pytest.approx(13 / 28)
    assert found.share("optimizer", "casts") == pytest.approx(16 / 28)


def test_kernels_of_nobody_are_reported_by_their_names():
    names = {
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "matrix",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>": "matrix",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>": "attention",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
        "void at::native::vectorized_elementwise_kernel<4, gelu>": "elementwise",
        "triton_per_fused_native_layer_norm_4": "elementwise",
        "triton_poi_fused__to_copy_0": "casts",
        "triton_tem_fused_mm_7": "matrix",
        "Memcpy DtoD (Device -> Device)": "copies",
        "somebodys_own_kernel": "other",
    }
    assert {name: kind_of_kernel(name) for name in names} == names


def test_what_happens_inside_a_product_or_attention_is_part_of_it():
    ops = [
        op("aten::convolution", 0, 10),
        op("aten::cudnn_convolution", 1, 9),
        op("aten::copy_", 2, 3, id=1, formats=("float", "float")),
        op("aten::_scaled_dot_product_efficient_attention", 20, 30),
        op("aten::softmax", 21, 22, id=2),
    ]
    found = summarize(ops, [kernel("k", 0, 1, 1), kernel("k", 5, 1, 2)]).split.seconds
    assert found == {"matrix": 0.001, "attention": 0.001}


def test_busy_is_time_in_which_at_least_one_kernel_ran():
    overlapping = [kernel("a", 0, 10), kernel("b", 5, 10), kernel("c", 20, 5), kernel("d", 21, 1)]
    found = summarize([], overlapping).split
    assert found.busy == pytest.approx(0.020)
    assert sum(found.seconds.values()) == pytest.approx(0.026)


def test_backward_work_belongs_to_the_module_whose_forward_made_it():
    ops = [
        op(f"{SCOPE}", 0, 100),
        op(f"{SCOPE}body", 1, 40),
        op("aten::linear", 2, 30, number=5),
        op("aten::addmm", 3, 20, number=5, id=1),
        op(f"{SCOPE}head", 50, 90),
        op("aten::size", 51, 52, number=6),  # makes no node: the next has the same number
        op("aten::mm", 55, 80, number=6, id=2),
        op("aten::nll_loss", 110, 120, number=7, id=3),
        op("autograd::engine::evaluate_function: NllLossBackward0", 0, 5, thread=2),
        op("NllLossBackward0", 1, 4, thread=2, number=7, backward=True),
        op("aten::nll_loss_backward", 2, 3, thread=2, id=4),
        op("MmBackward0", 11, 19, thread=2, number=6, backward=True),
        op("aten::mm", 12, 18, thread=2, id=5),
        op("AddmmBackward0", 21, 29, thread=2, number=5, backward=True),
        op("aten::mm", 22, 28, thread=2, id=6),
    ]
    kernels = [kernel("k", 10 * number, 10**number, number) for number in range(1, 7)]
    modules = summarize(ops, kernels).modules
    assert {name: round(1e3 * seconds) for name, seconds in modules.items()} == {
        "body": 10 + 10**6,
        "head": 10**2 + 10**5,
        OUTSIDE: 10**3 + 10**4,
    }


def test_the_optimizer_is_no_layers_work():
    ops = [op(UPDATE, 0, 10), op("aten::_foreach_add_", 1, 5, id=1)]
    assert summarize(ops, [kernel("k", 0, 1, 1)]).modules == {}


def test_on_a_cpu_operators_count_with_what_is_not_in_others():
    ops = [op("aten::linear", 0, 10), op("aten::addmm", 1, 9), op("aten::gelu", 20, 23)]
    found = summarize(ops, []).split
    assert found.seconds == {"matrix": pytest.approx(0.008), "elementwise": pytest.approx(0.005)}
    assert not found.on_device
    assert found.busy == pytest.approx(0.013)


@for_each(
    ("name", "kind"),
    [
        ("aten::mm", "matrix"),
        ("aten::convolution_backward", "matrix"),
        ("aten::native_layer_norm", "elementwise"),
        ("aten::embedding", "elementwise"),
        ("aten::clone", "copies"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("Optimizer.step#SGD.step", "optimizer"),
        ("autograd::engine::evaluate_function: AddBackward0", "other"),
    ],
)
def test_operators_by_name(name, kind):
    assert kind_of_op(name) == kind


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(16, 48), nn.Linear(16, 1)

    def forward(self, x):
        query, key, value = self.mix(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(-2)).square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_real_step_is_read(precision):
    def make():
        return Attending(), (torch.randn(4, 6, 16),)

    subject, (contender,) = fielded(make, precision)
    with contender.turn():
        contender()
        reading = summarize(*events_of(profiled_step(contender)))
    assert {"matrix", "attention", "elementwise", "optimizer"} <= set(reading.split.seconds)
    assert ("casts" in reading.split.seconds) == (precision == "bf16")
    # Attention is in no module's own forward but the model's, and each layer has its work.
    assert {"", "mix", "out"} <= set(reading.modules)
    assert reading.split.busy == pytest.approx(sum(reading.split.seconds.values()), rel=1e-6)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in subject.model.modules())


def test_backward_is_counted_to_layers_in_a_real_step():
    _, (contender,) = fielded(mlp, "fp32")
    with contender.turn():
        ops, kernels = events_of(profiled_step(contender))
    forward = [each for each in ops if not each.backward and not _inside_backward(each, ops)]
    whole, half = summarize(ops, kernels).modules, summarize(forward, kernels).modules
    assert all(whole[name] > half[name] for name in ("0", "2", "4"))


def _inside_backward(one, ops):
    return any(
        each.call.name.startswith("autograd::engine") and each.start <= one.start <= one.end <= each.end for each in ops
    )


class Event:
    """As the profiler has it, as far as it is asked."""

    def __init__(self, name, *, cpu=True, id=0, launched_by=0, start=0, duration=MS):
        self.said = {
            "name": name,
            "device_type": DeviceType.CPU if cpu else DeviceType.CUDA,
            "start_ns": start,
            "duration_ns": duration,
            "correlation_id": id,
            "linked_correlation_id": launched_by,
            "start_thread_id": 1,
            "fwd_thread_id": 0,
            "sequence_nr": -1,
            "is_async": False,
            "is_user_annotation": False,
            **{part: [] for part in ("shapes", "dtypes", "structured_input_strides", "concrete_inputs")},
        }

    def __getattr__(self, name):
        return lambda: self.said[name]


def test_calls_of_the_driver_are_not_taken_for_operators_of_the_same_number():
    events = [
        Event("aten::mm", id=7, duration=10 * MS),
        Event("cudaLaunchKernel", id=7, launched_by=7, start=MS),
        Event("aten::gelu", id=8, start=20 * MS, duration=10 * MS),
        Event("cuLaunchKernelEx", id=8, launched_by=8, start=21 * MS),
        Event("a kernel", cpu=False, launched_by=7),
        Event("another", cpu=False, launched_by=8),
        Event("of nobody", cpu=False),
    ]
    ops, kernels = events_of(SimpleNamespace(events=lambda: events))
    assert [each.call.name for each in ops] == ["aten::mm", "aten::gelu"]
    assert summarize(ops, kernels).split.seconds == {"matrix": 0.001, "elementwise": 0.001, "other": 0.001}


def test_of_several_steps_the_median_counts():
    times = [(10, 1), (100, 1), (12, 3)]  # the second was held up
    ops = [op(f"{SCOPE}head", 0, 500), op("aten::mm", 1, 400, id=1), op("aten::gelu", 401, 402, id=2)]
    each = [summarize(ops, [kernel("k", 0, mm, 1), kernel("k", 200, gelu, 2)]) for mm, gelu in times]
    found = median_summary(each)
    assert found.split.seconds == {"matrix": pytest.approx(0.012), "elementwise": pytest.approx(0.001)}
    assert found.split.busy == pytest.approx(0.015)
    assert (found.split.launches, found.split.on_device) == (2, True)
    assert found.modules == {"head": pytest.approx(0.015)}
    assert median_summary(each[:1]) == each[0]
