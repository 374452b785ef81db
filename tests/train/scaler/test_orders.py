"""Orders and company that once went wrong: each is a bug that a review found."""

import gc
import math
import weakref

import pytest
import torch

import ampwise

from ...for_each import for_each

SCALE = 65536.0


def weight(value=2.0, gradient=None):
    parameter = torch.nn.Parameter(torch.tensor([float(value), 1.0]))
    if gradient is not None:
        parameter.grad = torch.tensor(gradient)
    return parameter


def backward(scaler, *parameters):
    """Gradients of 2 and 2 in true units, for each."""
    scaler.scale(sum((2 * parameter).sum() for parameter in parameters)).backward()


class Stumbling(torch.optim.SGD):
    """Fails at its first step."""

    stumbled = False

    def step(self, closure=None):
        if not self.stumbled:
            self.stumbled = True
            raise KeyError("stumbled")
        return super().step(closure)


@for_each("clip", [None, 1.0, "joint"])
@for_each("enabled", [True, False])
def test_a_step_that_failed_can_be_taken_again(clip, enabled):
    scaler, parameter, other = ampwise.GradScaler("cpu", enabled=enabled), weight(), weight()
    optimizer, second = Stumbling([parameter], lr=1.0, foreach=False), torch.optim.SGD([other], lr=1.0)
    backward(scaler, parameter, other)
    if clip == "joint":
        scaler.clip_([optimizer, second], 1.0)
    elif clip:
        scaler.clip_(optimizer, clip)
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    scaler.step(optimizer)
    scaler.update()
    norm = {None: math.sqrt(8), 1.0: 1.0, "joint": math.sqrt(0.5)}[clip]
    assert parameter.grad.norm().item() == pytest.approx(norm, rel=1e-5)


class Handed(torch.optim.SGD):
    """Of the older contract: it is given the scaler, and reads no flags."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        return super().step(closure)


def test_an_optimizer_of_the_older_contract_is_guarded_too():
    parameter = weight(gradient=[math.nan, 1.0])
    optimizer, scaler = Handed([parameter], lr=1.0, foreach=False), ampwise.GradScaler("cpu", enabled=False)
    scaler.step(optimizer)
    assert scaler.skipped
    assert parameter.tolist() == [2.0, 1.0]
    parameter.grad = torch.tensor([3.0, 4.0])
    scaler.clip_(optimizer, 1.0)
    scaler.step(optimizer)
    assert parameter.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_a_state_loaded_between_unscale_and_step_does_not_unscale_again():
    scaler, parameter = ampwise.GradScaler("cpu"), weight()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    state = scaler.state_dict()
    backward(scaler, parameter)
    scaler.unscale_(optimizer)
    scaler.load_state_dict(state)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.grad.tolist() == [2.0, 2.0]


@for_each("fused", [True, False])
@for_each("when", ["before the step", "after it"])
def test_a_flag_that_somebody_else_sets_is_heeded(fused, when):
    scaler, parameter = ampwise.GradScaler("cpu"), weight()
    optimizer = torch.optim.AdamW([parameter], fused=fused)
    backward(scaler, parameter)
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    if when == "after it":
        scaler.step(optimizer)
    state["found_inf_per_device"] = {torch.device("cpu"): torch.full((), 2.0)}
    if when == "before the step":
        scaler.step(optimizer)
        assert parameter.tolist() == [2.0, 1.0]
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __eq__(self, other):
        return False

    __hash__ = None


@pytest.mark.parametrize("enabled", [True, False])
def test_optimizers_that_cannot_be_hashed_or_referred_to_weakly(enabled):
    scaler, parameter = ampwise.GradScaler("cpu", enabled=enabled), weight()
    optimizer = Slotted(torch.optim.SGD([parameter], lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        backward(scaler, parameter)
        scaler.step(optimizer)
        scaler.update()
    assert parameter.tolist() == [-2.0, -3.0]
    assert not scaler.skipped_for(optimizer)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("way", ["step", "unscale_", "clip_"])
def test_gradients_that_are_part_of_a_graph_stay_as_they_were_in_it(way):
    scaler, parameter = ampwise.GradScaler("cpu"), weight()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale((parameter**3).sum()).backward(create_graph=True)
    before = parameter.grad.grad_fn
    if way == "clip_":
        scaler.clip_(optimizer, 1.0)
    if way == "unscale_":
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert type(parameter.grad.grad_fn) is type(before)
    parameter.grad = None  # or the two hold each other


def test_an_empty_group_is_no_obstacle():
    parameter = weight(gradient=[1.0, 1.0])
    optimizer = torch.optim.SGD([{"params": []}, {"params": [parameter]}], lr=1.0)
    scaler = ampwise.GradScaler("cpu", enabled=False)
    scaler.clip_(optimizer, 1.0)
    scaler.step(optimizer)
    assert scaler.applied_steps == 1


def test_what_was_known_of_one_step_is_not_reported_of_the_next():
    parameter = weight(gradient=[math.nan, 1.0])
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), ampwise.GradScaler("cpu", enabled=False)
    scaler.step(optimizer)
    assert scaler.skipped
    parameter.grad = torch.ones(2)
    scaler.step(optimizer, lambda: torch.zeros(()))
    assert (scaler.skipped, scaler.skipped_for(optimizer), scaler.applied_steps) == (False, False, 1)


def test_clipping_that_no_step_followed_is_forgotten_with_its_gradients():
    parameter = weight(gradient=[3.0, 4.0])
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), ampwise.GradScaler("cpu", enabled=False)
    scaler.clip_(optimizer, 1.0)
    held = weakref.ref(parameter.grad)
    scaler.update()
    parameter.grad = None
    gc.collect()
    assert held() is None
    parameter.grad = torch.tensor([3.0, 4.0])
    scaler.step(optimizer)
    assert parameter.tolist() == [-1.0, -3.0]


def test_after_unscale_clipping_is_in_memory_without_a_scale_too():
    parameter = weight(gradient=[3.0, 4.0])
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), ampwise.GradScaler("cpu", enabled=False)
    scaler.unscale_(optimizer)
    scaler.clip_(optimizer, 1.0)
    assert parameter.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize(("first", "second"), [(1.0, 100.0), (100.0, 1.0)])
def test_of_two_clippings_the_lower_limit_counts(first, second):
    scaler, parameter = ampwise.GradScaler("cpu"), weight()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    backward(scaler, parameter)
    scaler.clip_(optimizer, first)
    scaler.clip_(optimizer, second)
    scaler.step(optimizer)
    assert parameter.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_an_idle_optimizer_is_no_obstacle_to_clipping_with_others():
    scaler, parameter = ampwise.GradScaler("cpu"), weight()
    busy, idle = torch.optim.SGD([parameter], lr=1.0), torch.optim.SGD([weight()], lr=1.0)
    backward(scaler, parameter)
    assert scaler.clip_([busy, idle], 1.0).item() == pytest.approx(math.sqrt(8))
    assert scaler.clip_(idle, 1.0).item() == 0.0
    scaler.unscale_(idle)
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(idle)


@pytest.mark.parametrize("value", [1e25, 1e30])
def test_large_finite_gradients_without_a_kernel_are_not_taken_for_overflow(value):
    from ampwise.train.scaler.grad_stats import NormStats

    part = NormStats([0], [torch.tensor([value, -value])], torch.tensor(2.0), False)
    squares, infinities, nans = part.totals(None).tolist()
    assert (infinities, nans) == (0, 0)
    assert math.sqrt(squares) == pytest.approx(value / math.sqrt(2), rel=1e-6)


def test_an_fp64_gradient_is_stepped_and_not_counted():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    parameter.grad = torch.full_like(parameter, 1e200)
    other = weight(gradient=[1.0, 0.0])
    optimizer, scaler = torch.optim.SGD([parameter, other], lr=1e-200), ampwise.GradScaler("cpu", enabled=False)
    scaler.step(optimizer)
    assert not scaler.skipped
    assert parameter.tolist() == pytest.approx([0.0] * 3, abs=1e-15)
    assert list(scaler.census()) == ["0.1"]


def test_gradients_edited_after_a_step_that_failed_are_not_divided_again():
    scaler, parameter = ampwise.GradScaler("cpu"), weight()
    optimizer = Stumbling([parameter], lr=1.0, foreach=False)
    backward(scaler, parameter)
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    scaler.step(optimizer)
    assert parameter.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


@for_each(
    ("clippings", "norms"),
    [
        ([("o1", 0.1), ("both", 100.0)], (0.1, math.sqrt(8))),
        ([("o1", 0.1), ("o2", 1.0), ("both", math.inf)], (0.1, 1.0)),
        ([("both", 1.0), ("o1", 100.0)], (math.sqrt(0.5), math.sqrt(0.5))),
        ([("both", 1.0), ("both", 2.0)], (math.sqrt(0.5), math.sqrt(0.5))),
        ([("twice o1", 1.0)], (1.0, math.sqrt(8))),
    ],
)
@for_each("enabled", [True, False])
def test_clippings_of_different_sets_are_done_one_after_another(clippings, norms, enabled):
    scaler, one, other = ampwise.GradScaler("cpu", enabled=enabled), weight(), weight()
    o1, o2 = torch.optim.SGD([one], lr=1.0), torch.optim.SGD([other], lr=1.0)
    sets = {"o1": o1, "o2": o2, "both": [o1, o2], "twice o1": [o1, o1]}
    backward(scaler, one, other)
    for name, max_norm in clippings:
        scaler.clip_(sets[name], max_norm)
    scaler.step(o1)
    scaler.step(o2)
    scaler.update()
    assert (one.grad.norm().item(), other.grad.norm().item()) == pytest.approx(norms, rel=1e-4)


def test_gradients_whose_changes_torch_does_not_count_are_read_again():
    parameter = weight()
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), ampwise.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with torch.inference_mode():
        parameter.grad = torch.full((2,), SCALE)
        scaler.clip_(optimizer, 1.0)
        parameter.grad.fill_(math.nan)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.skipped
    assert parameter.tolist() == [2.0, 1.0]


@pytest.mark.parametrize("fused", [True, False])
def test_a_flag_summed_over_ranks_by_somebody_else_is_still_a_flag(fused):
    scaler, parameter = ampwise.GradScaler("cpu"), weight()
    optimizer = torch.optim.AdamW([parameter], fused=fused)
    backward(scaler, parameter)
    scaler.unscale_(optimizer)
    for flag in scaler._found_inf_per_device(optimizer).values():
        flag.add_(2.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.skipped
    assert parameter.tolist() == [2.0, 1.0]
    assert scaler.get_scale() == SCALE / 2


def test_steps_are_counted_though_the_optimizer_is_gone_by_then():
    scaler = ampwise.GradScaler("cpu")
    for _ in range(3):
        parameter = weight()
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        backward(scaler, parameter)
        scaler.step(optimizer)
        del optimizer
        gc.collect()
        scaler.update()
    assert scaler.applied_steps == 3


def test_wrappers_made_for_one_step_are_not_kept():
    scaler, parameter = ampwise.GradScaler("cpu"), weight()
    inner = torch.optim.SGD([parameter], lr=1.0)
    for _ in range(5):
        inner.zero_grad()
        backward(scaler, parameter)
        scaler.step(Slotted(inner))
        scaler.update()
    assert len(list(scaler._entries)) <= 1
    assert scaler.applied_steps == 5


def test_an_iteration_closed_by_a_hook_of_the_optimizer_stays_closed():
    scaler, parameter = ampwise.GradScaler("cpu"), weight()
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    optimizer.register_step_post_hook(lambda *_: scaler.update())
    scales = []
    for bad in (True, False, False):
        optimizer.zero_grad()
        backward(scaler, parameter)
        if bad:
            parameter.grad[0] = math.inf
        scaler.step(optimizer)
        scales.append(scaler.get_scale())
    assert scales == [SCALE / 2] * 3


def test_a_parameter_taken_out_of_its_group_does_not_hide_a_collapse():
    scaler, one, other = ampwise.GradScaler("cpu", init_scale=1.0, min_scale=1.0), weight(), weight()
    optimizer = torch.optim.SGD([one, other], lr=1.0)
    backward(scaler, one, other)
    other.grad[0] = math.nan
    scaler.step(optimizer)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ampwise.ScaleCollapsed, match="parameter 1"):
        scaler.update()


def test_clipping_meant_for_gradients_that_are_gone_is_forgotten():
    parameter = weight(gradient=[3.0, 4.0])
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), ampwise.GradScaler("cpu", enabled=False)
    scaler.clip_(optimizer, 1.0)
    parameter.grad = torch.tensor([3.0, 4.0])
    scaler.step(optimizer)
    assert parameter.tolist() == [-1.0, -3.0]


def test_names_that_begin_with_a_digit_are_names():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in model]
    scaler = ampwise.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert list(scaler.census(model)) == ["0.weight", "1.weight"]
    assert list(scaler.census()) == ["0:0.0", "1:0.0"]
