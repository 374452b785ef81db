"""Training steps with plain torch, ampwise.Engine, Accelerate and Lightning Fabric.

Each has its own model, optimizer and batch, equal to those of the others, and follows its documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

import ampwise
from benchmarks.gpt import GPT, Shape
from benchmarks.harness import Contender

__all__ = ["Refused", "Task", "accelerates", "by_hand", "engines", "lightnings", "ready", "unclipped"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ACCELERATES_NAMES = {"fp32": "no", "tf32": "no", "fp16": "fp16", "bf16": "bf16"}
LIGHTNINGS_NAMES = {"fp32": "32-true", "tf32": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}


class Refused(Exception):
    """A contender does not do what is asked, or is not installed."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every contender is to do."""

    shape: Shape
    precision: str
    device: str
    clip: float | None = 1.0
    compiled: bool = False

    def trainee(self) -> tuple[Module, Optimizer, tuple[Tensor, Tensor]]:
        torch.manual_seed(0)
        model: Module = GPT(self.shape).to(self.device)
        optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
        tokens = torch.randint(self.shape.vocabulary, (self.shape.batch, self.shape.length + 1), device=self.device)
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return (torch.compile(model) if self.compiled else model), optimizer, batch  # type: ignore[return-value]

    def autocast(self, **options: Any) -> AbstractContextManager[object]:
        dtype = DTYPES.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device, dtype, **options)

    def switches(self) -> AbstractContextManager[object]:
        """Torch's for TF32, set around a loop that does not set them itself."""
        return _products(tf32=self.precision == "tf32") if self.precision in ("fp32", "tf32") else nullcontext()


@contextmanager
def _products(*, tf32: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def by_hand(task: Task, *, graph: bool = False) -> Contender:
    """Every tutorial's way; with ``graph``, forward and backward passes by ``make_graphed_callables``."""
    model, optimizer, batch = task.trainee()
    parameters, scaler = list(model.parameters()), torch.amp.GradScaler(task.device)
    if graph:
        with task.switches(), task.autocast(cache_enabled=False):
            torch.cuda.make_graphed_callables(model, batch)  # changes the model's forward()

    def plain() -> None:
        with task.autocast():
            loss = model(*batch)
        loss.backward()
        if task.clip is not None:
            clip_grad_norm_(parameters, task.clip)
        optimizer.step()
        optimizer.zero_grad()

    def scaled() -> None:
        with task.autocast():
            loss = model(*batch)
        scaler.scale(loss).backward()
        if task.clip is not None:
            scaler.unscale_(optimizer)
            clip_grad_norm_(parameters, task.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    name = "by hand, make_graphed_callables" if graph else "by hand"
    return Contender(name=name, work=scaled if task.precision == "fp16" else plain, around=task.switches)


def engines(task: Task, **options: Any) -> Contender:
    model, optimizer, batch = task.trainee()
    engine = ampwise.Engine(model, optimizer, task.precision, clip_norm=task.clip, **options)
    name = "ampwise.Engine, graph=True" if options.get("graph") else "ampwise.Engine"
    return Contender(name=name, work=partial(engine.step, model, *batch))


def accelerates(task: Task) -> Contender:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    if task.precision == "fp16" and task.device == "cpu":
        raise Refused("on a CPU, mixed_precision='fp16' runs in FP32")
    AcceleratorState._reset_state(reset_partial_state=True)  # it holds to the precision of its first use
    accelerator = Accelerator(mixed_precision=ACCELERATES_NAMES[task.precision], cpu=task.device == "cpu")
    bare, plain, batch = task.trainee()
    model, optimizer = accelerator.prepare(bare, plain)
    parameters = list(model.parameters())

    def step() -> None:
        loss = model(*batch)
        accelerator.backward(loss)
        if task.clip is not None:
            accelerator.clip_grad_norm_(parameters, task.clip)
        optimizer.step()
        optimizer.zero_grad()

    return Contender(name="Accelerate", work=step, around=task.switches)


def lightnings(task: Task) -> Contender:
    from lightning_fabric import Fabric

    if task.precision == "fp16" and task.device == "cpu":
        raise Refused("on a CPU, precision='16-mixed' runs in BF16")
    fabric = Fabric(accelerator=task.device, devices=1, precision=LIGHTNINGS_NAMES[task.precision])
    bare, plain, batch = task.trainee()
    model, optimizer = fabric.setup(bare, plain)

    def step() -> None:
        loss = model(*batch)
        fabric.backward(loss)
        if task.clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=task.clip)
        optimizer.step()
        optimizer.zero_grad()

    return Contender(name="Lightning Fabric", work=step, around=task.switches)


def ready(make: Callable[[Task], Contender], task: Task, *, steps: int = 5) -> Contender:
    """A contender that has taken its first steps; Refused with its reason where it does not take them."""
    try:
        contender = make(task)
        with contender.around():
            for _ in range(steps):
                contender.work()
            if task.device == "cuda":
                torch.cuda.synchronize()
    except ModuleNotFoundError as error:
        raise Refused(f"not installed ({error.name})") from error
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise Refused(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    return contender


def unclipped(make: Callable[[Task], Contender], task: Task) -> Contender:
    """The same without clipping, and named so."""
    contender = make(replace(task, clip=None))
    return replace(contender, name=f"{contender.name}, not clipped")
