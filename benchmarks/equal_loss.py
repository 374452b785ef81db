"""Time to equal held-back loss: a compiled GPT in BF16, in FP8 everywhere, and in FP8 where it was measured to pay.

The text is the Python source that torch and the standard library install, by bytes; every twentieth file, by its name,
is held back. Runs of a seed start from the same weights and see the same batches. On a CPU: a tiny GPT, FP32 and BF16.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ampwise import Fp8
from ampwise.tune.bench.equal_loss import equal_loss
from ampwise.tune.bench.equal_loss_result import EqualLoss, EqualLossRow, Interval
from benchmarks.gpt import GPT, GPT_ONE_LAYER, Shape
from benchmarks.harness import Result, note

__all__ = ["main"]

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BYTES = 256  # the vocabulary
HELD_OUT_OF = 20  # files, one
HELD_BATCHES = 12 if ON_GPU else 2
SHAPE = Shape(name="GPT 202M", layers=4, width=2048, heads=16, vocabulary=BYTES, length=1024, batch=8)
ON_CPU = replace(GPT_ONE_LAYER, vocabulary=BYTES)
ARMS: Mapping[str, Any] = {
    "BF16": "bf16", "FP8": Fp8(), "FP8 measured": Fp8("measured", backend="ampwise"), "FP8 auto": Fp8("auto")
}  # fmt: skip
CPU_ARMS: Mapping[str, Any] = {"FP32": "fp32", "BF16": "bf16"}
LR = 2e-4
BUDGET_S, SEEDS = (300.0, 3) if ON_GPU else (20.0, 2)
COLUMNS = [
    "precision", "step ms", "× a step", "held-back loss at the end", "equal loss", "× the steps", "× at equal loss",
    "each seed", "verdict",
]  # fmt: skip


class Text:
    """Bytes of files, in one tensor each for those to train on and those held back."""

    def __init__(self, files: Sequence[Path], root: Path) -> None:
        parts: dict[bool, list[bytes]] = {False: [], True: []}
        for file in files:
            name = file.relative_to(root).as_posix().encode()
            parts[zlib.crc32(name) % HELD_OUT_OF == 0].append(file.read_bytes() + b"\0")
        train, held = (b"".join(parts[held]) for held in (False, True))
        self.train, self.held = _tensor(train), _tensor(held)
        begins = hashlib.sha256(train + held).hexdigest()[:12]
        self.facts = (
            f"{len(files):,} files, {(len(train) + len(held)) / 1e6:.1f} MB, of which {len(held) / 1e6:.2f} MB are "
            f"held back; their SHA-256 begins with {begins}"
        )


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(DEVICE)


@functools.cache
def text() -> Text:
    """Files of the installed Python and torch, in the order of their names."""
    library, package = Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent
    site = Path(sysconfig.get_paths()["purelib"])
    files = [
        *(file for file in sorted(library.rglob("*.py")) if site not in file.parents and "packages" not in str(file)),
        *(sorted(package.rglob("*.py")) if ON_GPU else ()),
    ]
    return Text(files, Path(files[0].anchor))


def _windows(letters: Tensor, shape: Shape, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(letters) - shape.length - 1, (shape.batch, 1), generator=numbers)
    taken = letters[(starts + torch.arange(shape.length + 1)).to(DEVICE)].long()
    return taken[:, :-1].contiguous(), taken[:, 1:].contiguous()


def make() -> Any:
    """A GPT with batches that the seed decides, and batches that are the same for all."""
    shape = SHAPE if ON_GPU else ON_CPU
    model = GPT(shape).to(DEVICE)
    if ON_GPU:
        model.compile_parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=ON_GPU)
    return model, (_batches(shape, torch.initial_seed()), _held_back(shape)), model, optimizer


def _batches(shape: Shape, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(seed)
    while True:
        yield _windows(text().train, shape, numbers)


def _held_back(shape: Shape) -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(0)
    return [_windows(text().held, shape, numbers) for _ in range(HELD_BATCHES)]


def compared(budget_s: float) -> EqualLoss:
    found = equal_loss(
        make, ARMS if ON_GPU else CPU_ARMS, budget_s=budget_s, seeds=SEEDS, device=DEVICE,
        progress=lambda done, total, doing: note(f"{done}/{total} {doing}"),
    )  # fmt: skip
    print(found)
    return found


def tables(found: EqualLoss) -> list[Result]:
    """The verdicts, and the curves behind them."""
    shape, where = (SHAPE, "gpu") if ON_GPU else (ON_CPU, "cpu")
    title = f"{shape.name}, {shape.layers} layers of width {shape.width}, {shape.tokens:,} bytes a step"
    verdicts = Result(
        name=f"equal_loss_{where}",
        title=f"Time to equal held-back loss: {title}",
        claim=f"× at equal loss: the time that {found.base} takes to the lowest held-back loss that both reach, over "
        "its own; in parentheses 95% intervals by a bootstrap over seeds, in pairs, and held-back batches.",
        columns=COLUMNS,
        rows=[_row(row, found.base) for row in found.rows],
        notes=[
            f"Text: Python sources of the standard library{' and torch' if ON_GPU else ''}: {text().facts}.",
            f"{found.points[-1]:,} steps, {SEEDS} seeds, AdamW at a constant learning rate of {LR:g}, clipped to 1.0, "
            f"weights in FP32{', compiled block by block' if ON_GPU else ''}. Held-back losses: {HELD_BATCHES} "
            f"batches, {len(found.points)} times a run.",
            "Times of a step are medians of stretches between held-back losses, without the first; compiling, FP8's "
            "timing of layers and held-back losses are not in them.",
            *(f"{row.label}: {row.problem}." for row in found.rows if row.problem),
        ],
    )
    labels = [row.label for row in found.rows]
    curves = Result(
        name=f"equal_loss_{where}_curves",
        title=f"Held-back loss over time: {title}",
        claim="Means over seeds and held-back batches; seconds are steps times the median time of a step.",
        columns=["step", *(f"{label} {what}" for label in labels for what in ("s", "loss"))],
    )
    for place, steps in enumerate(found.points):
        cells: list[str | float] = [float(steps)]
        for row in found.rows:
            mean = fmean(fmean(run.losses[place]) for run in found.runs if run.label == row.label)
            cells += [steps * row.step_s, f"{mean:.4f}"]
        curves.rows.append(cells)
    return [verdicts, curves]


def _row(row: EqualLossRow, base: str) -> list[str | float]:
    def shown(interval: Interval | None) -> str:
        return "" if interval is None else interval.text

    return [
        row.label,
        1e3 * row.step_s,
        shown(row.speed),
        f"{row.final:.4f}",
        "" if row.target is None else f"{row.target:.4f}",
        "" if row.steps is None else f"{row.steps:.3f}",
        shown(row.gain),
        ", ".join("-" if each is None else f"{each:.2f}" for each in row.by_seed),
        "" if row.label == base else row.verdict,
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    import argparse

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of training in all")
    for result in tables(compared(parser.parse_args(arguments).budget)):
        result.publish()


if __name__ == "__main__":
    main()
