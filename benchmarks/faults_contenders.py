"""The same small training run twice: a plain torch loop, and with a guard. Faults are injected into both."""

from __future__ import annotations

import io
import json
import math
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ampwise

__all__ = ["BATCH", "EPOCHS", "LATEST", "RESULT", "SAMPLES", "Fault", "Job", "guarded", "plain"]

SAMPLES, WIDTH, BATCH, EPOCHS = 128, 8, 8, 7
SAVED_EVERY = 20  # steps
LATEST = "latest.pt"  # the plain loop's checkpoint
RESULT = "result.json"  # of a training that came to its end
SOON_S = 5  # that a rank is waited for
GIVEN_UP = 70  # a guard's exit code


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong. ``at``: the batches that it meets, counted in a process; none: all, or in another way."""

    name: str
    kind: str = ""
    at: tuple[int, ...] = ()
    every_time: bool = False  # not in the first process alone
    on_rank: int | None = None
    ranks: int = 1
    model: str = "mlp"
    precision: str = "bf16"
    guard: dict[str, Any] = field(default_factory=dict)
    ladder: dict[str, Any] = field(default_factory=dict)
    damage: Callable[[Path], None] | None = None  # to the newest checkpoint, after the first process
    largest_file: int | None = None  # bytes: less than a checkpoint has, and more than the log


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process."""

    fault: Fault
    seed: int
    directory: Path
    attempt: int
    rank: int = 0

    @property
    def hits(self) -> bool:
        """Whether anything goes wrong in it."""
        fault = self.fault
        return (self.attempt == 0 or fault.every_time) and fault.on_rank in (None, self.rank)


# --- what is trained -----------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Dropout(0.05), nn.Linear(256, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Loud(nn.Module):
    """Inner activations that do not fit FP16, whatever the loss scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.loud, self.last = nn.Linear(WIDTH, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        with torch.no_grad():
            self.loud.weight.copy_(torch.eye(32) * 3e5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.layer_norm(self.loud(F.relu(self.first(x))), (32,)))  # type: ignore[no-any-return]


class Steep(Mlp):
    """Gradients that do not fit FP16, whatever the loss scale."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * 1e12)
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": Mlp, "loud": Loud, "steep": Steep}


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    y = torch.sin(x[:, :4]).sum(1, keepdim=True) + 0.1 * torch.randn(SAMPLES, 1, generator=generator)
    return TensorDataset(torch.arange(SAMPLES), x, y)


def _share(step: int) -> float:
    """Of the learning rate: it ends at nothing, or the last few batches would decide on the loss."""
    return min((step + 1) / 20, max(0.0, 1 - step / (EPOCHS * SAMPLES // BATCH)))


class Training:
    """What both ways have in common."""

    def __init__(self, job: Job) -> None:
        self.job, self.seen, self.largest = job, 0, SAMPLES
        torch.manual_seed(job.seed)
        self.model = MODELS[job.fault.model]()
        if job.fault.ranks > 1:
            self.model = nn.parallel.DistributedDataParallel(self.model)
        torch.manual_seed(job.seed + 1000 * job.rank)
        data, shared = samples(), job.fault.ranks > 1
        self.sampler: DistributedSampler[Any] | None = DistributedSampler(data, seed=job.seed) if shared else None
        self.loader = DataLoader(data, BATCH // job.fault.ranks, shuffle=not shared, sampler=self.sampler)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _share)
        job.directory.mkdir(parents=True, exist_ok=True)
        self._log = (job.directory / f"log-{job.rank}").open("a")
        if job.hits and job.fault.largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job.fault.largest_file, resource.RLIM_INFINITY))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if len(x) > self.largest:
            raise torch.OutOfMemoryError(f"no memory for {len(x)} samples")
        return F.mse_loss(self.model(x).float(), y)

    def note(self, **facts: Any) -> None:
        """Written before a batch is trained on: a process that is killed says no more."""
        self._log.write(json.dumps(facts) + "\n")
        self._log.flush()

    def with_fault(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        fault, self.seen = self.job.fault, self.seen + 1
        if self.job.hits and fault.kind in KINDS and self.seen - 1 in fault.at:
            return KINDS[fault.kind](self, x, y)
        return x, y

    def end(self, **facts: Any) -> None:
        if self.job.fault.largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self.model.eval()
        with torch.no_grad():
            _, x, y = samples().tensors
            loss = float(F.mse_loss(self.model(x), y))
        if self.job.rank == 0:
            told = {"loss": loss if math.isfinite(loss) else None, **facts}
            (self.job.directory / RESULT).write_text(json.dumps(told))


# --- what goes wrong -----------------------------------------------------------------------------------------------


def spoil(training: Training, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        next(training.model.parameters()).view(-1)[0] = math.nan
    return x, y


def fill_memory(training: Training, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    training.largest = BATCH // 2
    return x, y


def send(number: signal.Signals) -> Callable[[Training, Tensor, Tensor], tuple[Tensor, Tensor]]:
    def sent(training: Training, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        os.kill(os.getpid(), number)
        return x, y

    return sent


def hang(training: Training, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    time.sleep(600)
    return x, y


KINDS: dict[str, Callable[[Training, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "nan": lambda training, x, y: (x * math.nan, y),
    "inf": lambda training, x, y: (x * math.inf, y),
    "huge": lambda training, x, y: (x * 1e30, y * 1e30),
    "spike": lambda training, x, y: (x, y + 100),
    "weights": spoil,
    "memory": fill_memory,
    "SIGTERM": send(signal.SIGTERM),
    "SIGKILL": send(signal.SIGKILL),
    "hang": hang,
}


# --- by hand -------------------------------------------------------------------------------------------------------


def plain(job: Job) -> None:
    """As in most scripts: torch.amp, one file that is written over, and an epoch that begins anew on a restart."""
    training = Training(job)
    model, optimizer, scheduler = training.model, training.optimizer, training.scheduler
    scaler = torch.amp.GradScaler("cpu", enabled=job.fault.precision == "fp16")
    dtype = torch.float16 if job.fault.precision == "fp16" else torch.bfloat16
    epoch, number, latest = 0, 0, job.directory / LATEST
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    if latest.exists():
        state = torch.load(latest, weights_only=True)
        epoch, number = state["epoch"], state["number"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
    for current in range(epoch, EPOCHS):
        for which, given, wanted in _epoch(training, current):
            training.note(number=number + 1, epoch=current, samples=which.tolist())
            x, y = training.with_fault(given, wanted)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = training.loss(x, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            number += 1
            if scaler.get_scale() < before:
                training.note(skipped=number)
            scheduler.step()  # noqa: AMP114 (as most loops have it)
            if number % SAVED_EVERY == 0 and job.rank == 0:
                saved = {name: part.state_dict() for name, part in parts.items()}
                _save({**saved, "epoch": current, "number": number}, latest, job)
    training.end()


def _epoch(training: Training, epoch: int) -> Iterator[Any]:
    if training.sampler is not None:
        training.sampler.set_epoch(epoch)
    yield from training.loader


def _save(state: dict[str, Any], path: Path, job: Job) -> None:
    if job.hits and job.fault.kind == "SIGKILL while saving" and state["number"] >= 60:
        whole = io.BytesIO()
        torch.save(state, whole)
        path.write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    torch.save(state, path)


# --- with a guard --------------------------------------------------------------------------------------------------


def guarded(job: Job) -> None:
    """The same with an engine, and a guard around it."""
    training, fault = Training(job), job.fault
    engine = ampwise.Engine(
        training.model, training.optimizer, fault.precision, scheduler=training.scheduler, clip_norm=1.0
    )
    options = {"every": f"{SAVED_EVERY} steps", "snapshot_every": 10, "patience": f"{SOON_S}s", **fault.guard}
    guard = ampwise.Guard(
        engine, job.directory / "guard", ladder=ampwise.Ladder(**{"healthy": 5, **fault.ladder}), **options
    )
    try:
        with guard:
            for which, given, wanted in guard.batches(training.loader, epochs=EPOCHS):
                number = engine.applied_steps + engine.skipped_steps + 1
                training.note(number=number, epoch=guard.epoch, samples=which.tolist())
                if job.hits and fault.kind == "SIGKILL while saving" and number == 59:
                    _die_while_saving()
                step = guard.step(training.loss, *training.with_fault(given, wanted))
                if step.skipped:
                    training.note(skipped=number)
    except ampwise.Stopped as stopped:
        if stopped.code == GIVEN_UP:
            training.note(skipped=engine.applied_steps + engine.skipped_steps)
        training.note(told=[event.name for event in guard.events])
        raise
    told = [event.name for event in guard.events]
    training.note(told=told)
    training.end(precision=engine.precision, kept=[rule.pattern for rule in engine.policy.rules])


def _die_while_saving() -> None:
    """In the middle of the next file."""

    def fsync(descriptor: int) -> None:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = fsync  # type: ignore[assignment]


def join_ranks(job: Job) -> None:
    """Before the training, where there are several."""
    if job.fault.ranks > 1:
        store = job.directory / f"store-{job.attempt}"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=job.rank, world_size=job.fault.ranks)
