"""A step by torch's means is the step that one writes by hand."""

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise import Policy
from ampwise.errors import BadInput, UnknownName
from ampwise.tune.train_case import OPTIMIZERS, TrainingStep, _copy_with_own_code, make_factory, make_optimizer

from ..for_each import for_each


def make(batch=8):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, (torch.randn(batch, 4),), lambda x: model(x).square().mean()


def by_hand(dtype, scaled, clip):
    subject = make_factory(make).make()
    optimizer = torch.optim.AdamW(subject.parameters, lr=1e-5, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    for _ in range(3):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = subject.loss()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(subject.parameters, clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in subject.parameters])


@pytest.mark.parametrize(("precision", "dtype", "scaled"), [("fp32", None, False), ("fp16", torch.float16, True)])
def test_it_is_the_step_one_writes(precision, dtype, scaled):
    subject = make_factory(make).make()
    step = TrainingStep(subject, precision, make_optimizer("adamw", subject.parameters, fused=True), clip_norm=0.01)
    losses = [step().item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert torch.equal(
        torch.cat([each.detach().flatten() for each in subject.parameters]), by_hand(dtype, scaled, 0.01)
    )
    assert all(parameter.grad is None for parameter in subject.parameters)


def test_steps_of_several_precisions_take_turns_on_one_model():
    subject = make_factory(make).make()
    optimizer = make_optimizer("sgd", subject.parameters, fused=False)
    steps = [TrainingStep(subject, name, optimizer, clip_norm=None) for name in ("fp32", "fp16")]
    for _ in range(2):
        for step in steps:
            assert step().isfinite()
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 1e-5


def test_a_policy_is_on_the_model_inside_only():
    subject = make_factory(make).make()
    seen = []
    subject.model[2].register_forward_hook(lambda module, given, returned: seen.append(returned.dtype))
    policy = Policy("fp16").keep("fp32", "2")
    step = TrainingStep(subject, policy, make_optimizer("sgd", subject.parameters, fused=False))
    with step.in_place():
        step()
    step()
    assert seen == [torch.float32, torch.float16]


@for_each("name", OPTIMIZERS)
def test_each_optimizer_moves_the_weights(name):
    subject = make_factory(make).make()
    before = subject.model[0].weight.detach().clone()
    TrainingStep(subject, "fp32", make_optimizer(name, subject.parameters, fused=False))()
    assert not torch.equal(before, subject.model[0].weight)


def test_an_unknown_optimizer():
    with pytest.raises(UnknownName, match=r"unknown optimizer 'adamx'\. Did you mean adam or adamw"):
        make_optimizer("adamx", [], fused=False)
    with pytest.raises(BadInput, match="the model has no trainable parameter"):
        make_optimizer("adam", [], fused=False)


def test_each_compiled_step_has_versions_of_its_own():
    """One code for all would reach torch's limit of versions, after which nothing is compiled."""
    subject, counted = make_factory(make).make(), torch._dynamo.testing.CompileCounter()
    times = torch._dynamo.config.cache_size_limit + 2
    for _ in range(times):
        torch.compile(_copy_with_own_code(subject.loss_fn), backend=counted, dynamic=False)(*subject.args)
    assert counted.frame_count == times


def test_a_policy_put_on_again_is_not_compiled_again():
    subject, counted = make_factory(make).make(), torch._dynamo.testing.CompileCounter()
    policy = Policy("fp16").keep("fp32", "2")
    step = TrainingStep(subject, policy, make_optimizer("sgd", subject.parameters, fused=False))
    compiled = torch.compile(_copy_with_own_code(subject.loss_fn), backend=counted, dynamic=False)
    for _ in range(4):
        with step.in_place(), torch.autocast("cpu", torch.float16):
            compiled(*subject.args)
    once = counted.frame_count
    assert once > 0
    for _ in range(4):
        with step.in_place(), torch.autocast("cpu", torch.float16):
            compiled(*subject.args)
    assert counted.frame_count == once
    assert "forward" not in vars(subject.model[2])


def test_around_it_autocast_may_be_on():
    subject = make_factory(make).make()
    step = TrainingStep(subject, "fp32", make_optimizer("sgd", subject.parameters, fused=False))
    with ProductTypes() as seen, torch.autocast("cpu", torch.bfloat16):
        step()
    assert seen.dtypes == {torch.float32}


class ProductTypes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes.add(args[-1].dtype)
        return func(*args, **(kwargs or {}))
