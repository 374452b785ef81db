"""Training in less memory: BF16 weights and 8-bit moments versus FP32 weights and AdamW, in time and bytes.

``python -m benchmarks.lowbit`` trains GPT-2 124M on a GPU, and a small GPT on a CPU. ``--part 7b`` counts a model of
7 B parameters, on any machine: docs/low_bit.md has its table from there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ampwise import Engine, make_optimizer, memory
from ampwise.tune.memory.allocation_log import ACTIVATIONS, COMPENSATION, GRADIENTS, PARAMETERS, STATE
from ampwise.tune.memory.result import Estimate
from ampwise.tune.train_case import make_factory
from benchmarks import subjects
from benchmarks.harness import Contender, Result, alternate, note, publish_parts

SEQUENCES = 4  # of 2,048 tokens
GB = 1e9
KINDS = (PARAMETERS, GRADIENTS, STATE, COMPENSATION, ACTIVATIONS)
# How weights are held, and the optimizer, from the most bytes to the fewest.
WAYS = (
    ("fp32", "adamw"),
    ("bf16", "adamw"),
    ("bf16-pure,kahan", "adamw"),
    ("bf16-pure", "adamw"),
    ("bf16", "adamw8bit"),
    ("bf16-pure,bf16-states", "adamw"),
    ("bf16-pure", "adamw8bit"),
    ("bf16-pure", "adamw4bit"),
)


def seven_billion() -> Result:
    """All of it derived: the same on every machine."""
    result = Result(
        name="lowbit_7b",
        title="Training 7 B parameters, in GB",
        claim=f"A decoder of 6.74 B parameters, {SEQUENCES} sequences of 2,048 tokens, a step counted by `ampwise "
        "memory` (derived, not measured). GB are 10⁹ bytes; each kind at its most, whenever that is: the peak is below "
        "their sum.",
        columns=["precision", "optimizer", "bytes a parameter", *KINDS, "peak", "peak, recomputed"],
    )
    for precision, optimizer in WAYS:
        note(f"{precision}, {optimizer}")
        plain, again = (counted(precision, optimizer, checkpointing=each) for each in (False, True))
        parts = [_gb(plain.most.get(kind, 0)) for kind in KINDS]
        each = round(plain.per_parameter / 6.738e9, 2)
        result.rows.append([precision, optimizer, each, *parts, _gb(plain.peak), _gb(again.peak)])
    result.notes.append("recomputed: with --checkpointing, activations of blocks are computed again.")
    return result


def counted(precision: str, optimizer: str, *, checkpointing: bool, batch: int = SEQUENCES) -> Estimate:
    """The model that `ampwise memory --params 7B` takes."""
    options: dict[str, Any] = {"optimizer": optimizer, "batch": batch, "checkpointing": checkpointing}
    return memory(params="7B", precisions=[precision], largest=False, **options).at(precision)


def _gb(nbytes: int) -> str | float:
    return round(nbytes / GB, 1) if nbytes else "–"


@dataclass
class Run:
    """A model in training."""

    precision: str
    optimizer: str

    def __post_init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        maker = make_factory(subjects.gpt2 if self.device == "cuda" else subjects.small_gpt)
        torch.manual_seed(0)
        self.subject = maker.make(self.device, None)
        optimizer = make_optimizer(self.optimizer, self.subject.model, lr=1e-5)
        self.engine = Engine(self.subject.model, optimizer, self.precision, clip_norm=1.0, trace=False)

    def step(self) -> None:
        self.engine.step(self.subject.loss_fn, *self.subject.args, **self.subject.kwargs)

    def peak(self) -> float:
        """GB of a step in the midst of training, on a GPU."""
        for _ in range(2):
            self.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        return torch.cuda.max_memory_allocated() / GB


def steps() -> Result:
    """Step time, in turns with FP32 weights under autocast; and the peak."""
    on_gpu = torch.cuda.is_available()
    result = Result(
        name=f"lowbit_{'gpu' if on_gpu else 'cpu'}",
        title=f"A step with BF16 weights or coded moments, {'GPT-2 124M' if on_gpu else 'a small GPT'}",
        claim="Whole steps of an Engine with clip_norm, against FP32 weights with fused AdamW under BF16 autocast, "
        "measured in turns. GB are 10⁹ bytes.",
        columns=["precision", "optimizer", "ms a step", "times the first", "peak, GB"],
    )
    for row in _measured(on_gpu):
        result.rows.append(row)
        note(f"{row}")
    return result


def _measured(on_gpu: bool) -> Iterator[list[str | float]]:
    # Torchao compiles its own, for minutes on a CPU.
    ways = [way for way in WAYS[1:] if on_gpu or way[1] == "adamw"]
    peaks = {way: round(_peak(*way), 2) if on_gpu else "–" for way in ways}  # while there is nothing else
    first = Run(*ways[0])
    for way in ways:
        run = Run(*way)
        contenders = [Contender(name="first", work=first.step), Contender(name="other", work=run.step)]
        one, other = alternate(contenders, rounds=10 if on_gpu else 3, calls=5 if on_gpu else 1)
        yield [*way, round(other.median_ms, 2), round(other.ratio(one), 3), peaks[way]]
        del run, contenders
        gc.collect()


def _peak(precision: str, optimizer: str) -> float:
    gc.collect()
    torch.cuda.empty_cache()
    return Run(precision, optimizer).peak()


if __name__ == "__main__":
    publish_parts("lowbit", __doc__ or "", {"steps": steps, "7b": seven_billion}, only_on_gpu=())
