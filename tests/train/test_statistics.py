"""A skipped step leaves no trace in running statistics; any other step leaves what the layers made of it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ampwise.errors import BadInput
from ampwise.train import buffer_snapshot as conditional
from ampwise.train.buffer_snapshot import BufferSnapshot, ConditionalCopy

from ..for_each import for_each
from ..night import NIGHTLY

YES, NO = torch.tensor(1.0), torch.tensor(0.0)

LAYERS = {
    "1d": lambda: nn.BatchNorm1d(3),
    "2d": lambda: nn.BatchNorm2d(5, affine=False),
    "3d": lambda: nn.BatchNorm3d(1),
    "cumulative": lambda: nn.BatchNorm1d(4, momentum=None),
    "sync": lambda: nn.SyncBatchNorm(3),
    "instance": lambda: nn.InstanceNorm2d(3, track_running_stats=True),
    "double": lambda: nn.BatchNorm1d(3).double(),
    "half": lambda: nn.BatchNorm1d(3).half(),
}


def buffers_of(model):
    return [buffer for buffer in model.buffers() if buffer is not None]


def bits(tensors):
    """Comparable, NaN and the sign of zero too."""
    return [(each.dtype, each.detach().cpu().contiguous().reshape(-1).view(torch.int8).tolist()) for each in tensors]


def spoil_(model, seed=0):
    """Put something else into every buffer, infinities and NaN among it."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers_of(model):
        if buffer.is_floating_point():
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
            buffer.view(-1)[:2] = torch.tensor([math.nan, -math.inf])[: buffer.numel()].to(buffer)
        else:
            buffer.add_(2**40 + 1)


def small_model():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4, momentum=None))


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_skipped_step_is_undone_and_another_is_not(make):
    model = nn.Sequential(make(), nn.Sequential(make()))
    kept = BufferSnapshot([model])
    assert len(kept) == 2
    kept.remember()
    before = bits(buffers_of(model))
    spoil_(model)
    spoiled = bits(buffers_of(model))
    assert all(one != other for one, other in zip(before, spoiled, strict=True))
    kept.end_window(NO)
    assert bits(buffers_of(model)) == spoiled
    kept.end_window(YES)
    assert bits(buffers_of(model)) == before
    spoil_(model, seed=1)
    kept.restore()
    assert bits(buffers_of(model)) == before


@given(
    st.lists(
        st.tuples(st.integers(0, 70), st.sampled_from([torch.float32, torch.float64, torch.bfloat16])), max_size=5
    ),
    st.lists(st.booleans(), min_size=1, max_size=6),
)
def test_after_any_number_of_steps_only_those_taken_have_left_a_trace(kinds, skips):
    model = nn.Sequential(*[nn.BatchNorm1d(size, dtype=dtype) for size, dtype in kinds])
    kept = BufferSnapshot([model])
    expected = bits(buffers_of(model))
    for step, skipped in enumerate(skips):
        kept.remember()
        spoil_(model, seed=step)
        if not skipped:
            expected = bits(buffers_of(model))
        kept.end_window(torch.tensor(float(skipped)))
        assert bits(buffers_of(model)) == expected


def test_an_overflow_in_the_forward_pass_does_not_stay():
    model = small_model()
    kept = BufferSnapshot([model])
    model(torch.randn(8, 3))
    right = bits(buffers_of(model))
    kept.remember()
    model(torch.full((8, 3), math.inf))
    assert model[1].running_var.isnan().all()
    kept.end_window(YES)
    assert bits(buffers_of(model)) == right
    assert model[3].num_batches_tracked.item() == 1


def test_layers_in_eval_mode_are_left_alone():
    model = small_model()
    model[1].eval()
    kept = BufferSnapshot([model])
    kept.remember()
    before = bits(model[3].buffers())
    spoil_(model)
    spoiled = bits(model[1].buffers())
    kept.end_window(YES)
    assert bits(model[1].buffers()) == spoiled
    assert bits(model[3].buffers()) == before


def test_what_was_remembered_in_training_mode_is_forgotten_in_eval_mode():
    model = small_model()
    kept = BufferSnapshot([model])
    kept.remember()
    model.eval()
    kept.remember()
    spoil_(model)
    spoiled = bits(buffers_of(model))
    kept.restore()
    assert bits(buffers_of(model)) == spoiled
    assert kept.state() is None


def test_layers_that_stop_tracking_are_left_alone():
    model = nn.BatchNorm1d(3)
    kept = BufferSnapshot([model])
    model.track_running_stats = False
    kept.remember()
    spoil_(model)
    spoiled = bits(model.buffers())
    kept.restore()
    assert bits(model.buffers()) == spoiled


@for_each(
    "model",
    [
        nn.Linear(2, 2),
        nn.LayerNorm(3),
        nn.GroupNorm(1, 3),
        nn.InstanceNorm1d(3),
        nn.BatchNorm1d(3, track_running_stats=False),
    ],
)
def test_without_running_statistics_there_is_nothing_to_keep(model):
    kept = BufferSnapshot([model])
    assert not kept
    kept.remember()
    kept.end_window(YES)
    kept.restore()
    assert kept.state() is None


def test_before_anything_is_remembered_nothing_is_put_back():
    model = small_model()
    kept = BufferSnapshot([model])
    spoil_(model)
    spoiled = bits(buffers_of(model))
    kept.end_window(YES)
    assert bits(buffers_of(model)) == spoiled


def test_layers_of_several_models_are_found_once_each():
    norm, model = nn.BatchNorm1d(3), small_model()
    kept = BufferSnapshot([nn.Sequential(norm, model), model, norm])
    assert len(kept) == 3
    assert bool(kept)


def test_copies_are_allocated_once_and_anew_when_the_buffers_change():
    model = small_model()
    kept = BufferSnapshot([model])
    kept.remember()
    first = [each.copy for each in kept._kept]
    kept.remember()
    assert all(each.copy is copy for each, copy in zip(kept._kept, first, strict=True))
    model.double()
    kept.remember()
    changed = [each.copy is not copy for each, copy in zip(kept._kept, first, strict=True)]
    assert changed == [True, True, False] * 2  # the counts are int64 still
    before = bits(buffers_of(model))
    spoil_(model)
    kept.end_window(YES)
    assert bits(buffers_of(model)) == before


def test_buffers_replaced_between_are_given_what_was_remembered():
    model = small_model()
    kept = BufferSnapshot([model])
    model(torch.randn(8, 3))
    kept.remember()
    before = [buffer.double() for buffer in model.buffers()]
    spoil_(model)
    model.double()
    kept.end_window(YES)
    assert model[1].running_mean.dtype == torch.float64
    assert all(torch.equal(now.double(), was) for now, was in zip(model.buffers(), before, strict=True))


def test_memory_put_under_a_buffer_between_is_given_what_was_remembered():
    model = nn.BatchNorm1d(3)
    kept = BufferSnapshot([model])
    kept.remember()
    before = bits(model.buffers())
    model.running_mean.data = torch.full((3,), 5.0)
    kept.end_window(YES)
    assert bits(model.buffers()) == before


def test_a_layer_that_has_changed_its_size_is_not_restored():
    model = nn.BatchNorm1d(1)
    kept = BufferSnapshot([model])
    kept.remember()
    model.running_mean = torch.zeros(4)
    with pytest.raises(
        BadInput, match=r"running_mean of a BatchNorm1d changed its shape within a step, from \(1,\) to \(4,\)"
    ):
        kept.restore()


def test_a_lazy_layer_goes_back_to_what_it_was_made_as():
    model = nn.Sequential(nn.LazyBatchNorm1d())
    kept = BufferSnapshot([model])
    assert len(kept) == 1
    kept.remember()
    kept.end_window(YES)  # nothing there yet
    model(torch.full((8, 3), math.inf))
    assert len(kept.state()["norms"][0]) == 3
    kept.end_window(YES)
    assert bits(model.buffers()) == bits(nn.BatchNorm1d(3).buffers())
    model(torch.randn(8, 3))
    kept.remember()
    before = bits(model.buffers())
    spoil_(model)
    kept.end_window(YES)
    assert bits(model.buffers()) == before


def test_buffers_that_are_not_contiguous_are_kept_too():
    model = nn.BatchNorm1d(3)
    model.running_mean = torch.arange(6.0)[::2]
    kept = BufferSnapshot([model])
    kept.remember()
    before = bits(model.buffers())
    spoil_(model)
    kept.end_window(YES)
    assert bits(model.buffers()) == before


def test_a_graph_that_is_still_to_run_backward_is_not_disturbed():
    model = small_model()
    kept = BufferSnapshot([model])
    kept.remember()
    loss = model(torch.randn(8, 3)).square().sum()
    kept.end_window(YES)
    loss.backward()
    assert model[0].weight.grad.isfinite().all()


def test_copies_made_in_inference_mode_serve_outside_of_it():
    model = small_model()
    kept = BufferSnapshot([model])
    with torch.inference_mode():
        kept.remember()
    kept.remember()
    before = bits(buffers_of(model))
    spoil_(model)
    kept.end_window(YES)
    assert bits(buffers_of(model)) == before


def test_a_checkpoint_in_the_middle_of_a_window_takes_it_along():
    model = small_model()
    model[1].eval()
    model(torch.randn(8, 3))
    kept = BufferSnapshot([model])
    kept.remember()
    before = bits(model[3].buffers())
    spoil_(model)
    state = kept.state()
    assert [tuple(tensor.shape) for tensor in state["norms"]] == [(0,), (0,), (0,), (4,), (4,), ()]
    spoiled = bits(model[1].buffers())
    kept.remember()  # of no concern to what was saved
    other = small_model()
    other.load_state_dict(model.state_dict())
    resumed = BufferSnapshot([other])
    resumed.remember()  # which loading replaces
    resumed.load(state)
    state["norms"][3].fill_(7.0)
    resumed.end_window(YES)
    assert bits(other[3].buffers()) == before
    assert bits(other[1].buffers()) == spoiled


@pytest.mark.parametrize("forget", [BufferSnapshot.forget, lambda kept: kept.load(None)])
def test_what_is_forgotten_is_not_put_back(forget):
    model = small_model()
    kept = BufferSnapshot([model])
    assert kept.state() is None
    kept.remember()
    forget(kept)
    assert kept.state() is None
    spoil_(model)
    spoiled = bits(model.buffers())
    kept.end_window(YES)
    assert bits(model.buffers()) == spoiled
    kept.remember()
    model(torch.randn(8, 3))
    kept.end_window(YES)
    assert bits(model.buffers()) == spoiled


@for_each(
    ("change", "message"),
    [
        (lambda norms: norms[1:], "statistics of 6 buffers, got 5"),
        (
            lambda norms: [torch.zeros(5), *norms[1:]],
            r"running_mean of shape \(5,\) .* BatchNorm1d of shape \(4,",
        ),
        (lambda norms: [None, *norms[1:]], "expected a tensor, got NoneType"),
    ],
)
def test_what_belongs_to_another_model_is_refused_and_nothing_changes(change, message):
    model = small_model()
    kept = BufferSnapshot([model])
    kept.remember()
    before, state = bits(model.buffers()), kept.state()
    with pytest.raises(BadInput, match=message):
        kept.load({**state, "norms": change(state["norms"])})
    spoil_(model)
    kept.restore()
    assert bits(model.buffers()) == before


def test_nothing_can_be_loaded_for_a_lazy_layer_that_has_no_shape_yet():
    model = nn.BatchNorm1d(3)
    kept = BufferSnapshot([model])
    kept.remember()
    with pytest.raises(BadInput, match=r"of shape none yet. Load the model's own state first"):
        BufferSnapshot([nn.LazyBatchNorm1d()]).load(kept.state())


# The kernel, against torch.where, which defines it.

SIZES = (1, 2, 3, 7, 33, 64, 255, 1024, 1025, 5000, 300_001)
KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.complex128)


def any_bits(size, dtype, device="cpu", shift=0):
    """A tensor of random bytes, NaNs of every kind among them, that starts ``shift`` elements into its memory."""
    width = dtype.itemsize
    return torch.randint(-128, 128, ((size + shift) * width,), dtype=torch.int8).to(device).view(dtype)[shift:]


def pairs_of(sizes, device="cpu"):
    return [
        (any_bits(size, dtype, device, shift), any_bits(size, dtype, device))
        for size in sizes
        for dtype in KINDS
        for shift in (0, 1)
    ]


def by_torch(pairs, flag):
    copies = ConditionalCopy()
    copies._others = pairs
    copies.copy_if_(flag)


def by_kernel(pairs, flag):
    from ampwise.train.copy_if_kernel import launch_copy_if_

    rows = [(source.data_ptr(), target.data_ptr(), source.nbytes) for target, source in pairs]
    launch_copy_if_(tuple(cell for row in rows for cell in row), flag)


def check_copies(copy_if_, pairs, device="cpu"):
    sources, targets = bits(source for _, source in pairs), bits(target for target, _ in pairs)
    copy_if_(pairs, torch.tensor([7.0, 0.0], device=device)[1])
    assert bits(target for target, _ in pairs) == targets
    copy_if_(pairs, torch.tensor([7.0, 1.0], device=device)[1])
    assert bits(target for target, _ in pairs) == sources
    assert bits(source for _, source in pairs) == sources


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel is compiled, not interpreted")
def test_the_kernel_copies_every_bit_or_none():
    pytest.importorskip("triton")
    torch.manual_seed(0)
    check_copies(by_torch, pairs_of((0, 3)))
    check_copies(by_kernel, pairs_of((0, 1, 3, 1030, 5000) if NIGHTLY else (0, 3, 1030)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel is compiled, not interpreted")
def test_the_kernel_writes_nothing_beyond_the_end():
    pytest.importorskip("triton")
    for dtype in KINDS:
        memory = torch.zeros(20, dtype=dtype)
        by_kernel([(memory[4:9], torch.ones(5, dtype=dtype))], YES)
        assert memory.tolist() == [0] * 4 + [1] * 5 + [0] * 11


@pytest.mark.gpu
def test_the_compiled_kernel_copies_every_bit_or_none():
    torch.manual_seed(0)
    check_copies(by_kernel, pairs_of(SIZES, "cuda"), "cuda")
    for dtype in KINDS:
        memory = torch.zeros(20, dtype=dtype, device="cuda")
        by_kernel([(memory[4:9], torch.ones(5, dtype=dtype, device="cuda"))], YES.cuda())
        assert memory.tolist() == [0] * 4 + [1] * 5 + [0] * 11


def many_layers():
    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    return nn.Sequential(*[nn.BatchNorm1d(1 + 7 * n, dtype=kinds[n % 4], device="cuda") for n in range(200)])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("kernels", [True, False])
def test_on_a_gpu_nothing_waits(kernels, monkeypatch):
    monkeypatch.setattr(conditional, "has_kernels", lambda: kernels)
    model = many_layers()
    model[3].running_var = torch.ones(100, device="cuda", dtype=torch.float64)[:44:2]  # for torch.where
    kept, yes, no = BufferSnapshot([model]), YES.cuda(), NO.cuda()
    before = bits(model.buffers())
    try:
        torch.cuda.set_sync_debug_mode("error")
        kept.remember()
        for buffer in model.buffers():
            buffer.mul_(5).add_(3)
        kept.end_window(no)
        untouched = [buffer.clone() for buffer in model.buffers()]
        kept.end_window(yes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bits(model.buffers()) == before
    assert bits(untouched) != before


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_on_a_gpu_all_layers_are_restored_in_one_launch():
    kept, yes = BufferSnapshot([many_layers()]), YES.cuda()
    kept.remember()
    kept.end_window(yes)  # compiled, and the table uploaded
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        kept.end_window(yes)
        torch.cuda.synchronize()
    ran = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert [name for name in ran if "ynchronize" not in name] == ["copy_if_kernel"]


@pytest.mark.gpu
def test_on_a_gpu_a_skipped_step_can_be_captured():
    model = small_model().cuda()
    model[3].momentum = 0.1  # None asks for the count, which waits
    kept, flag, data = BufferSnapshot([model]), torch.zeros((), device="cuda"), torch.randn(8, 3, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        kept.remember()
        model(data)
        kept.end_window(flag)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept.remember()
        model(data)
        kept.end_window(flag)
    before = bits(model.buffers())
    flag.fill_(1.0)
    graph.replay()
    assert bits(model.buffers()) == before
    flag.fill_(0.0)
    graph.replay()
    assert model[1].num_batches_tracked.item() == 2


@pytest.mark.gpu
def test_a_flag_and_statistics_may_be_on_different_devices():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, device="cuda"))
    kept = BufferSnapshot([model])
    before = bits(model.buffers())
    for flag in (YES, YES.cuda()):
        kept.remember()
        for buffer in model.buffers():
            buffer.add_(3)
        kept.end_window(flag - 1)
        assert bits(model.buffers()) != before
        kept.end_window(flag)
        assert bits(model.buffers()) == before
    kept.remember()
    model.cuda()
    kept.end_window(YES.cuda())
    assert bits(model.buffers()) == before
