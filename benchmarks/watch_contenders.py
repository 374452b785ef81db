"""Ways to monitor gradients during training: none, `ampwise run`, and other tools.

All take the step that every tutorial shows, or the engine's, of a model, an optimizer and a batch of their own, made
alike. A contender's ``work`` returns the loss, or the engine's Step, which has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

import ampwise
from benchmarks.contenders import Task
from benchmarks.gpt import Shape
from benchmarks.harness import Contender

__all__ = [
    "ANOMALY",
    "DEBUG_HOOKS",
    "ENGINE",
    "ENGINE_RUN",
    "FRESH",
    "HISTOGRAMS",
    "PARAMETER_LOOP",
    "PLAIN",
    "RUN",
    "DemoTask",
    "anomaly_detected",
    "demo_task",
    "engine_alone",
    "engine_watched",
    "histogram_hooked",
    "looped_over",
    "module_hooked",
    "unwatched",
    "watched",
    "watched_turn",
]

PLAIN, RUN = "not watched", "ampwise run"
FRESH = "not watched, before any watch was there"
ENGINE, ENGINE_RUN = "ampwise.Engine, not watched", "ampwise run, with the engine"
PARAMETER_LOOP = "a loop over parameters, with .item()"
HISTOGRAMS = "histograms in gradient hooks, as wandb.watch"
DEBUG_HOOKS = "forward hooks, as transformers' DebugUnderflowOverflow"
ANOMALY = "torch.autograd.set_detect_anomaly(True)"

MAX_NORM = 1.0
BINS = 64
# Steps of a turn before its clock starts. Two steps of a whole run are profiled; a watch installed anew does it anew,
# at its second and third step.
SETTLING = 4
FRAMES = 21  # that transformers' hooks keep


class DemoTask(Task):
    """The model of examples/char_gpt.py, which a CPU trains in FP16 within reason."""

    def trainee(self) -> tuple[nn.Module, Optimizer, tuple[Tensor, Tensor]]:
        from examples.char_gpt import CharGPT  # here, since it needs more than torch

        torch.manual_seed(0)
        model = _WithLoss(CharGPT(self.shape.vocabulary))
        optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
        tokens = torch.randint(self.shape.vocabulary, (self.shape.batch, self.shape.length + 1))
        return model, optimizer, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, nexts: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), nexts.flatten())


def demo_task() -> DemoTask:
    from examples import char_gpt as demo

    shape = Shape(
        name="the demo's GPT",
        layers=demo.LAYERS,
        width=demo.WIDTH,
        heads=demo.HEADS,
        vocabulary=len(set(demo.TEXT.read_text(encoding="utf-8"))),
        length=demo.CONTEXT,
        batch=demo.BATCH,
    )
    return DemoTask(shape=shape, precision="fp16", device="cpu", clip=MAX_NORM)


class Loop:
    """The training step of every tutorial; ``look`` is called with unscaled gradients, before clipping."""

    def __init__(self, task: Task, look: Callable[[nn.Module], object] | None = None) -> None:
        self.task, self.look = task, look
        self.model, self.optimizer, self.batch = task.trainee()
        self.parameters = list(self.model.parameters())
        self.scaler = torch.amp.GradScaler(task.device)

    def step(self) -> Tensor:
        with self.task.autocast():
            loss: Tensor = self.model(*self.batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        if self.look is not None:
            self.look(self.model)
        clip_grad_norm_(self.parameters, MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss


def unwatched(task: Task) -> Contender:
    return Contender(name=PLAIN, work=Loop(task).step)


def engine_alone(task: Task) -> Contender:
    model, optimizer, batch = task.trainee()
    engine = ampwise.Engine(model, optimizer, task.precision, clip_norm=MAX_NORM)
    return Contender(name=ENGINE, work=partial(engine.step, model, *batch))


# Under `ampwise run`


class Installed(Protocol):
    """What is asked of a watch here."""

    failures: list[str]  # of its own, which it keeps to itself

    @property
    def steps(self) -> int: ...  # that it has seen

    def install(self) -> object: ...

    def remove(self) -> object: ...


def new_watch() -> Installed:
    """One that looks at all it looks at by default, and keeps no record on disk."""
    from ampwise.watch.watch import Watch

    return Watch(record=None)


@contextmanager
def under(watch: Installed) -> Iterator[None]:
    """Contenders take turns in one process, and only one of them is to be watched."""
    watch.install()
    try:
        yield
    finally:
        watch.remove()


@contextmanager
def watched_turn(watch: Installed, work: Callable[[], object]) -> Iterator[None]:
    """A turn in the middle of a long run; a watch that has seen nothing, or has failed, is no contender."""
    with under(watch):
        for _ in range(SETTLING):
            work()
        before = watch.steps
        yield
        seen = watch.steps - before
    if watch.failures or not seen:
        raise RuntimeError(f"the watch saw {seen} steps of its turn; what failed in it: {watch.failures or 'nothing'}")


def _under_watch(make: Callable[[Task], Contender], name: str, task: Task) -> Contender:
    watch = new_watch()
    with under(watch):  # it has to see model, optimizer and scaler made
        contender = make(task)
    return Contender(name=name, work=contender.work, around=partial(watched_turn, watch, contender.work))


def watched(task: Task) -> Contender:
    return _under_watch(unwatched, RUN, task)


def engine_watched(task: Task) -> Contender:
    return _under_watch(engine_alone, ENGINE_RUN, task)


# As others do


class ParameterLoop:
    """What guides show: each gradient's figures, one by one, each of which waits for the device."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, float]] = {}

    def __call__(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if (gradient := parameter.grad) is not None:
                self.seen[name] = {
                    "norm": gradient.norm().item(),
                    "min": gradient.min().item(),
                    "max": gradient.max().item(),
                    "mean": gradient.mean().item(),
                    "zeros": (gradient == 0).float().mean().item(),
                }


def looped_over(task: Task) -> Contender:
    return Contender(name=PARAMETER_LOOP, work=Loop(task, ParameterLoop()).step)


class HistogramHooks:
    """A histogram of each gradient on its way, brought to the host."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            parameter.register_hook(partial(self._take, name))

    def _take(self, name: str, gradient: Tensor) -> None:
        flat = gradient.flatten()
        flat = flat[flat.isfinite()]  # the range has to be finite
        if len(flat):
            self.seen[name] = torch.histc(flat, bins=BINS).cpu()


def histogram_hooked(task: Task) -> Contender:
    loop = Loop(task)
    HistogramHooks(loop.model)
    return Contender(name=HISTOGRAMS, work=loop.step)


class DebugHooks:
    """After each module's forward pass: smallest and largest magnitude of all it had, and whether all was finite."""

    def __init__(self, model: nn.Module) -> None:
        self.frames: deque[list[str]] = deque(maxlen=FRAMES)
        self.not_finite: set[str] = set()
        for name, module in model.named_modules():
            module.register_forward_hook(partial(self._take, name))

    def _take(self, name: str, module: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
        returned = returned if isinstance(returned, tuple) else (returned,)
        kinds = {
            **dict(module.named_parameters(recurse=False)),
            **{f"input {place}": value for place, value in enumerate(given)},
            **{f"output {place}": value for place, value in enumerate(returned)},
        }
        self.frames.append([self._line(f"{name}: {kind}", value) for kind, value in kinds.items()])

    def _line(self, what: str, value: Any) -> str:
        if not isinstance(value, Tensor):
            return f"{what}: {type(value).__name__}"
        magnitudes = value.abs()
        line = f"{magnitudes.min().item():8.2e} {magnitudes.max().item():8.2e} {what}"
        if value.isnan().any().item() or value.isinf().any().item():
            self.not_finite.add(what)
        return line


def module_hooked(task: Task) -> Contender:
    loop = Loop(task)
    DebugHooks(loop.model)
    return Contender(name=DEBUG_HOOKS, work=loop.step)


def anomaly_detected(task: Task) -> Contender:
    around = partial(torch.autograd.set_detect_anomaly, True)
    return Contender(name=ANOMALY, work=Loop(task).step, around=around)
