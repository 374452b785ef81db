"""What a scenario's test calls: it trains with the answer's code on planted data, and compares with a reference.

The tests of scenarios run in the sandbox, after the answer's module, with its names and these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import ampwise

TOLERANCE = 0.05  # of the length of the update: BF16 is within 0.01, a wrong order is beyond 0.3
Batch = tuple[torch.Tensor, torch.Tensor]


class WrongAnswer(Exception):
    """What the answer's code does is wrong; the message says what."""


def expect(condition: object, why: str) -> None:
    """Fail with ``why`` unless the condition holds."""
    if not condition:
        raise WrongAnswer(why)


def close(value: Any, reference: torch.Tensor, why: str, tolerance: float = 0.01) -> None:
    """Fail unless the value is finite and near to the reference."""
    expect(isinstance(value, torch.Tensor), f"{why}: expected a tensor, got {type(value).__name__}")
    value = value.detach().double()
    expect(value.shape == reference.shape, f"{why}: shape {tuple(value.shape)}, expected {tuple(reference.shape)}")
    expect(bool(torch.isfinite(value).all()), f"{why}: not finite")
    error = float((value - reference.double()).norm() / reference.double().norm().clamp_min(1e-30))
    expect(error <= tolerance, f"{why}: off by {error:.2g} of the reference")


def make_model() -> nn.Module:
    """Return a small model, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def make_batches(count: int = 8, planted: Sequence[int] = ()) -> list[Batch]:
    """Return batches, of which the planted ones contain inf."""
    random = torch.Generator().manual_seed(1)
    batches = []
    for number in range(count):
        x = torch.randn(16, 8, generator=random)
        y = torch.randint(0, 4, (16,), generator=random)
        if number in planted:
            x[0, 0] = torch.inf
        batches.append((x, y))
    return batches


def reference(
    batches: Sequence[Batch], *, clip: float | None, accumulate: int, lr: float, decay: float | None
) -> tuple[nn.Module, list[float], float]:
    """Train in FP32, and leave out steps that are not finite; return the model, the norms, and the learning rate."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay) if decay else None
    norms = []
    for start in range(0, len(batches), accumulate):
        optimizer.zero_grad()
        for x, y in batches[start : start + accumulate]:
            (nn.functional.cross_entropy(model(x), y) / accumulate).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)
        norms.append(float(norm))
        if torch.isfinite(norm):
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return model, norms, float(optimizer.param_groups[0]["lr"])


def trains(
    train: Callable[..., Any],
    *,
    clip: float | None = None,
    accumulate: int = 1,
    planted: Sequence[int] = (),
    dtype: str | None = None,
    scaled: bool | None = None,
    decay: float | None = None,
    model: nn.Module | None = None,
    returns: str = "",
) -> Any:
    """Train with the answer's function, and compare its weights with the reference; return what it returns.

    The function may take ``model, optimizer, batches, loss_fn, device, scheduler`` by these names. ``dtype`` is what
    the forward pass must run in, ``scaled`` whether the loss must be scaled; with ``decay`` a scheduler is passed,
    which must move with the steps that were taken.
    """
    lr = 0.5
    model = make_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    batches = make_batches(planted=planted)
    start = _flat(make_model())
    used: set[torch.dtype] = set()
    factors: list[float] = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(output, target)
        if loss.requires_grad:
            loss.register_hook(lambda grad: factors.append(float(grad) * accumulate))
        return loss

    linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
    linear.register_forward_hook(lambda module, args, output: used.add(output.dtype))
    offered = {"model": model, "optimizer": optimizer, "batches": batches, "loss_fn": loss_fn, "device": "cpu"}
    if decay is not None:
        offered["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    wanted = inspect.signature(train).parameters
    expect(set(wanted) <= set(offered), f"train() takes {', '.join(wanted)}; expected {', '.join(offered)}")
    CALLS.clear()
    optimizer.register_step_pre_hook(lambda *_: CALLS.append("optimizer.step"))
    result = train(**{name: offered[name] for name in wanted})
    order = f" (the first calls: {', '.join(CALLS[:10])})"

    end = _flat(model)
    expect(bool(torch.isfinite(end).all()), f"the weights are not finite after a batch with inf{order}")
    expect(not torch.equal(start, end), f"the weights did not move{order}")
    expect(used, "the model was not called")
    if dtype is not None:
        names = ", ".join(sorted(str(each).removeprefix("torch.") for each in used))
        expect(used == {getattr(torch, dtype)}, f"the forward pass ran in {names}, expected {dtype}")
    finite = [factor for factor in factors if factor == factor]
    if scaled is not None:
        was = any(factor > 2 for factor in finite)
        expect(was == scaled, f"the loss was {'' if was else 'not '}scaled{order}")
    right, norms, rate = reference(batches, clip=clip, accumulate=accumulate, lr=lr, decay=decay)
    error = float((end - _flat(right)).norm() / (_flat(right) - start).norm())
    expect(error <= TOLERANCE, f"the weights differ from the reference by {error:.0%} of the update{order}")
    if decay is not None:
        got = optimizer.param_groups[0]["lr"]
        expect(
            abs(got - rate) < 1e-9, f"the learning rate is {got:.4g}, expected {rate:.4g}: one step each that was taken"
        )
    if returns == "norms":
        _check_norms(result, norms)
    return result


def _check_norms(result: Any, norms: list[float]) -> None:
    values = [float(value) for value in result] if isinstance(result, (list, tuple)) else []
    expect(len(values) == len(norms), f"train() returned {len(values)} norms, expected {len(norms)}")
    worst = max(abs(value / norm - 1) for value, norm in zip(values, norms, strict=True))
    expect(worst < TOLERANCE, f"a norm that train() returned is off by a factor of up to {worst + 1:.3g}")


CALLS: list[str] = []  # of the step, in their order, as the answer's code makes them


def spy_on_torch() -> None:
    """Record the calls that make a step; before the answer's code imports them."""

    depth = 0

    def spy(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            if depth == 1:  # not what it calls itself
                CALLS.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1

        setattr(owner, name, called)

    for name in ("scale", "unscale_", "step", "update"):
        spy(torch.amp.GradScaler, name)
    spy(nn.utils, "clip_grad_norm_")
    spy(torch.Tensor, "backward")


def rehearse(engine: bool) -> None:
    """Make one step with torch alone, or with ampwise's Engine."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = make_batches(1)[0]
    if engine:
        ampwise.Engine(model, optimizer, "fp16").step(lambda: nn.functional.cross_entropy(model(x), y))
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler = ampwise.GradScaler("cpu")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])
