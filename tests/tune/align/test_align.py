"""`ampwise.align`: what is off is found, with its cost and a way out; what is not stays unmentioned."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.errors import BadInput, PrecisionUnavailable, UnknownName
from ampwise.hardware import gpu_named
from ampwise.tune.align import align as module
from ampwise.tune.align.align import align
from ampwise.tune.align.matmuls import MatmulSize, StepMatmul
from ampwise.tune.align.pad import pad_

from ...for_each import for_each
from . import subjects

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")


def found(make, **options):
    return align(make, **{"device": "cpu"} | options)


def told(result):
    return {layer.name: result.advice(layer) for layer in result.off}


def test_an_odd_mlp_is_found_and_the_way_out_is_named():
    result = found(subjects.odd_mlp)
    assert told(result) == {"0": "ampwise.pad_(model)", "2": "ampwise.pad_(model)"}
    assert {finding.place.module for finding in result.findings} == {"0", "2"}
    assert {finding.rule.code for finding in result.findings} == {"AMP503"}
    assert result.products.off_share(result.off[0]) == pytest.approx(0.6)  # whose input needs a gradient
    assert result.basis.startswith("derived, not measured: ")
    assert result.products.rows == 4096


def test_after_padding_nothing_is_left_to_say():
    def padded(batch=4096):
        model, *rest = subjects.odd_mlp(batch)
        pad_(model)  # without memory, too
        return model, *rest

    result = found(padded)
    assert (result.off, result.findings, result.remarks) == ((), (), ())
    assert result.verdict == "every matmul is aligned (layers checked: 2)"


def test_what_is_aligned_stays_unmentioned():
    result = found(subjects.aligned)
    assert (result.off, result.findings) == ((), ())


def test_a_small_head_is_not_worth_it():
    result = found(subjects.small_head)
    assert told(result) == {"2": "leave it: there is little to save"}
    assert result.findings == ()
    assert result.verdict == "misaligned: 1 of 2 layers; worth fixing: none"


def test_a_toy_is_not_worth_it():
    assert found(subjects.odd_mlp, batch=2).findings == ()


@pytest.mark.parametrize(
    ("make", "name", "advice"),
    [
        (subjects.tied, "lm_head", "ampwise.pad_(model)"),
        (subjects.tied_by_code, "wte", "ampwise.pad_(model, head='wte')"),
    ],
)
def test_a_vocabulary_is_found_tied_in_either_way(make, name, advice):
    result = found(make)
    layer = result.off[0]
    assert (layer.name, layer.off, layer.product.shape) == (name, (("outputs", 50257, 50304),), "4096×50257×768")
    assert told(result)[name] == advice
    assert result.products.tokens == 4096


@pytest.mark.nightly
def test_the_advice_does_what_it_says():
    model, (x, y), loss_fn = subjects.tied_by_code(1)
    before = loss_fn(x[:, :8], y[:, :8])
    pad_(model, head="wte")
    assert torch.allclose(loss_fn(x[:, :8], y[:, :8]), before)


def test_fp8_requires_sixteen_of_everything_and_says_so():
    result = found(subjects.odd_mlp, precision="fp8", batch=4095, to=64)
    assert {finding.rule.code for finding in result.findings} == {"AMP510"}
    wanted = "ampwise.pad_(model, to=64, precision='fp8'); use 4096 rows, by batch and length"
    assert set(told(result).values()) == {wanted}


def test_tf32_wants_four():
    def make(batch=4096):
        model = nn.Sequential(nn.Linear(1020, 4092), nn.GELU(), nn.Linear(4092, 1020))
        return model, torch.randn(batch, 1020), lambda x: model(x).square().mean()

    assert found(make, precision="tf32").off == ()
    assert found(make, precision="bf16").off != ()
    assert found(make, precision="fp32", to=64).off != ()


def test_lengths_heads_and_channels_are_by_hand():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(500, 1020, 3, padding=1)
            self.qkv = nn.Linear(1020, 3 * 1020)

        def forward(self, x):
            x = self.conv(x).transpose(1, 2)
            query, key, value = self.qkv(x).unflatten(-1, (3, 17, -1)).permute(2, 0, 3, 1, 4)
            fused = F.scaled_dot_product_attention(query, key, value)
            return fused + (query @ key.transpose(-2, -1)).softmax(-1) @ value

    def make(batch=8):
        model = Model()
        return model, torch.randn(batch, 500, 1021), lambda x: model(x).square().mean()

    result = found(make)
    assert {finding.rule.name for finding in result.findings} == {
        "misaligned-dims",
        "misaligned-activations",
        "misaligned-heads",
        "misaligned-channels",
    }
    advice = " ".join(result.to_do())
    assert "choose the number of heads so that the head size is 64" in advice
    assert "pad or crop these tensors: your code sets length and batch" in advice
    assert "give it 1024 and 504 channels: pad_ does not pad convolutions" in advice


def test_a_compiled_model_is_run_as_it_was_written():
    def make(batch=4096):
        model, x, _ = subjects.odd_mlp(batch)
        compiled = torch.compile(model, backend="eager")
        return compiled, x, lambda x: compiled(x).square().mean()

    assert told(found(make)) == {"0": "ampwise.pad_(model)", "2": "ampwise.pad_(model)"}


def test_code_that_looks_at_values_is_run_on_the_cpu():
    said = []
    result = found(subjects.looks_at_values, progress=said.append)
    assert said == ["running a step without memory", "running a step on the CPU"]
    assert result.notes[0].startswith("The step ran on the CPU, as it does not run on tensors without values: ")
    assert result.off[0].off == (("outputs", 21, 24), ("inputs", 13, 16))


def test_tiles_that_are_mostly_empty_are_remarked_upon():
    def make(batch=130):
        model = nn.Linear(4096, 4096)
        return model, torch.randn(batch, 4096), lambda x: model(x).square().mean()

    result = found(make)
    assert result.findings == ()
    assert result.remarks == (
        "(the model): results of 130×4096 fill 51% of their 128×128 tiles; full tiles cost about the same (derived)",
    )
    assert found(make, batch=128).remarks == ()


def test_what_is_shown():
    result = found(subjects.tied_by_code, gpu="h200")
    lines = str(result).splitlines()
    assert lines[0] == (
        "tied_by_code in bf16, 8 rows (4,096 tokens); costs are derived, not measured: "
        f"{result.products.gpu} is not here"
    )
    assert lines[2].split() == ["layer", "product", "M×N×K", "off", "→", "better", "cost"]
    assert lines[3].startswith("wte  ")
    assert lines[-1] == "worth fixing: 1 of 3 layers (ampwise explain AMP503)"
    assert "<table" in result._repr_html_()
    plain = result.as_dict()
    assert plain["layers"][0] | {"share": 0, "off_share": 0} == {
        "name": "wte",
        "modules": ["wte"],
        "kind": "linear",
        "precision": "bf16",
        "product": {"m": 4096, "n": 50257, "k": 768, "batches": 1},
        "off": [{"role": "outputs", "size": 50257, "better": 50304}],
        "share": 0,
        "off_share": 0,
        "saved_ms": None,
        "worth_fixing": True,
        "advice": "ampwise.pad_(model, head='wte')",
    }
    assert plain["basis"].endswith("is not here")
    assert [each["code"] for each in plain["findings"]] == ["AMP503"]


# Bad input


@no_gpu
def test_a_gpu_that_is_not_there():
    with pytest.raises(BadInput, match=r"device 'cuda': torch sees no CUDA device\. Omit it"):
        align(subjects.odd_mlp, device="cuda")
    assert align(subjects.odd_mlp).basis == "derived, not measured: no GPU here"


def test_a_gpu_that_is_not_the_one_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    assert module._device(None, None).type == "cuda"
    assert module._device(None, gpu_named("h200")).type == "cuda"
    assert module._device(None, gpu_named("a100-sxm-80")).type == "cpu"
    assert module._device("cuda:1", None) == torch.device("cuda:1")


def test_arguments_that_make_no_sense():
    with pytest.raises(BadInput, match=r"device 'tpu': expected cpu or cuda, such as cuda:1\."):
        found(subjects.odd_mlp, device="tpu")
    with pytest.raises(BadInput, match=r"device 'mps': expected cpu or cuda"):
        found(subjects.odd_mlp, device="mps")
    with pytest.raises(UnknownName, match="unknown device 'h20000'"):
        found(subjects.odd_mlp, gpu="h20000")
    with pytest.raises(UnknownName, match="unknown precision 'fp4'"):
        found(subjects.odd_mlp, precision="fp4")
    with pytest.raises(BadInput, match=r"to=12 is not a multiple of 8, which bf16 needs"):
        found(subjects.odd_mlp, to=12)
    said = []
    with pytest.raises(BadInput, match="expected a batch of at least 1 row, got 0"):
        found(subjects.odd_mlp, batch=0, progress=said.append)
    assert said == ["running a step without memory"]  # and not once more
    with pytest.raises(
        PrecisionUnavailable,
        match=r"has no BF16 tensor cores, so there is nothing to align for\. Its tensor cores take: fp16\.",
    ):
        found(subjects.odd_mlp, gpu="v100-sxm2-16")


def test_a_step_that_fails_says_where():
    def make():
        model = nn.Linear(13, 21)
        return model, torch.ones(2, 12), lambda x: model(x).sum()

    with pytest.raises(BadInput, match=r"make: the batch .* does not fit the loss function: .*cannot be multiplied"):
        found(make)


def test_a_loss_without_gradients_has_forward_products():
    def make():
        model = nn.Linear(13, 21).requires_grad_(False)
        return model, torch.ones(2, 13), lambda x: model(x).sum()

    assert [product.backward for product in found(make).products.products] == [False]


# Measured, by a clock that we set


class Slow:
    """A clock by which sizes that are no multiples of 8 take three times as long, more or less."""

    def __init__(self, noise=0.0):
        self.noise, self.calls = noise, 0

    def __call__(self, work, times):
        self.calls += 1
        made = work()
        wobble = self.noise * (self.calls % 5)
        if not isinstance(made, torch.Tensor):
            return 0.010  # a step
        return (0.003 if made.shape[-1] % 8 else 0.001) + wobble


@pytest.fixture
def on_device(monkeypatch):
    """The way of a GPU, on the CPU."""

    def run(make, clock, **options):
        monkeypatch.setattr(module, "clock_for", lambda device: clock)
        monkeypatch.setattr(module, "_device", lambda asked, gpu: torch.device("cpu", 0))
        monkeypatch.setattr(module, "_without_device", module._on_device)
        facts = type("Facts", (), {"name": "Test GPU", "multi_processor_count": 100})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
        return align(make, **options)

    return run


def odd(batch=64):
    model = nn.Sequential(nn.Linear(16, 21), nn.Tanh(), nn.Linear(21, 16))
    return model, torch.randn(batch, 16), lambda x: model(x).square().mean()


def test_what_is_measured_decides(on_device):
    result = on_device(odd, Slow(), precision="fp32")
    assert result.basis == "measured here, on Test GPU"
    assert result.products.step_ms == 10
    layers = {layer.name: layer for layer in result.off}
    # Of the first layer's products, forward and backward, those with a result of 21 columns are slow.
    assert layers["0"].saved_ms == pytest.approx(2.0 * sum(p.n.size == 21 for p in layers["0"].products))
    assert result.products.time_share(layers["0"]) == pytest.approx(layers["0"].saved_ms / 10)
    assert {finding.place.module for finding in result.findings} == {"0", "2"}
    assert "ms of 10 ms per step, measured here" in result.findings[0].message
    assert next(row[3] for row in result.rows()).endswith("%")


def test_noise_is_no_gain(on_device):
    result = on_device(odd, Slow(noise=0.01), precision="fp32")
    assert result.findings == ()
    assert {layer.saved_ms for layer in result.off} == {0.0}
    assert {row[3] for row in result.rows()} == {"noise"}
    assert set(told(result).values()) == {"leave it: it would save nothing"}


@for_each("stored", [("k", "k", "n"), ("m", "n", "n"), ("k", "n", "n")])
def test_what_is_timed_lies_in_memory_as_it_did(stored):
    sizes = {letter: MatmulSize(role=letter, size=size) for letter, size in {"m": 5, "n": 6, "k": 7}.items()}
    product = StepMatmul(
        layer="", kind="linear", op="mm", backward=False, precision="fp32", stored=stored, batches=3, **sizes
    )
    left, right = module._matrices(product, torch.device("cpu"))
    assert (left.shape, right.shape) == ((3, 5, 7), (3, 7, 6))
    assert left.stride(-1 if stored[0] == "k" else -2) == 1
    assert right.stride(-1 if stored[1] == "n" else -2) == 1


def test_convolutions_are_measured_as_they_are_called(on_device):
    def make(batch=2):
        model = nn.Sequential(nn.Conv2d(3, 20, 3, padding=1), nn.ReLU(), nn.Conv2d(20, 16, 3, stride=2))
        return (
            model.to(memory_format=torch.channels_last),
            torch.randn(batch, 3, 9, 9),
            lambda x: model(x).square().mean(),
        )

    shapes = []

    class Clock(Slow):
        def __call__(self, work, times):
            made = work()
            shapes.append(
                [tuple(each.shape) for each in (made if isinstance(made, tuple) else (made,)) if each is not None]
            )
            return 0.001

    on_device(make, Clock(), precision="fp32", to=8)
    seen = [each for shape in shapes for each in shape]
    assert (2, 24, 9, 9) in seen  # the first's outputs, padded
    assert (16, 24, 3, 3) in seen  # the gradient of the second's weight, padded
    assert (2, 20, 9, 9) in seen


@pytest.mark.gpu
def test_on_a_gpu_costs_are_measured():
    result = align(subjects.odd_mlp, device="cuda")
    assert result.basis.startswith("measured here, on ")
    assert result.products.step_ms > 0
    assert {layer.name for layer in result.off} == {"0", "2"}
    assert all(layer.saved_ms is not None for layer in result.off)
    assert align(subjects.aligned, device="cuda").off == ()


def test_rows_of_a_linear_layer_may_be_anything_however_its_gradients_lie():
    def make(batch=4):
        model = torch.nn.Linear(64, 8)
        return model, torch.randn(batch, 64), lambda x: model(x).mean()

    for rows in (4, 7):
        found = align(make, device="cpu", batch=rows)
        assert found.off == ()
        assert found.remarks == ()
    (layer,) = align(make, device="cpu", batch=7, precision="fp8").off
    assert "rows" in {each.role for each in layer.off}


def test_a_loss_without_a_graph_is_reported():
    def make():
        model = torch.nn.Linear(64, 8)
        return model, torch.randn(4, 64), lambda x: model(x).detach().mean()

    found = align(make, device="cpu")
    assert found.remarks == ("Only the forward pass was checked: the loss has no graph for a backward pass.",)
