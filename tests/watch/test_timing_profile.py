"""Profiles written by hand, with kernels as a GPU leaves them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.watch.profile import KINDS, OURS, DeviceKernel, HostOp, OperatorCall, Profile, matmul_of, read

HALF, FULL = "c10::Half", "float"


def call(name, *shapes, formats=FULL, strides=(), values=None):
    formats = [formats] * len(shapes) if isinstance(formats, str) else formats
    return OperatorCall(
        name=name, shapes=shapes, strides=strides or [rows(shape) for shape in shapes], formats=formats, values=values
    )


def rows(shape):
    """Strides of a tensor stored row by row."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return strides


class Recorded:
    """A host's calls, one within the other, with the kernels they launch."""

    def __init__(self):
        self.ops, self.kernels, self.now = [], [], 0

    def run(self, what, *within, kernel=0, kernel_name="kernel", thread=0):
        what = call(what) if isinstance(what, str) else what
        number, start = len(self.ops) + 1, self.now
        self.ops.append(None)
        self.now += 10
        if kernel:
            self.kernels.append(DeviceKernel(name=kernel_name, duration=kernel, launched_by=number))
        for inner in within:
            inner()
        self.now += 10
        self.ops[number - 1] = HostOp(call=what, start=start, end=self.now, thread=thread, id=number)

    def read(self):
        return read(self.ops, self.kernels)


@pytest.fixture
def recorded():
    return Recorded()


CAST = call("aten::copy_", (8, 8), (8, 8), formats=[HALF, FULL])
COPY = call("aten::copy_", (8, 8), (8, 8))
MM = call("aten::mm", (8, 16), (16, 8), formats=HALF)
MM_FULL = call("aten::mm", (8, 16), (16, 8))


def test_kernels_belong_to_the_kind_of_the_call_that_launched_them(recorded):
    run = recorded.run
    run("aten::linear", lambda: run("aten::to", lambda: run(CAST, kernel=1000)), lambda: run(MM, kernel=2000))
    run("aten::layer_norm", lambda: run("aten::native_layer_norm", kernel=4000))
    run("aten::gelu_backward", kernel=8000)
    run("Optimizer.step#AdamW.step", lambda: run("aten::_foreach_add_", kernel=16000), lambda: run(CAST, kernel=32000))
    run(COPY, kernel=64000)
    nanoseconds = {kind: round(seconds * 1e9) for kind, seconds in recorded.read().seconds.items()}
    assert nanoseconds == {
        "casts": 1000,
        "matrix": 2000,
        "normalisation": 4000,
        "elementwise": 8000,
        "optimizer": 48000,
        "other": 64000,
    }


def test_without_kernels_the_hosts_time_counts_each_moment_once(recorded):
    run = recorded.run
    run("aten::linear", lambda: run(MM), lambda: run(CAST))
    run("aten::relu")
    seconds = recorded.read().seconds
    assert sum(seconds.values()) == pytest.approx(recorded.now / 1e9)
    assert seconds == pytest.approx({"matrix": 20e-9, "casts": 20e-9, "elementwise": 20e-9, "other": 20e-9})


def test_autocasts_turn_within_an_operator_decides_its_precision(recorded):
    recorded.run(MM_FULL, lambda: recorded.run("aten::to", lambda: recorded.run(CAST)), lambda: recorded.run(MM))
    (only,) = recorded.read().products
    assert (only.precision, only.count, only.flops) == ("fp16", 1, 2 * 8 * 16 * 8)


def test_a_product_within_a_convolution_is_a_part_of_it(recorded):
    values = [None, None, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    convolution = call("aten::convolution", (2, 8, 5, 5), (16, 8, 3, 3), (16,), formats=HALF, values=values)
    recorded.run(convolution, lambda: recorded.run(MM))
    (only,) = recorded.read().products
    assert (only.op, only.flops) == ("convolution", 2 * 2 * 9 * 16 * 8 * 9)


def test_calls_of_other_threads_are_not_within(recorded):
    recorded.run(MM_FULL, lambda: recorded.run(MM, thread=1))
    assert {product.precision for product in recorded.read().products} == {"fp16", "fp32"}


def test_our_own_work_counts_nowhere(recorded):
    recorded.run(OURS, lambda: recorded.run(MM, kernel=1000), lambda: recorded.run("aten::_cudnn_rnn"))
    assert recorded.read() == Profile()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_poi_fused__to_copy_3", "casts"),
        ("triton_poi_fused__to_copy_add_mul_3", "elementwise"),
        ("triton_per_fused_native_layer_norm_0", "normalisation"),
        ("triton_tem_fused_mm_7", "matrix"),
        ("Memcpy HtoD (Pinned -> Device)", "other"),
        ("triton_is_a_sea_snail", "other"),
    ],
)
def test_kernels_of_torch_compile_go_by_their_names(recorded, name, kind):
    recorded.run("Torch-Compiled Region: 0/0", kernel=1000, kernel_name=name)
    assert recorded.read().seconds == {kind: 1e-6}


def test_what_cannot_be_counted_is_said(recorded):
    recorded.run(call("aten::mm", (8,), (8,)))
    recorded.run("aten::_cudnn_rnn", kernel=1)
    recorded.run("aten::x", kernel=1, kernel_name="triton_tem_fused_mm_1")
    assert recorded.read().unknown == (
        "the FLOPs of aten::mm: its inputs are not plain matrices",
        "matmuls inside aten::_cudnn_rnn: torch profiles it as one operator",
        "the FLOPs of matmuls that torch.compile wrote as Triton kernels",
    )


def test_a_replayed_graph_is_recognised():
    kernels = [DeviceKernel(name="sm90_xmma_gemm", duration=5)]
    assert read([], kernels).unknown == (
        "matmuls: the device ran kernels and no operator was called (a replayed CUDA graph)",
    )


def test_without_strides_the_rows_of_the_result_tell():
    bare = [
        OperatorCall(name="aten::mm", shapes=[(8, 16), (16, n)], strides=None, formats=[HALF, HALF]) for n in (24, 25)
    ]
    assert [matmul_of(each).aligned for each in bare] == [True, False]


@pytest.mark.parametrize(
    ("shapes", "strides", "format", "aligned"),
    [
        (((7, 16), (16, 8)), ((16, 1), (8, 1)), HALF, True),  # an odd number of rows
        (((8, 16), (16, 8)), ((16, 1), (1, 16)), HALF, True),  # a weight, transposed
        (((8, 17), (17, 8)), ((17, 1), (1, 17)), HALF, False),
        (((8, 17), (17, 8)), ((24, 1), (8, 1)), HALF, True),  # rows padded to 24
        (((8, 16), (16, 9)), ((16, 1), (1, 16)), HALF, False),  # what comes out has odd rows
        (((8, 12), (12, 8)), ((12, 1), (8, 1)), HALF, False),
        (((8, 12), (12, 8)), ((12, 1), (8, 1)), FULL, True),  # 48 bytes
        (((8, 8), (8, 8)), ((8, 1), (8, 1)), "c10::Float8_e4m3fn", False),  # 8 bytes
        (((1, 17), (17, 8)), ((17, 1), (8, 1)), HALF, True),  # a single row
    ],
)
def test_rows_begin_at_whole_words_or_do_not(shapes, strides, format, aligned):
    assert matmul_of(call("aten::mm", *shapes, strides=strides, formats=format)).aligned is aligned


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_a_batch_of_products_is_as_much_work_as_the_products(batch, first, inner, last):
    one = matmul_of(call("aten::mm", (first, inner), (inner, last))).flops
    assert matmul_of(call("aten::bmm", (batch, first, inner), (batch, inner, last))).flops == batch * one
    assert matmul_of(call("aten::addmm", (last,), (first, inner), (inner, last))).flops == one


kinds = st.dictionaries(st.sampled_from(KINDS), st.integers(1, 2**20).map(float))
products = st.lists(st.sampled_from([matmul_of(MM), matmul_of(MM_FULL)]), max_size=4).map(tuple)
profiles = st.builds(Profile, products=products, seconds=kinds, unknown=st.just(("x",)))


@given(profiles, profiles, profiles)
def test_profiles_add_up_in_any_order(one, two, three):
    left, right = one + two + three, one + (three + two)
    assert left.seconds == right.seconds
    assert {(p.precision, p.count, p.flops) for p in left.products} == {
        (p.precision, p.count, p.flops) for p in right.products
    }
    assert sum(p.flops for p in left.products) == sum(p.flops for each in (one, two, three) for p in each.products)
    assert left.unknown == ("x",)
