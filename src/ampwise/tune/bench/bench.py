"""``ampwise.bench``: measure a user's training step in several precisions."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from ampwise.errors import BadInput
from ampwise.finding.terminal import console, printable, say
from ampwise.hardware.cpu import BF16_FEATURES, describe_cpu
from ampwise.hardware.torch_info import read_device, read_fp32_switches
from ampwise.trace.capsule.capsule_replay import device_named
from ampwise.train.precision.precision import precisions_of
from ampwise.train.random_state import capture_random, restore_random
from ampwise.tune.bench.clocks import Clock, clock_for
from ampwise.tune.bench.lineup import checked_names, make_contenders, make_plan
from ampwise.tune.bench.measurement import Measurement, Progress
from ampwise.tune.bench.result import BenchResult
from ampwise.tune.bench.speeds import BASE, SpeedComparison
from ampwise.tune.train_case import CaseFactory, TrainCase, make_factory, make_optimizer

OPTIMIZER, CLIP_NORM, NO_CLIP = "adamw", 1.0, "none"  # the defaults of the command, too


def bench(
    make: Callable[..., Any] | str,
    precisions: Iterable[str] | None = None,
    *,
    compiled: bool = False,
    batch: int | None = None,
    device: str | torch.device | None = None,
    optimizer: str = OPTIMIZER,
    clip_norm: float | None = CLIP_NORM,
    keep_fp32: Sequence[str] = (),
    rounds: int | None = None,
    steps: int | None = None,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> BenchResult:
    """Train a few steps in each precision, in turns, and report which is faster, by how much, and why not more.

    Your random number generators are restored afterwards; your weights and gradients are not touched unless the
    function returns them.

    Args:
        make: a function that returns a model, a batch and the function that computes the loss, or its name,
            ``"train:make"``. It is called once.
        precisions: any of fp32, tf32, fp16, bf16 and fp8; by default those the device runs. FP32 is always measured.
        compiled: also measure each with ``torch.compile``.
        batch: rows of the batch; if the function takes no size, its batch is cut or repeated.
        device: where to train; by default a GPU, if there is one.
        optimizer: a name, used unless the function returns an optimizer.
        clip_norm: clip gradients to this norm; None: do not.
        keep_fp32: patterns of modules that stay in FP32 in the 16-bit precisions.
        rounds: how often each takes its turn; by default chosen by how long a step takes.
        steps: steps per turn; likewise.
        progress: called with steps done, steps in all, and the activity.
        clock: replaces the device's own.

    Returns:
        the times, losses and memory of each precision, the verdict, and findings; ``print`` shows them.

    Raises:
        BadInput: an argument does not fit; the message says what to pass.
        PrecisionUnavailable: the device cannot run a precision.

    >>> import torch, ampwise
    >>> def make(batch=4):
    ...     model = torch.nn.Linear(8, 1)
    ...     x = torch.randn(batch, 8)
    ...     return model, (x,), lambda x: model(x).square().mean()
    >>> result = ampwise.bench(make, ["fp32", "bf16"], device="cpu", rounds=2, steps=1)
    >>> [(row.label, row.loss.same) for row in result.rows]
    [('fp32', True), ('bf16', True)]
    """
    names = None if precisions is None else checked_names(precisions)
    for name, number in {"rounds": rounds, "steps": steps}.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise BadInput(f"bench: expected {name} of at least 1, got {number!r}.")
    factory = make_factory(make)
    target = device_named(None if device is None else str(device), "cuda")
    entries, left_out = make_plan(names, precisions_of(target), target, compiled=compiled)
    random_before = capture_random(target)
    try:
        case = factory.make(target, batch)
        if not case.parameters:
            raise BadInput(f"{factory.name}: no parameter has requires_grad=True, so there is no step to compare.")
        own = case.optimizer or make_optimizer(optimizer, case.parameters, fused=target.type == "cuda")
        contenders = make_contenders(entries, case, own, clip_norm=clip_norm, kept=keep_fp32)
        measured = Measurement(case, contenders, clock or clock_for(target), rounds, steps, progress)
        measured.run()
    finally:
        restore_random(random_before, target)
    options = {
        "--device": None if device is None and target.type == "cuda" else target,
        "--precisions": None if names is None else ",".join(names),
        "--batch": batch,
        "--optimizer": None if optimizer == OPTIMIZER else optimizer,
        "--clip": None if clip_norm == CLIP_NORM else clip_norm or NO_CLIP,
        "--rounds": rounds,
        "--steps": steps,
    }
    words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    words += ["--compile"] * compiled
    words += [word for pattern in keep_fp32 for word in ("--keep", f"{BASE}={pattern}")]
    device_name, bf16_instructions = target.type, None
    if target.type == "cuda":
        device_name = torch.cuda.get_device_name(target)
    elif target.type == "cpu":
        cpu = describe_cpu()
        device_name = cpu.model or "CPU"
        bf16_instructions = None if cpu.features is None else any(each in cpu.features for each in BF16_FEATURES)
    speeds = SpeedComparison(
        name=factory.name,
        command=shlex.join(["ampwise", "bench", _command_name(factory), *words]),
        device=target.type,
        device_name=device_name,
        rows=(*measured.rows(), *left_out),
        noise=measured.noise,
        rounds=measured.rounds,
        batch=case.rows,
        tokens=case.tokens,
        kept=tuple(keep_fp32),
        flops=measured.flops,
        layers=measured.layers(),
        clocks=measured.clocks,
        tf32_was_on=_tf32_was_on(case),
        bf16_instructions=bf16_instructions,
        not_measured=tuple(measured.not_measured()),
    )
    return BenchResult(speeds)


def _command_name(factory: CaseFactory) -> str:
    """Name the function as a command line would."""
    if ":" in factory.name:
        return factory.name
    module = str(getattr(factory.function, "__module__", "__main__"))
    if module == "__main__":
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "train.py").name
    return f"{module}:{factory.name}"


def _tf32_was_on(case: TrainCase) -> tuple[str, ...]:
    """Name the operations for which TF32 was on, on a device where it has an effect."""
    device = case.device
    if device.type != "cuda" or not read_device(torch, device.index or 0).has_tensor_cores("tf32"):
        return ()
    switches = read_fp32_switches(torch)
    convolves = any(isinstance(module, _ConvNd) for module in nn.Module.modules(case.model))
    on = {"matmuls": switches.matmul_tf32, "convolutions": switches.convolution_tf32 and convolves}
    return tuple(what for what, is_on in on.items() if is_on)


@contextmanager
def progress_on(stream: TextIO, *, quiet: bool = False) -> Iterator[Progress | None]:
    """Yield the callback that shows progress: as a bar on a terminal, else as one line for each phase.

    None if ``quiet``.
    """
    if quiet:
        yield None
    elif stream.isatty():
        from rich import progress as rich

        text = rich.TextColumn("{task.description}", markup=False)
        columns = (rich.BarColumn(), rich.TaskProgressColumn(), rich.TimeElapsedColumn(), text)
        with rich.Progress(*columns, console=console(stream), transient=True) as bar:
            task = bar.add_task("making the model", total=None)
            yield lambda done, total, doing: bar.update(task, completed=done, total=total, description=printable(doing))
    else:
        shown: set[str] = set()

        def report(done: int, total: int, doing: str) -> None:
            what = doing.partition(":")[0]
            if what not in shown:
                shown.add(what)
                say("ampwise: {} ({}/{})", what, done, total, stream=stream)
                stream.flush()

        yield report
