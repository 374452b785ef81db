"""One training step with a scaler, no trainer around it: ours and torch's."""
# ampwise: noqa: AMP101 - clipping too early is one of the cases

import math
import sys
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from .registry import Case, Outcome

SCALE = 1024.0


def scaler_of(contender, **options):
    if contender.endswith("ampwise"):
        from ampwise import GradScaler
    else:
        from torch.amp import GradScaler
    return GradScaler("cpu", **{"init_scale": SCALE, **options})


def parameter_of(*values):
    return torch.nn.Parameter(torch.tensor(values or (1.0, 1.0, 1.0, 1.0)))


def backward(scaler, parameter, slope):
    """The gradient of every element becomes ``slope``, a number or one for each, times the scale."""
    parameter.grad = None
    scaler.scale((parameter * torch.as_tensor(slope)).sum()).backward()


def step(scaler, optimizer, parameter, slope):
    backward(scaler, parameter, slope)
    scaler.step(optimizer)
    scaler.update()


def shown(tensor):
    """The values of a tensor in a sentence; one value if they are all alike."""
    values = [f"{value:g}" for value in tensor.detach().flatten().tolist()]
    return values[0] if len(set(values)) == 1 else ", ".join(values)


def is_same(tensor, *values):
    return torch.allclose(tensor.detach(), torch.tensor(values), rtol=1e-5, atol=0)


def weights_kept(parameter, before):
    if torch.equal(parameter.detach(), before):
        return Outcome(True, "the step is skipped, the weights stay as they were")
    return Outcome(False, f"the step is applied: weights become {shown(parameter)}")


WHICH_SKIPPED = Case(
    "which-step-was-skipped",
    title="Ask which optimizer's step was skipped",
    why="Schedulers, averaged weights and logs must follow the steps that were really taken; with two optimizers, "
    "a falling scale does not say whose step was lost.",
)


@WHICH_SKIPPED.by("ampwise", "torch")
def which_skipped(contender):
    told = [readings_after_overflow(contender, of=index) for index in range(2)]
    if told[0] == told[1]:
        return Outcome(False, "everything public reads the same, whichever of the two was skipped")
    right = all(readings["skipped_for"] == [index == 0, index == 1] for index, readings in enumerate(told))
    return Outcome(right, f"`skipped_for(optimizer)` is {'True for that one only' if right else 'wrong'}")


def readings_after_overflow(contender, of):
    """All that a scaler says after one of two optimizers overflowed."""
    scaler, pair = scaler_of(contender), [parameter_of(), parameter_of()]
    optimizers = [torch.optim.AdamW([parameter], fused=True) for parameter in pair]
    for index, parameter in enumerate(pair):
        backward(scaler, parameter, math.inf if index == of else 1.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    readings = {"state": scaler.state_dict(), "scale": scaler.get_scale(), "enabled": scaler.is_enabled()}
    public = {name: value for name in dir(scaler) if name[0] != "_" for value in [getattr(scaler, name)]}
    # `skipped` is of the last step() alone, which is another question.
    readings |= {name: value for name, value in public.items() if not callable(value) and name != "skipped"}
    if "skipped_for" in public:
        readings["skipped_for"] = [scaler.skipped_for(optimizer) for optimizer in optimizers]
    return readings


CLIP_IN_ONE_CALL = Case(
    "clip-without-unscale",
    title="Clip, with no call of `unscale_` before",
    why="Gradients in memory are multiplied by the loss scale, and clipping that does not know it clips far too "
    "hard. torch's documentation asks for `unscale_` first; without it there is no error, and training is very "
    "slow. ampwise has one call for both.",
)


@CLIP_IN_ONE_CALL.by("ampwise", "torch")
def clip_without_unscale(contender):
    parameter, scaler = parameter_of(1.0, 1.0), scaler_of(contender)
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    backward(scaler, parameter, (3.0, 4.0))
    if contender == "ampwise":
        scaler.clip_(optimizer, max_norm=1.0)
    else:
        clip_grad_norm_([parameter], max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
    length = (1.0 - parameter.detach()).norm().item()
    right = math.isclose(length, 1.0, rel_tol=1e-5)
    return Outcome(right, f"a gradient of norm 5 clipped to 1 at scale {SCALE:g} moves the weights by {length:.2g}")


HUGE_GRADIENTS = Case(
    "clip-huge-gradients",
    title="Clip gradients of 1e25",
    why="They are finite, but their squares are not in FP32: a norm summed in FP32 is infinite, and clipping by it "
    "makes every gradient zero.",
)


@HUGE_GRADIENTS.by("ampwise", "torch")
def huge_gradients(contender):
    parameter, scaler = parameter_of(1.0, 1.0), scaler_of(contender)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    backward(scaler, parameter, (3e25, 4e25))
    if contender == "ampwise":
        norm = scaler.clip_(optimizer, max_norm=1.0)
    else:
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_([parameter], max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
    length = (1.0 - parameter.detach()).norm().item()
    right = math.isclose(length, 1.0, rel_tol=1e-5)
    return Outcome(right, f"norm {norm.item():.2g}, and clipped to 1 the weights move by {length:.2g}")


TWO_DEVICES = Case(
    "overflow-on-two-devices",
    title="Fused AdamW, overflow on two devices",
    why="The fused kernels skip only where the flag is exactly 1; flags of two devices added up are 2, and the bad "
    "step is applied. (The second device is simulated here: its flag is added to the first one's.)",
)


@TWO_DEVICES.by("ampwise", "torch")
def two_devices(contender):
    parameter, scaler = parameter_of(), scaler_of(contender)
    before = parameter.detach().clone()
    optimizer = torch.optim.AdamW([parameter], fused=True)
    backward(scaler, parameter, math.inf)
    scaler.unscale_(optimizer)
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    flags[torch.device("cpu", 0)] = next(iter(flags.values())).clone()
    scaler.step(optimizer)
    scaler.update()
    return weights_kept(parameter, before)


FLAG_SHAPE = Case(
    "fused-adamw-over-a-process-group",
    title="Fused AdamW, skips agreed over a process group",
    why="Ranks must skip together. torch's scaler for that (`ShardedGradScaler`) passes its flag in a shape that fused "
    "AdamW refuses, even for a good step (pytorch#140514).",
)


@FLAG_SHAPE.by("ampwise", "torch")
def flag_shape(contender):
    with group_of_one() as group:
        if contender == "ampwise":
            scaler = scaler_of(contender, process_group=group)
        else:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            scaler = ShardedGradScaler("cpu", init_scale=SCALE, process_group=group)
        parameter = parameter_of()
        optimizer = torch.optim.AdamW([parameter], fused=True, lr=0.5, weight_decay=0.0)
        backward(scaler, parameter, 1.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    right = is_same(parameter, *[0.5] * 4)
    return Outcome(right, "a good step is applied" if right else f"weights become {shown(parameter)}")


@contextmanager
def group_of_one():
    hook = sys.excepthook  # replaced for the process's life by init_process_group
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


MOMENTUM = Case(
    "first-step-skipped-with-momentum",
    title="Fused SGD with momentum, first step skipped",
    why="The first steps are the likeliest to overflow, while the scale is still settling. torch has by then made "
    "momentum buffers of uninitialised memory, which the next step uses. (Shown by torch's own setting that fills "
    "such memory with NaN; otherwise it has any values.)",
)


@MOMENTUM.by("ampwise", "torch")
def momentum(contender):
    with uninitialised_memory_is_nan():
        parameter, scaler = parameter_of(), scaler_of(contender)
        optimizer = torch.optim.SGD([parameter], lr=0.25, momentum=0.9, fused=True)
        step(scaler, optimizer, parameter, math.inf)
        step(scaler, optimizer, parameter, 1.0)
    right = is_same(parameter, *[0.75] * 4)
    return Outcome(right, f"after the next good step, the weights are {shown(parameter)} (right: 0.75)")


@contextmanager
def uninitialised_memory_is_nan():
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


COLLAPSE = Case(
    "scale-collapse",
    title="Every step overflows",
    why="Halved often enough, a scale without a minimum becomes 0. From then on gradients are 0 times infinity, and "
    "the first good batch destroys the weights.",
)


@COLLAPSE.by("ampwise", "torch")
def collapse(contender):
    parameter, scaler = parameter_of(), scaler_of(contender, init_scale=2.0**16)
    before = parameter.detach().clone()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    overflows = 0
    try:
        while scaler.get_scale() > 0.0 or not overflows:
            overflows += 1
            step(scaler, optimizer, parameter, math.inf)
    except FloatingPointError as error:
        kept = torch.equal(parameter.detach(), before)
        weights = "the weights stay as they were" if kept else f"weights become {shown(parameter)}"
        return Outcome(kept, f"`{type(error).__name__}` at overflow {overflows}, {weights}")
    step(scaler, optimizer, parameter, 1.0)
    right = is_same(parameter, *[0.9] * 4)
    seen = f"the scale is 0 after {overflows} overflows, and the next good step makes the weights {shown(parameter)}"
    return Outcome(right, seen)


ZERO_SCALE_LOADED = Case(
    "load-a-scale-of-zero",
    title="Resume from a checkpoint whose scale is 0",
    why="A run that collapsed may have saved its scale; with it, the first step after resuming destroys the weights.",
)


@ZERO_SCALE_LOADED.by("ampwise", "torch")
def zero_scale_loaded(contender):
    saved = scaler_of("torch").state_dict() | {"scale": 0.0}
    parameter, scaler = parameter_of(), scaler_of(contender)
    optimizer, before = torch.optim.SGD([parameter], lr=0.1), scaler.state_dict()
    try:
        scaler.load_state_dict(saved)
    except ValueError as error:
        kept = scaler.state_dict() == before
        return Outcome(kept, f"refused with `{type(error).__name__}`, the scaler {'unchanged' if kept else 'changed'}")
    step(scaler, optimizer, parameter, 1.0)
    return Outcome(is_same(parameter, *[0.9] * 4), f"loaded; the next step makes the weights {shown(parameter)}")


CLOSURE = Case(
    "positional-closure",
    title="`step(optimizer, closure)`",
    why="A closure runs the backward pass again, without the scaler: the optimizer would apply gradients still "
    "multiplied by the scale. torch refuses one passed by keyword, but not by position.",
)


@CLOSURE.by("ampwise", "torch")
def closure(contender):
    parameter, scaler = parameter_of(), scaler_of(contender)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    backward(scaler, parameter, 1.0)
    try:
        scaler.step(optimizer, partial(backward, scaler, parameter, 1.0))
    except RuntimeError:
        return Outcome(True, "refused with `RuntimeError`")
    right = is_same(parameter, *[0.5] * 4)
    return Outcome(right, f"the closure is run, and the weights are {shown(parameter)} (right: 0.5)")
