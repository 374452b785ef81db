"""A small GPT trained on a real text in each precision: the final loss relative to FP32.

The text is Milton's "Paradise Lost" (1667), by letters, which is read 17 times; the last tenth is held back. With
``--text python`` it is that of ``benchmarks.equal_loss``, which is too long to learn by heart. Every run starts from
the same weights and sees the same batches in the same order, so only rounding differs. FP32 with a second seed of
batches shows the effect of another order alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ampwise.errors import AmpwiseError
from ampwise.train.engine import Engine
from ampwise.train.float8.recipe import Fp8
from benchmarks import equal_loss
from benchmarks.gpt import GPT, Shape
from benchmarks.harness import Result, note

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TEXT = Path(__file__).parent / "data" / "paradise_lost.txt"
HELD_BACK = 0.1
SHAPE = Shape(name="GPT 5M", layers=6, width=256, heads=8, vocabulary=80, length=128, batch=32)
ON_CPU = Shape(name="GPT, two layers", layers=2, width=64, heads=2, vocabulary=80, length=64, batch=8)
STEPS = 2000 if ON_GPU else 60
LAST = STEPS // 10  # whose mean is the final loss
VALIDATION = 40  # batches
LR, WARM_UP, CLIP = 1e-3, STEPS // 20, 1.0
WITHIN = 0.01
MILTON, PYTHON = "milton", "python"
CALLED = {MILTON: "a real text", PYTHON: "a text too long to learn by heart"}
POINTS = 20  # of a curve
FP8 = ("current", "delayed", "block", "tensorwise", "rowwise", "rowwise+hp-weight-grad")
MX = ("emulate:mxfp8", "emulate:mxfp8,up", "emulate:mxfp6", "emulate:mxfp4", "emulate:mxfp4,up")
NVFP4 = ("", ",four-over-six", ",eden", ",nearest", ",plain", ",plain,stochastic")
EMULATED = (*MX, *(f"emulate:nvfp4{options}" for options in NVFP4))
PLAIN = ("fp32", "fp32 again", "bf16", "fp16", "bf16-pure")
WITHOUT_GRAPHS = ("fp8", "bf16-pure")
OTHER_ORDER = "fp32 again"
# Few CPUs multiply in 16 bits at a pace that would end.
WAYS = (*PLAIN, *(f"fp8 {recipe}" for recipe in FP8), *EMULATED) if ON_GPU else ("fp32", OTHER_ORDER, *EMULATED)


@dataclass(frozen=True, kw_only=True)
class Run:
    """How one ended."""

    way: str
    loss: float  # mean of the last steps
    validation: float
    skipped: int
    seconds: float
    curve: list[float]  # means along the way


def paradise_lost() -> tuple[Tensor, Tensor]:
    """Letters as numbers, to train on and held back."""
    letters = TEXT.read_text(encoding="ascii")
    numbers = {letter: number for number, letter in enumerate(sorted(set(letters)))}
    everything = torch.tensor([numbers[letter] for letter in letters], device=DEVICE)
    held_back = int(len(everything) * HELD_BACK)
    return everything[:-held_back], everything[-held_back:]


def python() -> tuple[Tensor, Tensor]:
    """Bytes of Python sources."""
    text = equal_loss.text()
    return text.train, text.held


TEXTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {MILTON: paradise_lost, PYTHON: python}


class Text:
    """Batches of letters."""

    def __init__(self, name: str, shape: Shape) -> None:
        self._train, self._held_back = TEXTS[name]()
        self._shape = shape

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        numbers = torch.Generator().manual_seed(seed)
        while True:
            yield self._batch(self._train, numbers)

    def held_back(self) -> list[tuple[Tensor, Tensor]]:
        numbers = torch.Generator().manual_seed(0)
        return [self._batch(self._held_back, numbers) for _ in range(VALIDATION)]

    def _batch(self, letters: Tensor, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        length = self._shape.length
        starts = torch.randint(len(letters) - length - 1, (self._shape.batch, 1), generator=numbers)
        taken = letters[(starts + torch.arange(length + 1)).to(DEVICE)].long()
        return taken[:, :-1].contiguous(), taken[:, 1:].contiguous()


def trained(way: str, name: str = MILTON) -> Run:
    """One run."""
    shape = shape_for(name)
    torch.manual_seed(0)
    model, text = GPT(shape).to(DEVICE), Text(name, shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=ON_GPU)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_up_then_cosine)
    engine = _engine(way, model, optimizer, scheduler)
    losses, began = [], time.perf_counter()
    for step, batch in zip(range(STEPS), text.batches(1 if way == OTHER_ORDER else 0), strict=False):
        losses.append(engine.step(model, *batch))
        if step % 200 == 199:
            note(f"{way}: step {step + 1}, loss {losses[-1].loss:.4f}")
    values = [step.loss for step in losses]
    with torch.no_grad(), engine.autocast():
        validation = statistics.fmean(float(model(*batch)) for batch in text.held_back())
    every = STEPS // POINTS
    return Run(
        way=way,
        loss=statistics.fmean(values[-LAST:]),
        validation=validation,
        skipped=engine.skipped_steps,
        seconds=time.perf_counter() - began,
        curve=[statistics.fmean(values[start : start + every]) for start in range(0, STEPS, every)],
    )


def shape_for(name: str) -> Shape:
    shape = SHAPE if ON_GPU else ON_CPU
    return shape if name == MILTON else replace(shape, vocabulary=equal_loss.BYTES)


def _engine(way: str, model: GPT, optimizer: torch.optim.Optimizer, scheduler: object) -> Engine:
    precision, _, recipe = way.partition(" ")
    engine = Engine(
        model,
        optimizer,
        precision=_fp8(recipe) if precision == "fp8" else precision,
        clip_norm=CLIP,
        scheduler=scheduler,
        trace=False,
        graph=ON_GPU and precision not in WITHOUT_GRAPHS,
    )
    engine.history.limit = STEPS
    return engine


def _fp8(recipe: str) -> Fp8:
    """All linear layers, small as they are: the first and the last, too."""
    return Fp8(recipe=recipe, narrow=("blocks.*",))


def _warm_up_then_cosine(step: int) -> float:
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, STEPS - WARM_UP)
    return 0.1 + 0.45 * (1 + torch.cos(torch.tensor(torch.pi * done)).item())


def table(runs: Sequence[Run], name: str = MILTON) -> Result:
    """All of them against FP32."""
    shape, by_way = shape_for(name), {run.way: run for run in runs}
    wide = by_way["fp32"]
    result = Result(
        name="_".join(["convergence", *([name] if name != MILTON else []), "gpu" if ON_GPU else "cpu"]),
        title=f"How a small GPT trains on {CALLED[name]} in each precision",
        claim=f"The final loss is within {WITHIN:.0%} of FP32's, or the table says that it is not.",
        columns=["precision", "final loss", "against FP32", "within 1%", "held-back loss", "against FP32 ", "skipped"],
    )
    for way in WAYS:
        if way in by_way:
            run = by_way[way]
            apart, beyond = run.loss / wide.loss - 1, run.validation / wide.validation - 1
            within = "" if way == "fp32" else "yes" if abs(apart) <= WITHIN else "no"
            cells = [f"{run.loss:.4f}", f"{apart:+.2%}", within, f"{run.validation:.4f}", f"{beyond:+.2%}"]
            result.rows.append([way, *cells, str(run.skipped)])
    result.notes += [
        f"{shape.name}: {shape.layers} layers, width {shape.width}, {shape.batch}×{shape.length} letters a step, "
        f"{STEPS} steps, AdamW, warm-up and cosine, clipped to {CLIP}. The final loss is the mean of the last {LAST}.",
        *([f"Text: {equal_loss.text().facts}."] if name == PYTHON else []),
        f"Same weights, same batches in the same order; {OTHER_ORDER!r} has another order: that much is chance.",
        "fp8: every linear layer of the blocks, the smallest too, though none of them gains time at this size.",
        "emulate:nvfp4: the published recipe, which leaves about a sixth of the blocks, the head and the matmuls of "
        "attention in BF16; 'nearest' rounds its gradients to nearest, 'eden' by MS-EDEN. 'plain' rounds every "
        "matmul, one as the other.",
    ]
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--way", choices=WAYS, action="append", help="only these (default: all)")
    parser.add_argument("--text", choices=TEXTS, default=MILTON)
    parser.add_argument("--keep", type=Path, help="a folder for the runs, which may be made by several processes")
    given = parser.parse_args(arguments)
    runs = []
    for way in given.way or WAYS:
        try:
            runs.append(trained(way, given.text))
        except AmpwiseError as error:
            note(f"{way}: {error}")
            continue
        if given.keep is not None:
            _keep(given.keep, runs[-1])
    if given.keep is not None:
        runs = [Run(**json.loads(file.read_text())) for file in sorted(given.keep.glob("run_*.json"))]
    if any(run.way == "fp32" for run in runs):
        table(runs, given.text).publish()


def _keep(folder: Path, run: Run) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"run_{WAYS.index(run.way):02}.json"
    file.write_text(json.dumps(asdict(run)))


if __name__ == "__main__":
    main()
