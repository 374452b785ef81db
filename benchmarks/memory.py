"""Memory of whole training steps: the prediction of `ampwise memory` without a GPU, and what torch measures on one.

``python -m benchmarks.memory`` on a Hopper GPU; ``--model`` and ``--precision`` choose, ``--details FILE`` keeps, of
each row, the memory phase by phase, and the sizes of tensors in which prediction and device differ at the peak. A
second part tests whether the largest batch that is predicted to fit does.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.nn.utils import clip_grad_norm_

from ampwise.train.fp8_plugin import Fp8Plugin
from ampwise.train.low_bit.optimizers import make_optimizer
from ampwise.train.low_bit.pure_bf16 import PURE
from ampwise.train.precision.contexts import PrecisionContexts
from ampwise.train.precision.policy import Policy
from ampwise.train.precision.precision import PRECISIONS, TrainPrecision, precision_named
from ampwise.train.precision_plugin import PrecisionPlugin
from ampwise.train.pure_bf16_plugin import PureBf16Plugin
from ampwise.tune.memory.allocation_log import AllocationLog, rounded
from ampwise.tune.memory.allocator import MemoryUsage
from ampwise.tune.memory.device_memory import cublas_workspaces
from ampwise.tune.memory.estimate import memory
from ampwise.tune.memory.setup import TrainingSetup, checkpointed, repeated_blocks
from ampwise.tune.memory.tracker import BACKWARD, CLIP, FORWARD, FP8, UPDATE
from ampwise.tune.train_case import CaseFactory, make_factory
from benchmarks import subjects
from benchmarks.harness import Result, note

MIB = 2**20
WORKSPACES = cublas_workspaces((9, 0))
WARM_UP = 3  # steps before the one that is measured
TASKS: tuple[tuple[str, Callable[..., Any], tuple[int, ...]], ...] = (
    ("relevance scorer", subjects.relevance, (16, 64)),
    ("ResNet-50", subjects.resnet50, (32, 128)),
    ("GPT-2 124M", subjects.gpt2, (4, 16)),
    ("GPT 1.3B", subjects.gpt_1_3b, (2, 8)),
)
Details = dict[str, Any]


def predicted(maker: CaseFactory, batch: int, precision: str) -> tuple[MemoryUsage, AllocationLog]:
    """From fake tensors on the CPU."""
    step = TrainingSetup(maker, optimizer="adamw", workspaces=WORKSPACES).step(PRECISIONS[precision], batch)
    return step.usage, step.log


class Measured:
    """A training step on the GPU by torch's own means, whose phases can be told apart."""

    def __init__(
        self,
        maker: CaseFactory,
        batch: int,
        precision: str,
        *,
        optimizer: str = "adamw",
        checkpointing: bool = False,
        compiled: bool = False,
        fsdp: int = 1,
    ) -> None:
        self.subject = maker.make("cuda", batch)
        self.precision = precision_named(precision)
        model = self.subject.model
        if fsdp > 1:
            _shard(model, fsdp, self.precision)
        self.optimizer = make_optimizer(optimizer, self.subject.parameters)
        self.plugin = PrecisionPlugin()
        if self.precision.pure is not None:
            self.plugin = PureBf16Plugin([model], Policy(PURE), [self.optimizer], self.precision.pure)
        elif precision == FP8:
            self.plugin = Fp8Plugin([model], Policy(FP8), None, torch.device("cuda"))
        self.plugin.install()
        self.around = partial(checkpointed, model, maker.name) if checkpointing else nullcontext
        if compiled:
            model.compile()
        self.arithmetic = PrecisionContexts(self.precision, "cuda")
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.precision.scaled)
        self.phases: dict[str, dict[str, int]] = {}

    def step(self) -> None:
        with self.arithmetic.pass_context(), self.around():
            with self.arithmetic.forward():
                loss = self.subject.loss()
            self._ends(FORWARD)
            self.scaler.scale(loss).backward()
            self._ends(BACKWARD)
        self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.subject.parameters, 1.0)
        self._ends(CLIP)
        with self.plugin.step_context(self.optimizer):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self._ends(UPDATE)
        self.optimizer.zero_grad(set_to_none=True)

    def _ends(self, phase: str) -> None:
        torch.cuda.synchronize()
        self.phases[phase] = {"peak": torch.cuda.max_memory_allocated(), "after": torch.cuda.memory_allocated()}
        torch.cuda.reset_peak_memory_stats()

    def run(self) -> dict[str, Any]:
        for _ in range(WARM_UP):
            self.step()
        before = torch.cuda.memory_allocated()
        reserved = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        peak = max(phase["peak"] for phase in self.phases.values())
        return {
            "before": before,
            "phases": self.phases,
            "reserved": reserved,
            "peak": peak,
            "outside": _outside(),
            "sizes": self._sizes(),
        }

    def _sizes(self) -> dict[int, int]:
        """How many blocks of each size are allocated at the peak of a step, by torch's own history of allocations."""
        alive = Counter(
            rounded(block.get("requested_size", block["size"]))
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        )
        torch.cuda.memory._record_memory_history(enabled="all", context=None)
        try:
            self.step()
            events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        return _at_peak(alive, events)


def _shard(model: Module, ranks: int, precision: TrainPrecision) -> None:
    """Shard a model with FSDP2 over ranks of which only this one exists: nothing is communicated, memory is real."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    options: Any = {
        "mesh": init_device_mesh("cuda", (ranks,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=precision.dtype),
    }
    for block in repeated_blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)


def _outside() -> int:
    """What is in use on the device and is not torch's: CUDA's context, loaded kernels."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


def _at_peak(alive: Counter[int], events: Sequence[dict[str, Any]]) -> dict[int, int]:
    level, most, best = sum(size * count for size, count in alive.items()), 0, Counter[int]()
    current = Counter(alive)
    for event in events:
        sign = {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
        size = rounded(event["size"])
        current[size] += sign
        level += sign * size
        if sign and level > most:
            most, best = level, Counter(current)
    return {size: count for size, count in best.items() if count}


def difference(measured: dict[int, int], log: AllocationLog) -> list[str]:
    """The sizes of which the device has more (+) or fewer (−) blocks at its peak, the largest sum of bytes first."""
    guess = Counter(rounded(log.sizes[block]) for block in log.alive(log.peak_at(*log.phases)))
    unequal = {size: measured.get(size, 0) - guess.get(size, 0) for size in {*measured, *guess}}
    worst = sorted((size for size in unequal if unequal[size]), key=lambda size: -abs(size * unequal[size]))
    return [f"{unequal[size]:+d} × {size / MIB:.3f} MiB" for size in worst[:12]]


def row(name: str, maker: CaseFactory, batch: int, precision: str) -> Details:
    """Prediction and measurement of one case; what fails is in it too."""
    found: Details = {"model": name, "batch": batch, "precision": precision}
    try:
        usage, log = predicted(maker, batch, precision)
        found["predicted"] = {
            "peak": usage.peak,
            "reserved": usage.reserved,
            "phase": usage.phase,
            "phases": dict(usage.phases),
            "after": {phase.name: sum(log.split(phase.end).values()) + WORKSPACES for phase in log.phases},
            "split": dict(usage.split),
        }
        if torch.cuda.is_available():
            found["measured"] = measured = Measured(maker, batch, precision).run()
            found["difference"] = difference(measured.pop("sizes"), log)
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {str(error)[:500]}"
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return found


def told(found: Details) -> list[str]:
    """A row's numbers, phase by phase, in MiB."""
    name = f"{found['model']}, batch {found['batch']}, {found['precision']}"
    if "failed" in found:
        return [f"{name}: FAILED: {found['failed']}"]
    guess, measured = found["predicted"], found.get("measured")
    lines = [f"{name}: predicted {guess['peak'] / MIB:.1f} in {guess['phase']}, reserved {guess['reserved'] / MIB:.0f}"]
    lines.append("  split " + ", ".join(f"{kind} {size / MIB:.1f}" for kind, size in guess["split"].items()))
    if measured is None:
        return lines
    lines[0] += (
        f"; measured {measured['peak'] / MIB:.1f}, reserved {measured['reserved'] / MIB:.0f}; "
        f"ratio {guess['peak'] / measured['peak']:.4f}"
    )
    outside = measured["outside"] / MIB
    lines.append(f"  before the step: measured {measured['before'] / MIB:.1f}; outside of torch {outside:.0f}")
    for phase, sizes in measured["phases"].items():
        lines.append(
            f"  {phase}: peak {guess['phases'][phase] / MIB:.1f} against {sizes['peak'] / MIB:.1f}, "
            f"after it {guess['after'][phase] / MIB:.1f} against {sizes['after'] / MIB:.1f}"
        )
    lines.append("  at the peak the device has " + "; ".join(found["difference"]))
    return lines


def as_row(found: Details) -> list[str | float]:
    guess, measured = found.get("predicted"), found.get("measured")
    cells: list[str | float] = [found["model"], float(found["batch"]), found["precision"]]
    cells.append(guess["peak"] / 1e9 if guess else "failed")
    cells.append(measured["peak"] / 1e9 if measured else "failed" if "failed" in found else "no GPU")
    cells.append(guess["peak"] / measured["peak"] if guess and measured else "")
    return cells


def run(models: Sequence[str], precisions: Sequence[str], details: Path) -> Result:
    result = Result(
        name="memory_gpu",
        title="Memory of a training step, predicted and measured",
        claim="The peak of a whole step (forward, backward, clip, fused AdamW), predicted from fake tensors without a "
        "GPU, against torch.cuda.max_memory_allocated(). GB are 10⁹ bytes.",
        columns=["model", "batch", "precision", "predicted, GB", "measured, GB", "ratio"],
    )
    rows: list[Details] = []
    for name, function, batches in TASKS:
        if models and not any(asked.lower() in name.lower() for asked in models):
            continue
        for batch in batches:
            for precision in precisions:
                rows.append(row(name, make_factory(function), batch, precision))
                print("\n".join(told(rows[-1])), flush=True)
                result.rows.append(as_row(rows[-1]))
                details.write_text(json.dumps(rows, indent=1))  # after each: what is there stays, whatever comes
                note(f"{name}, {batch}, {precision}")
    ratios = [cells[-1] for cells in result.rows if isinstance(cells[-1], float)]
    if ratios:
        worst = max(abs(ratio - 1) for ratio in ratios)
        result.notes.append(f"Farthest from the measurement: {100 * worst:.1f} %.")
    return result


def largest() -> Result:
    """Whether the largest batch that is said to fit does, and one of a twentieth more does not."""
    result = Result(
        name="memory_largest_gpu",
        title="The largest batch, predicted and tried",
        claim="The largest batch with which training in BF16 fits this GPU, predicted without it; then a few steps "
        "with it, and with 5 % more.",
        columns=["model", "predicted", "fits", "5 % more"],
    )
    for name, function, _ in TASKS:
        maker = make_factory(function)
        predicted_rows = memory(function, precisions=["bf16"], optimizer="adamw").largest_batch
        rows = (predicted_rows or {})["bf16"]
        more = rows + max(1, rows // 20)
        result.rows.append([name, float(rows), _tried(maker, rows), _tried(maker, more)])
        note(f"{name}: {result.rows[-1]}")
    return result


def _tried(maker: CaseFactory, rows: int) -> str:
    try:
        step = Measured(maker, rows, "bf16")
        for _ in range(WARM_UP):
            step.step()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        return f"yes, {retries} retries" if retries else "yes"
    except torch.cuda.OutOfMemoryError:
        return "out of memory"
    finally:
        step = None  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_accumulated_memory_stats()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--part", choices=("rows", "largest"), action="append", help="only this one")
    parser.add_argument("--model", action="append", default=[], help="only models with this in their name")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="only this one; may be given again")
    parser.add_argument("--details", type=Path, default=Path(tempfile.gettempdir(), "ampwise_memory.json"))
    args = parser.parse_args(arguments)
    parts = args.part or ("rows", "largest")
    if "rows" in parts:
        result = run(args.model, args.precision or list(PRECISIONS), args.details)
        print(f"details in {args.details}")
        if torch.cuda.is_available():
            result.publish()
    if "largest" in parts and torch.cuda.is_available():
        largest().publish()


if __name__ == "__main__":
    main()
