"""The smaller parts: what is planned, counted, kept, swapped in, and asked of the driver."""

import pytest
import torch
from torch import nn

from ampwise.errors import BadInput, PrecisionUnavailable, UnknownName
from ampwise.hardware import Cpu, CudaDevice, find_gpu, nvml
from ampwise.hardware.nvml import NvmlDevice, NvmlError
from ampwise.train.float8.layer_forward import has_fp8_forward
from ampwise.train.precision.precision import cpu_precisions, gpu_precisions
from ampwise.tune.bench import clocks, lineup
from ampwise.tune.bench.clocks import ClockWatch, energy_of
from ampwise.tune.bench.lineup import checked_names, float8_layers, make_plan, why_no_float8
from ampwise.tune.bench.measurement import count_flops, measure_peak
from ampwise.tune.bench.profile_summary import intensity_of, layer_times
from ampwise.watch.time_use import ProfiledMatmul

from ...for_each import for_each
from .bench_toys import contender, fielded, mlp

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def device(name, capability):
    return CudaDevice(
        index=0,
        name=name,
        capability=capability,
        memory_bytes=16 * 2**30,
        bf16_claimed=True,
        bf16_native=not capability.startswith("7."),
        gpu=find_gpu(name),
    )


V100 = gpu_precisions(device("Tesla V100-SXM2-16GB", "7.0"))
H200 = gpu_precisions(device("NVIDIA H200", "9.0"))
A_CPU = cpu_precisions(Cpu(model="a CPU", features=()))


# What is planned


def test_by_default_what_the_device_runs():
    def names(facts, device):
        return [name for name, _ in make_plan(None, facts, device, compiled=False)[0]]

    assert names(H200, CUDA) == ["fp32", "tf32", "fp16", "bf16"]
    assert names(V100, CUDA) == ["fp32", "fp16"]
    assert names(A_CPU, CPU) == ["fp32", "fp16", "bf16"]


def test_compiled_rows_come_beside_the_others():
    entries, _ = make_plan(["bf16"], H200, CUDA, compiled=True)
    assert entries == [("fp32", False), ("bf16", False), ("fp32", True), ("bf16", True)]


def test_what_the_device_lacks_is_a_row_that_says_so():
    entries, (row,) = make_plan(["bf16", "fp16"], V100, CUDA, compiled=False)
    assert entries == [("fp32", False), ("fp16", False)]
    assert (row.precision, row.step_s) == ("bf16", None)
    assert row.problem == ("not run: Tesla V100-SXM2-16GB (compute capability 7.0) has no BF16 tensor cores.")


def test_with_nothing_left_to_compare_there_is_an_error():
    with pytest.raises(PrecisionUnavailable) as caught:
        make_plan(["bf16", "tf32"], V100, CUDA, compiled=False)
    assert str(caught.value).startswith("bench: none of bf16, tf32 runs here, so fp32 has no counterpart: Tesla V100")
    assert make_plan(["fp32"], V100, CUDA, compiled=True)[0] == [("fp32", False), ("fp32", True)]


@for_each(
    ("asked", "error", "text"),
    [
        (["float16"], UnknownName, "Did you mean 'fp16'"),
        (["bf61"], UnknownName, "Did you mean bf16"),
        (["auto"], UnknownName, "The precisions are fp32, tf32, fp16, bf16, fp8"),
        ("bf16", BadInput, "expected a list of names, such as ['fp32', 'bf16']"),
        ([], BadInput, "no precisions given"),
        ([""], UnknownName, "unknown precision ''"),
    ],
)
def test_names_that_make_no_sense(asked, error, text):
    with pytest.raises(error) as caught:
        checked_names(asked)
    assert text in str(caught.value)


# FP8


def test_why_there_is_no_fp8(monkeypatch):
    assert why_no_float8(CPU) == "cpu has no FP8 tensor cores."
    monkeypatch.setattr(lineup, "read_device", lambda *_: device("NVIDIA A100-SXM4-80GB", "8.0"))
    assert why_no_float8(CUDA) == "NVIDIA A100-SXM4-80GB has no FP8 tensor cores."
    monkeypatch.setattr(lineup, "read_device", lambda *_: device("NVIDIA H200", "9.0"))
    assert why_no_float8(CUDA) is None


def wide_mlp(batch=8):
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 512), nn.Linear(512, 10))
    return model, (torch.randn(batch, 64),), lambda x: model(x).square().mean()


def narrow(model):
    return [name for name, module in model.named_modules() if has_fp8_forward(module)]


def test_fp8_layers_are_there_for_a_while_in_the_modules_that_are_there():
    model, (x,), _ = wide_mlp()
    x = x.bfloat16()  # or it would be wide, as there is no autocast
    model = model.bfloat16()
    before, parameters, plain = list(model.modules()), list(model.parameters()), model(x)
    layers = float8_layers(model)
    made = []
    for _ in range(2):
        with layers():
            assert narrow(model) == ["1"], "the first and the last stay wide"
            assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
            assert not torch.equal(model(x), plain)
            made.append(model[1].fp8_layer)
        assert list(model.modules()) == before
        assert torch.equal(model(x), plain)
    assert made[0] is made[1], "or torch.compile would compile anew"


def test_fp8_layers_are_taken_off_after_a_failure():
    model, _, _ = wide_mlp()
    with pytest.raises(ZeroDivisionError), float8_layers(model)():
        1 / 0  # noqa: B018
    assert not narrow(model)


def test_a_model_without_fp8_layers_is_reported_so():
    with pytest.raises(
        BadInput, match="no linear layer of this model can run in FP8: 0: first layer: it reads the data"
    ):
        float8_layers(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))


def test_an_fp8_contender_runs_with_them():
    _, (fp8,) = fielded(wide_mlp, "fp8")
    with fp8.turn():
        assert narrow(fp8.step.case.model) == ["1"]
        assert torch.isfinite(fp8())
    assert not narrow(fp8.step.case.model)


# What is kept in FP32


def test_kept_modules_run_in_fp32_in_their_turn_only():
    subject, (fp32, bf16) = fielded(mlp, "fp32", "bf16", kept=("4",))
    given = []
    subject.model[4].register_forward_hook(lambda module, args, output: given.append(output.dtype))
    for each in (fp32, bf16):
        with each.turn():
            each()
    assert given == [torch.float32, torch.float32]
    subject, (plain,) = fielded(mlp, "bf16")
    subject.model[4].register_forward_hook(lambda module, args, output: given.append(output.dtype))
    with plain.turn():
        plain()
    assert given[-1] == torch.bfloat16


def test_patterns_that_match_nothing():
    with pytest.raises(UnknownName, match=r"unknown module '\*.router'"):
        fielded(mlp, "bf16", kept=("*.router",))


# Work


def test_flops_are_those_of_the_products():
    rows, (sizes) = 8, [(16, 32), (32, 32), (32, 4)]
    one = contender(mlp)
    forward = sum(2 * rows * i * o for i, o in sizes)
    # Backward, each product twice; but nobody wants the gradient of the first layer's input.
    assert count_flops(one) == forward + 2 * forward - 2 * rows * 16 * 32
    assert all(parameter.grad is None for parameter in one.step.case.parameters)


def test_attention_on_a_cpu_is_counted():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, q, k, v):
            return nn.functional.scaled_dot_product_attention(q * self.scale, k, v).square().mean()

    def make():
        return Attention(), tuple(torch.randn(2, 3, 5, 8) for _ in range(3))

    forward = 2 * (2 * 2 * 3 * 5 * 5 * 8)
    assert count_flops(contender(make)) == forward + 5 * forward / 2


def test_a_model_without_products_has_no_work_to_count():
    def make():
        model = nn.LayerNorm(8)
        return model, (torch.randn(4, 8),), lambda x: model(x).square().mean()

    assert count_flops(contender(make)) is None


def product(shape, flops, precision="bf16", count=1):
    return ProfiledMatmul(op="mm", shape=shape, precision=precision, flops=flops, count=count)


def test_intensity_is_work_for_each_byte():
    n = 1024
    assert intensity_of([product(f"{n}×{n} @ {n}×{n}", 2.0 * n**3)]) == pytest.approx(n / 3)
    assert intensity_of([product(f"{n}×{n} @ {n}×{n}", 2.0 * n**3, "fp32")]) == pytest.approx(n / 6)
    twice = product(f"{n}×{n} @ {n}×{n}", 4.0 * n**3, count=2)
    assert intensity_of([twice]) == pytest.approx(n / 3)
    batched = product("4×8×16 @ 4×16×32", 2.0 * 4 * 8 * 16 * 32)
    assert intensity_of([batched]) == pytest.approx(2 * 4 * 8 * 16 * 32 / (2 * 4 * (8 * 16 + 16 * 32 + 8 * 32)))
    assert intensity_of([product("8×3×9×9 * 8×3×3×3", 1e9), product("2×2 @ 2×2", 1.0)]) is None
    assert intensity_of([]) is None


# Layers


def test_layers_alike_are_one_line():
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.GELU()) for _ in range(3))
    names = ["blocks.0.0", "blocks.1.0", "blocks.2.0", "blocks.0.1", "(outside the model)", ""]
    times = {
        "fp32": dict(zip(names, [1.0, 1.0, 1.0, 0.5, 0.2, 1e-12], strict=True)),
        "bf16": dict(zip(names[:4], [0.5, 0.5, 0.5, 0.5], strict=True)),
    }
    linear, gelu, outside = layer_times(model, times, {})
    assert (linear.name, linear.kind, linear.times) == ("blocks.#.#", "Linear", 3)
    assert linear.seconds == {"fp32": 3.0, "bf16": 1.5}
    assert (linear.ratio("bf16"), gelu.ratio("bf16"), outside.ratio("bf16")) == (2.0, 1.0, None)
    assert (gelu.kind, outside.name) == ("GELU", "(outside the model)")


def test_what_is_next_to_nothing_of_a_step_has_no_ratio():
    times = {"fp32": {"0": 0.5, "(outside the model)": 4e-4}, "bf16": {"0": 0.25, "(outside the model)": 1e-4}}
    model = nn.Sequential(nn.Linear(2, 2))
    step_s = {"fp32": 1.0, "bf16": 0.5}
    linear, outside = layer_times(model, times, step_s)
    assert (linear.ratio("bf16"), outside.ratio("bf16")) == (2.0, None)
    assert layer_times(model, times, {})[1].ratio("bf16") == pytest.approx(4.0)
    assert {layer.ratio("bf16") for layer in layer_times(model, times, step_s, certain=False)} == {None}


# The driver


class Library:
    """The driver's, as far as it is asked: what is written through pointers, and codes that say whether it was."""

    def __init__(self, **answers):
        self.answers = {"nvmlDeviceGetMaxClockInfo": [1980] * 9, **answers}

    def nvmlInit_v2(self):  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802
        assert uuid == b"GPU-1"
        return 0

    def __getattr__(self, name):
        answers = self.answers.get(name)
        if answers is None:
            raise AttributeError(name)

        def answer(handle, *arguments):
            found = answers.pop(0)
            if found is None:
                return 3  # not supported
            arguments[-1]._obj.value = found
            return 0

        return answer


def driver(monkeypatch, **answers):
    found = NvmlDevice("GPU-1", Library(**answers))
    monkeypatch.setattr(clocks, "opened", lambda device: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


def test_clocks_from_the_driver(monkeypatch):
    driver(
        monkeypatch,
        nvmlDeviceGetClockInfo=[345, 1980, 1400, 1755],
        nvmlDeviceGetCurrentClocksThrottleReasons=[0x1, 0x0, 0x4, 0x20],
    )
    watch = ClockWatch(CUDA)
    for _ in range(4):
        watch.look()
    seen = watch.seen()
    assert (seen.before, seen.after, seen.lowest, seen.top) == (345, 1755, 1400, 1980)
    assert seen.held_back_by == ("its power limit", "its temperature"), "idle is no reason"


def test_a_driver_that_does_not_say_how_far_it_could_go(monkeypatch):
    driver(
        monkeypatch,
        nvmlDeviceGetClockInfo=[345, 1980],
        nvmlDeviceGetCurrentClocksThrottleReasons=[0, 0],
        nvmlDeviceGetMaxClockInfo=[None],
    )
    watch = ClockWatch(CUDA)
    watch.look()
    watch.look()
    assert watch.seen() is None


def test_energy_is_that_of_a_call(monkeypatch):
    calls = []
    driver(monkeypatch, nvmlDeviceGetTotalEnergyConsumption=[5_000_000, 5_001_200, None])
    assert energy_of(lambda: calls.append(1), 4, CUDA) == pytest.approx(0.3)
    assert len(calls) == 4
    assert energy_of(lambda: None, 1, CUDA) is None, "not supported"


def test_a_driver_that_does_not_answer_is_no_trouble(monkeypatch):
    assert ClockWatch(CPU).seen() is None
    assert energy_of(lambda: None, 1, CPU) is None
    driver(monkeypatch)
    watch = ClockWatch(CUDA)
    watch.look()
    assert watch.seen() is None
    with pytest.raises(NvmlError, match="this driver does not have it"):
        NvmlDevice("GPU-1", Library()).joules()
    monkeypatch.setattr(nvml, "LIBRARY", "libno-such-driver.so")
    with pytest.raises(NvmlError, match="cannot be loaded"):
        NvmlDevice("GPU-1")


def test_memory_is_not_made_up_on_a_cpu():
    assert measure_peak(contender(mlp)) is None
