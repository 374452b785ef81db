"""A small training that a fault is planted in: in this process, in one of its own, or on two ranks.

    python programs.py '{"directory": "...", "fault": "nan", "at": [20], "result": "result.json"}'

Every batch says which samples it is made of, so that what was trained on can be counted.
"""

import ctypes
import hashlib
import json
import math
import multiprocessing
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ampwise import Engine, Guard, Ladder, Stopped

SAMPLES, WIDTH, BATCH = 96, 8, 8
BATCHES = SAMPLES // BATCH  # in an epoch
WAY = "engine"  # how the training is written, where a plan does not say: one of WAYS
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained, and what goes wrong."""

    directory: str
    way: str = field(default_factory=lambda: WAY)
    model: str = "mlp"
    precision: str = "bf16"
    epochs: int = 4
    seed: int = 0
    guarded: bool = True
    guard: dict = field(default_factory=dict)  # options
    ladder: dict = field(default_factory=dict)
    engine: dict = field(default_factory=dict)
    fault: str = ""  # one of FAULTS
    at: tuple = ()  # batches that it meets, counted in this process from 0; () for all
    on_rank: int | None = None  # None: on all
    hangs_s: float = 600.0
    signals: int = 1  # that are waited for
    workers: int = 0  # of the loader
    wrap: str = "ddp"  # how ranks train together
    log: str = ""  # a file that says which batch comes next, before it is trained on
    result: str = ""  # a file; RANK in its name is that of the process
    save_at: tuple = ()  # numbers of steps after which the user saves
    largest_file: int | None = None  # bytes that the system lets a file have
    forbid_at: tuple = ()  # two steps: the directory may not be written to from the one, and may from the other
    kill_at_batch: int | None = None
    kill_after_s: float | None = None
    kill_with: str = "SIGKILL"
    kill_at_fsync: int | None = None
    store: str = ""  # where ranks meet


@dataclass
class Outcome:
    """What came of it."""

    code: int | None = 0  # the exit code; None: it was left by an error
    why: str = ""
    weights: str = ""  # a checksum of model and optimizer
    loss: float = math.nan  # over all samples, at the end
    steps: list = field(default_factory=list)  # [number, samples, skipped], in the order of time
    told: list = field(default_factory=list)  # names of the guard's events
    late: int = 0  # findings besides, that a disk is slow
    messages: list = field(default_factory=list)
    passed_over: list = field(default_factory=list)
    precision: str = ""
    kept: list = field(default_factory=list)  # modules that the policy has exceptions for
    began_at: int = 0
    seconds: float = 0.0  # from the first step to the end

    @property
    def lineage(self):
        """Batches whose steps are in the weights, by the number of the step; what was undone is not."""
        return lineage(self.steps)


def lineage(steps):
    kept = {}
    for number, samples, skipped in steps:
        kept = {earlier: its for earlier, its in kept.items() if earlier < number}
        if not skipped:
            kept[number] = tuple(samples)
    return kept


def times_trained(steps):
    """How often each sample is in the weights."""
    return Counter(sample for its in lineage(steps).values() for sample in its)


# --- models --------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(WIDTH, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))
        )

    def forward(self, x):
        return self.net(x)


class Gpt(nn.Module):
    """A block of attention over the features, each of them a token."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 16)
        self.place = nn.Parameter(torch.randn(WIDTH, 16) * 0.1)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.block(self.embed(x.unsqueeze(2)) + self.place).mean(1))


class Loud(nn.Module):
    """Its inner activations have no room in FP16, whatever the loss scale; in BF16 they have."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.loud = nn.Linear(16, 16)
        self.last = nn.Linear(16, 1)
        with torch.no_grad():
            self.loud.weight.copy_(torch.eye(16) * 3e5)

    def forward(self, x):
        return self.last(F.layer_norm(self.loud(F.relu(self.first(x))), (16,)))


class Steep(nn.Module):
    """The loss is small, and its gradient by an FP16 activation overflows at a loss scale of 1 already."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, 1)

    def forward(self, x):
        return Magnified.apply(self.last(F.relu(self.first(x))))


class Magnified(torch.autograd.Function):
    """As it is, with a gradient 1e12 times as large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1e12


MODELS = {"mlp": Mlp, "gpt": Gpt, "loud": Loud, "steep": Steep}


def data():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    y = torch.sin(x[:, :4]).sum(1, keepdim=True) + 0.1 * torch.randn(SAMPLES, 1, generator=generator)
    return TensorDataset(torch.arange(SAMPLES), x, y)


# --- faults --------------------------------------------------------------------------------------------------------


def nan_weights(run, x, y):
    with torch.no_grad():
        next(run.model.parameters()).view(-1)[0] = math.nan
    return x, y


def no_memory(run, x, y):
    """From now on, for as long as batches are as large as this one."""
    run.largest = len(x) // 2
    return x, y


def sends(number):
    def send(run, x, y):
        os.kill(os.getpid(), number)
        return x, y

    return send


def to_the_group(run, x, y):
    """By another process, as torchrun's agent. The workers of a loader are in it, and are gone when this goes on."""
    workers = multiprocessing.active_children()
    assert workers
    subprocess.run(["kill", "-TERM", "--", f"-{os.getpgid(0)}"], start_new_session=True, check=True)
    for worker in workers:
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # how it ended is torch's to find out
    return x, y


def waits_for_signals(run, x, y):
    """Says so, once for each that has come: whoever sends them waits for that, as two at a time may be one."""
    come = run.signals_come_in()
    for count in range(run.plan.signals + 1):
        Path(f"{run.plan.directory}.waits-{run.rank}-{count}").write_text(str(os.getpid()))
        while count < run.plan.signals and os.read(come, 1)[0] != signal.SIGTERM:
            pass
    return x, y


def hangs(run, x, y):
    time.sleep(run.plan.hangs_s)
    return x, y


FAULTS = {
    "nan": lambda run, x, y: (x * math.nan, y),
    "inf": lambda run, x, y: (x * math.inf, y),
    "huge": lambda run, x, y: (x * 1e30, y * 1e30),
    "huge, and the loss is fine": lambda run, x, y: (x * 1e30, y),  # as there is a BatchNorm on the way
    "spike": lambda run, x, y: (x, y + 100),
    "nan weights": nan_weights,
    "out of memory": no_memory,
    "SIGTERM": sends(signal.SIGTERM),
    "SIGKILL": sends(signal.SIGKILL),
    "SIGTERM to the group": to_the_group,
    "waits for signals": waits_for_signals,
    "hang": hangs,
}


def die_at(count):
    """With the file that is being written half of what it is to be, or whole and not in place."""
    fsync, seen = os.fsync, 0

    def counted(descriptor):
        nonlocal seen
        seen += 1
        if seen == count:
            found = os.fstat(descriptor)
            if count % 2 and stat.S_ISREG(found.st_mode):
                os.ftruncate(descriptor, found.st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return fsync(descriptor)

    os.fsync = counted


def be_like_others():
    """Root may write to any folder; without its capabilities it may not, as anybody else."""
    version_3, whoever_calls = 0x20080522, 0
    none = (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(version_3, whoever_calls), none) == 0


# --- the training --------------------------------------------------------------------------------------------------


class Run:
    """A training as its user writes it, in one of WAYS."""

    def __init__(self, plan):
        self.plan, self.outcome = plan, Outcome()
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.seen, self.largest = 0, SAMPLES
        torch.manual_seed(plan.seed)
        self.model = wrapped(MODELS[plan.model](), plan.wrap)
        torch.manual_seed(plan.seed + 1000 * self.rank)  # dropout is another on each rank
        samples = data()
        sampler = DistributedSampler(samples, seed=plan.seed) if dist.is_initialized() else None
        size = BATCH // (dist.get_world_size() if dist.is_initialized() else 1)
        self.loader = DataLoader(samples, size, shuffle=sampler is None, sampler=sampler, num_workers=plan.workers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 8))
        self.scaler = None
        if plan.precision == "fp16" and plan.way != "engine":
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # overflows would move BatchNorm's statistics
        self.engine = self.guard = None
        if plan.way == "engine":
            options = {"scheduler": self.schedule, "clip_norm": 1.0, **plan.engine}
            self.engine = Engine(self.model, self.optimizer, plan.precision, **options)
        if plan.guarded and plan.way in ("engine", "loop", "own steps"):
            self.guard = self.guarded()
        self.log = Path(plan.log).open("a") if plan.log else None  # noqa: SIM115 (closed at the end)

    @property
    def options(self):
        """Of a guard, wherever it is."""
        ladder = Ladder(**{"healthy": 5, **self.plan.ladder})
        return {"every": "10 steps", "snapshot_every": 5, "ladder": ladder, **self.plan.guard}

    def guarded(self):
        if self.engine is not None:
            return Guard(self.engine, self.plan.directory, **self.options)
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.schedule, "scaler": self.scaler}
        clips = {"clip_norm": 1.0} if self.plan.way == "loop" else {}
        return Guard(self.plan.directory, **parts, **clips, **self.options)

    def loader_of_dicts(self):
        """The same batches, as the Trainer wants them."""

        def collate(rows):
            return {"batch": torch.utils.data.default_collate(rows)}

        return DataLoader(self.loader.dataset, BATCH, shuffle=True, collate_fn=collate, num_workers=self.plan.workers)

    def loss(self, x, y):
        if len(x) > self.largest:
            raise torch.OutOfMemoryError(f"tried to allocate room for {len(x)} samples")
        return F.mse_loss(self.model(x).float(), y)

    def batches(self):
        if self.guard is not None:
            yield from self.guard.batches(self.loader, epochs=self.plan.epochs)
        else:
            for epoch in range(self.plan.epochs):
                if isinstance(self.loader.sampler, DistributedSampler):
                    self.loader.sampler.set_epoch(epoch)
                yield from self.loader

    def train(self):
        """A loop of its own: with an engine, with a guard that takes the steps, or with all of its lines."""
        for samples, x, y in self.batches():
            x, y = self.begin_step(samples, x, y)
            if self.engine is not None:
                closed = (self.engine if self.guard is None else self.guard).step(self.loss, x, y)
            else:
                with self.autocast():
                    loss = self.loss(x, y)
                closed = self.guard.step(loss) if self.plan.way == "loop" and self.guard else self.own_step(loss)
            self.end_step(closed)

    def own_step(self, loss):
        scaler = self.scaler or torch.amp.GradScaler("cpu", enabled=False)
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()
        step = None if self.guard is None else self.guard.end_step(loss)
        if scaler.get_scale() >= scale if step is None else step.applied:
            self.schedule.step()
        return step

    def autocast(self):
        dtype = AUTOCAST.get(self.plan.precision)
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    def begin_step(self, samples, x, y):
        """Write a batch down, and let its fault happen."""
        if self.engine is not None:
            number = self.engine.applied_steps + self.engine.skipped_steps + 1
        else:
            number = (len(self.outcome.steps) if self.guard is None else self.guard.number) + 1
        if not self.outcome.steps:
            self.outcome.began_at = number - 1
        self.write_down(number, samples)
        return self.with_fault(x, y)

    def end_step(self, step):
        number = self.outcome.steps[-1][0]
        self.outcome.steps[-1][2] = step is not None and step.skipped
        if number in self.plan.save_at:
            self.guard.save()

    def write_down(self, number, samples):
        if number in self.plan.forbid_at:
            self.be_written()
            Path(self.plan.directory).chmod(0o500 if number == self.plan.forbid_at[0] else 0o700)
        self.outcome.steps.append([number, samples.tolist(), True])  # skipped, until it is known
        if self.log is not None:
            self.log.write(json.dumps([number, samples.tolist(), False]) + "\n")
            self.log.flush()

    def be_written(self):
        """Before a disk breaks, or is mended: else a slow one might have nothing to write as long as it is broken."""
        if (thread := self.guard._checkpointing.saver._thread) is not None:
            thread.join()

    def with_fault(self, x, y):
        plan, self.seen = self.plan, self.seen + 1
        if plan.kill_at_batch == self.seen - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        here = plan.on_rank in (None, self.rank) and (not plan.at or self.seen - 1 in plan.at)
        return FAULTS[plan.fault](self, x, y) if plan.fault and here else (x, y)

    def signals_come_in(self):
        """A pipe that has a byte for each."""
        come, goes = os.pipe()
        os.set_blocking(goes, False)
        signal.set_wakeup_fd(goes)
        return come

    def to_the_end(self):
        """What came of it, however it ended. Errors other than a stop are raised."""
        outcome, began = self.outcome, time.monotonic()
        try:
            with ExitStack() as stack:
                if self.guard is not None:
                    stack.enter_context(self.guard)
                began = time.monotonic()
                WAYS[self.plan.way](self)
        except Stopped as stopped:
            outcome.code, outcome.why = stopped.code, str(stopped)
        finally:
            outcome.seconds = time.monotonic() - began
            if self.log is not None:
                self.log.close()
        self.look()
        return outcome

    def look(self):
        outcome = self.outcome
        if self.engine is not None:
            outcome.precision = self.engine.precision
            outcome.kept = [rule.pattern for rule in self.engine.policy.rules]
        if self.guard is not None:
            # A disk may be slow on the day, which is nothing that a test is about.
            told = [event for event in self.guard.events if event.name != "checkpoint-late"]
            outcome.told = [event.name for event in told]
            outcome.late = len(self.guard.events) - len(told)
            outcome.messages = [event.message for event in told]
            outcome.passed_over = [list(place) for place in self.guard.passed_over]
        if outcome.code == 0 or not dist.is_initialized():  # or there may be nobody to gather from
            outcome.weights, outcome.loss = checksum(self.model, self.optimizer), self.loss_of_all()

    def loss_of_all(self):
        _, x, y = data().tensors
        model = getattr(self.model, "module", self.model)  # without DDP, which would meet the other rank
        model.eval()
        with torch.no_grad():
            return float(F.mse_loss(model(x), y))


def by_lightning(run):
    import pytorch_lightning as pl

    from ampwise.integrations.lightning import GuardCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = run.model

        def training_step(self, batch, index):
            run.guard = guard.guard
            return run.loss(*run.begin_step(*batch))

        def on_train_batch_end(self, *_):
            run.end_step(run.last_step)

        def configure_optimizers(self):
            return [run.optimizer], [{"scheduler": run.schedule, "interval": "step"}]

    guard = listening(GuardCallback, run)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    precision = {"bf16": "bf16-mixed", "fp32": "32-true"}[run.plan.precision]
    trainer = pl.Trainer(
        max_epochs=run.plan.epochs,
        precision=precision,
        gradient_clip_val=1.0,
        accelerator="cpu",
        callbacks=[guard],
        **quiet,
    )
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(Module(), run.loader)


def by_trainer(run):
    import transformers

    from ampwise.integrations.transformers import GuardCallback

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, *_, **__):
            run.guard = guard.guard
            with self.compute_loss_context_manager():
                return run.loss(*run.begin_step(*inputs["batch"]))

        def get_train_dataloader(self):
            return self.accelerator.prepare(run.loader_of_dicts())

    class Ends(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            run.end_step(run.last_step)

    guard = listening(GuardCallback, run)
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            num_train_epochs=run.plan.epochs,
            max_grad_norm=1.0,
            use_cpu=True,
            bf16=run.plan.precision == "bf16",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            logging_strategy="no",
            per_device_train_batch_size=BATCH,
        )
        trainer = Trainer(run.model, args, callbacks=[guard, Ends()], optimizers=(run.optimizer, run.schedule))
        trainer.train()


def listening(kind, run):
    """A callback whose guard tells the run what became of each step."""

    class Listening(kind):
        @property
        def guard(self):
            return self._its

        @guard.setter
        def guard(self, guard):
            self._its = guard
            if guard is not None:
                run.guard, real = guard, guard.end_step

                def end_step(loss):
                    run.last_step = real(loss)
                    return run.last_step

                guard.end_step = end_step

    return Listening(run.plan.directory, **run.options)


WAYS = {
    "engine": Run.train,
    "loop": Run.train,
    "own steps": Run.train,
    "lightning": by_lightning,
    "trainer": by_trainer,
}


def wrapped(model, wrap):
    if not dist.is_initialized():
        return model
    if wrap == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return nn.parallel.DistributedDataParallel(model)


def checksum(model, optimizer):
    """Of ranks, each has statistics of its own between two steps."""
    found = hashlib.sha256()
    values = [*(model.parameters() if dist.is_initialized() else model.state_dict().values())]
    values += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    for value in values:
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(directory, **options):
    """In this process."""
    return Run(Plan(directory=str(directory), **options)).to_the_end()


def cheap():
    """One thread, and no oneDNN, which sets up for a millisecond where a multiplication takes ten microseconds."""
    torch.set_num_threads(1)
    torch._C._set_mkldnn_enabled(False)


def main(text):
    """In a process of its own, which may be a rank."""
    plan = Plan(**json.loads(text))
    cheap()
    if plan.store:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{plan.store}", rank=rank, world_size=size)
    if plan.fault == "SIGTERM to the group":
        os.setpgid(0, 0)
    if plan.forbid_at:
        be_like_others()
    if plan.largest_file is not None:
        sys.dont_write_bytecode = True  # Python does not see that half of it is missing, nor do those who load it
        resource.setrlimit(resource.RLIMIT_FSIZE, (plan.largest_file, resource.RLIM_INFINITY))
    if plan.kill_at_fsync is not None:
        die_at(plan.kill_at_fsync)
    run = Run(plan)
    if plan.store:
        dist.barrier()
    if plan.kill_after_s is not None:
        killing = threading.Timer(plan.kill_after_s, os.kill, (os.getpid(), signal.Signals[plan.kill_with]))
        killing.daemon = True  # what is over before needs no killing
        killing.start()
    outcome = run.to_the_end()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    result = Path(plan.result.replace("RANK", str(run.rank)))
    aside = result.with_suffix(".new")
    aside.write_text(json.dumps(asdict(outcome)))
    aside.rename(result)  # all of it, or nothing: it may be killed now, too
    sys.exit(outcome.code)


if __name__ == "__main__":
    main(sys.argv[1])
