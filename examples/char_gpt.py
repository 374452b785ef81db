"""Train a small character-level GPT in FP16 for a minute, and see what each layer's gradients would lose.

The training step is the one to copy: the engine runs the loss function under autocast and the backward pass outside
it, scales, clips, steps, and does not advance the schedule on a skipped step. It reads the gradients once, and counts
them by powers of two (`engine.census`). Censuses can be added, so those of all steps become one for each layer, which
shows what any format would flush to zero at any loss scale, without another run.

    python examples/char_gpt.py --steps 20             a quick look; without --steps, a minute on two slow cores
    python examples/char_gpt.py --scale-exponent 24    start too high: watch the scaler back off
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from math import log2
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

import ampwise
from ampwise import Census
from ampwise.finding import strict_json
from ampwise.finding.terminal import console
from ampwise.numbers.formats import Format, find_scalar_format

TEXT = Path(__file__).with_name("text.txt")
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 128, 4, 128, 8
LEARNING_RATE, WARMUP_STEPS, MAX_NORM = 2e-3, 20, 1.0
FORMATS = [find_scalar_format(name) for name in ("fp16", "bf16", "e4m3", "e5m2")]
WHOLE = "whole model"
COLUMNS = 110  # of the terminal, with all formats side by side
Batch = tuple[Tensor, Tensor]
Rows = dict[str, Census]


def as_on_tensor_cores(operation: Callable[..., Tensor], *operands: Tensor, **options: bool) -> Tensor:
    """Run ``operation`` as autocast does on a GPU: FP16 operands, sums in FP32, an FP16 result.

    Left to itself, CPU autocast would use FP16 routines that on many CPUs are a hundred times slower. The casts
    round operands, results and, in the backward pass, gradients: these underflow and overflow as on a GPU.
    """
    if not torch.is_autocast_enabled("cpu"):
        return operation(*operands, **options)
    with torch.autocast("cpu", enabled=False):
        return operation(*(operand.half().float() for operand in operands), **options).half()


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return as_on_tensor_cores(F.linear, x, self.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = nn.ModuleList([Linear(WIDTH, 3 * WIDTH, bias=False), Linear(WIDTH, WIDTH, bias=False)])
        self.mlp = nn.ModuleList([Linear(WIDTH, 4 * WIDTH, bias=False), Linear(4 * WIDTH, WIDTH, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        split, join = self.attention
        heads = split(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = as_on_tensor_cores(F.scaled_dot_product_attention, *heads, is_causal=True)
        x = x + join(mixed.transpose(1, 2).flatten(-2))
        widen, narrow = self.mlp
        return x + narrow(F.relu(widen(self.norms[1](x))))  # type: ignore[no-any-return] # FP16 GELU is slow on CPUs


class CharGPT(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embedding = nn.ModuleList([nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)])
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.final_norm = nn.LayerNorm(WIDTH)
        self.head = Linear(WIDTH, letters, bias=False)
        for matrix in (parameter for parameter in self.parameters() if parameter.ndim == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, letters: Tensor) -> Tensor:
        tokens, places = self.embedding
        x = tokens(letters) + places(torch.arange(letters.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))  # type: ignore[no-any-return]


def row_of(parameter: str) -> str:
    """Return the row that a parameter is counted in: ``blocks.2.mlp.0.weight`` is part of ``block 3 mlp``."""
    first, second, third, *_ = [*parameter.split("."), ""]
    return f"block {int(second) + 1} {third}" if first == "blocks" else first.replace("_", " ")


def batches(text: str, seed: int = 0) -> Iterator[Batch]:
    """Yield random windows of the text as letter numbers, each with the same window shifted by one letter."""
    alphabet = {letter: number for number, letter in enumerate(sorted(set(text)))}
    windows = torch.tensor([alphabet[letter] for letter in text]).unfold(0, CONTEXT + 1, 1)
    generator = torch.Generator().manual_seed(seed)
    while True:
        picked = windows[torch.randint(len(windows), (BATCH,), generator=generator)]
        yield picked[:, :-1], picked[:, 1:]


def by_row(counted: ampwise.DeviceCensus) -> Rows:
    """Return the census of the gradients by layer, and of the whole model."""
    return {**counted.grouped(row_of), WHOLE: counted.total()}


class Training:
    """Training state and what was measured: ``rows`` hold unscaled gradients."""

    def __init__(self, model: nn.Module, scale_exponent: int) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.05, total_iters=WARMUP_STEPS)
        self.engine = ampwise.Engine(
            model,
            self.optimizer,
            precision="fp16",
            clip_norm=MAX_NORM,
            scheduler=self.scheduler,
            scaling={"init_scale": 2.0**scale_exponent},
        )
        self.rows: Rows = {}
        self.losses: list[float] = []

    @property
    def skipped(self) -> int:
        return self.engine.skipped_steps

    @property
    def scale(self) -> float:
        return self.engine.scaler.get_scale()

    @property
    def scale_exponent(self) -> int:
        return round(log2(self.scale))  # exact: it starts at a power of two and moves by them

    def __str__(self) -> str:
        state = f"steps {len(self.losses)}, skipped {self.skipped}, loss scale {self.scale:.0f}"
        return f"{state}, loss {self.losses[0]:.2f} → {self.losses[-1]:.2f}"

    def loss(self, letters: Tensor, nexts: Tensor) -> Tensor:
        logits = self.model(letters).float()  # the loss is a sum of exponentials: FP32 only
        return F.cross_entropy(logits.flatten(0, 1), nexts.flatten())

    def step(self, batch: Batch) -> None:
        """Train one step. Copy this; on a GPU, reading an attribute of a step syncs."""
        step = self.engine.step(self.loss, *batch)
        self.losses.append(step.loss)
        if step.applied:  # otherwise there are infs among the gradients
            counted = by_row(self.engine.census())  # unscaled, and before clipping
            self.rows = {name: census + self.rows.get(name, Census()) for name, census in counted.items()}

    def zeroed_by_autocast(self, batch: Batch, scale_exponent: int) -> str:
        """Return the share of one batch's gradients that are not zero in FP32 and are zero under FP16 autocast."""
        parameters = list(self.model.parameters())
        wide = torch.autograd.grad(self.loss(*batch), parameters)
        with self.engine.autocast():
            loss = self.loss(*batch)
        narrow = torch.autograd.grad(loss * 2.0**scale_exponent, parameters)
        if not all(n.isfinite().all() for n in narrow):
            return "unknown, for it overflows"
        zeroed = sum(int(((w != 0) & (n == 0)).sum()) for w, n in zip(wide, narrow, strict=True))
        return percent(zeroed, sum(int(w.count_nonzero()) for w in wide)) + "%"


def train(training: Training, data: Iterator[Batch], err: Console, *, seconds: float, steps: int | None) -> None:
    """Train for so many seconds or steps, or until Ctrl-C. Progress goes to ``err``, live on a terminal."""
    start, next_line_s = time.monotonic(), 0.0  # without a terminal, a line every five seconds
    fits = shutil.get_terminal_size((err.width, 24)).columns >= err.width  # a wrapped line cannot be redrawn
    live = err.status("starting") if err.file.isatty() and fits else None
    try:
        with live or nullcontext():
            while steps is None or len(training.losses) < steps:
                training.step(next(data))
                spent_s = time.monotonic() - start
                if live:
                    live.update(f"{spent_s:.0f} s   {training}")
                elif spent_s >= next_line_s:
                    err.print(f"{spent_s:3.0f} s   {training}")
                    next_line_s = spent_s + 5
                if spent_s >= seconds:
                    return
    except KeyboardInterrupt:
        err.print("Stopped early. Results until then:")


def scales_for(fmt: Format, rows: Rows, present: int) -> dict[str, int]:
    """Return the loss scales to compare, as exponents, each for the whole model."""
    return {"none": 0, "now": present, "best": rows[WHOLE].best_scale(fmt)}


def percent(part: int, whole: int) -> str:
    """Format a share in at most five characters; "0" and "100" only if it is exactly none or all."""
    share = 100 * part / max(1, whole)
    if part in (0, whole):
        return f"{share:.0f}"
    text = "<0.01" if share < 0.01 else f"{share:.2f}" if share < 9.995 else f"{share:.1f}"
    return ">99.9" if text == "100.0" else text


def cell(census: Census, fmt: Format, exponent: int) -> Text:
    """Return the share that ``fmt`` would lose of a layer at one scale; "over" if a value would overflow."""
    if census.overflowed(fmt, exponent):
        return Text("over", "magenta")
    flushed = census.flushed(fmt, exponent)
    red = "bold red" if flushed >= 0.1 * census.nonzeros else "red" if flushed >= 0.01 * census.nonzeros else ""
    return Text(percent(flushed, census.nonzeros), red if flushed else "dim")


def table(rows: Rows, present: int, formats: Sequence[Format]) -> Table:
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("\n\nlayer", "\ngradients\ncounted", "\nzeros\n%"):
        grid.add_column(heading, no_wrap=True, justify="left" if "layer" in heading else "right")
    scales = [(fmt, which, k) for fmt in formats for which, k in scales_for(fmt, rows, present).items()]
    for fmt, which, exponent in scales:
        title = fmt.title.removeprefix("FP8 ") if which == "now" else ""
        width = 6 if which == "none" else 5  # space between the formats
        grid.add_column(f"{title}\n{which}\n2^{exponent}", justify="right", min_width=width)
    for name, census in rows.items():
        counted, zeros = f"{census.count / 1000:.0f}k", percent(census.zeros, census.count)
        cells = [cell(census, fmt, exponent) for fmt, _, exponent in scales]
        grid.add_row(name, counted, Text(zeros, "dim"), *cells, style="bold" if name == WHOLE else "")
    return grid


def verdict(rows: Rows, present: int) -> Iterator[tuple[str, str]]:
    """Return the table's conclusions: a heading, and sentences."""

    def fate(census: Census, fmt: Format, exponent: int) -> str:
        told = str(cell(census, fmt, exponent))
        return {"over": "overflows", "0": "loses nothing"}.get(told, f"loses {told}%")

    whole, layers = rows[WHOLE], [census for name, census in rows.items() if name != WHOLE]
    for fmt in FORMATS:
        none, now, best = (fate(whole, fmt, k) for k in scales_for(fmt, rows, present).values())
        if {none, now, best} == {"loses nothing"}:
            yield fmt.title, "loses nothing, with or without a scale."
            continue
        own = percent(sum(layer.flushed(fmt, layer.best_scale(fmt)) for layer in layers), whole.nonzeros)
        finer = f" (with a scale for each layer: {own}%)" if best != "loses nothing" else ""
        at_best = f"{best} at its best, 2^{whole.best_scale(fmt)}{finer}"
        yield fmt.title, f"{none} without a scale, {now} at the present 2^{present}, {at_best}."
    fmt = max(FORMATS, key=lambda fmt: whole.flushed(fmt, whole.best_scale(fmt)))
    k = scales_for(fmt, rows, present)["best"]
    worst = max(rows, key=lambda name: rows[name].flushed(fmt, k) / max(1, rows[name].nonzeros))
    yield "Hit hardest", f"{worst}: in {fmt.title} it {fate(rows[worst], fmt, k)} even at 2^{k}."


def show(training: Training, batch: Batch, out: Console) -> None:
    rows, present = training.rows, training.scale_exponent
    out.print(
        Text(f"\n{training}\n", "bold"),
        "What would be lost if these gradients were stored in another format: the share flushed to zero, in % of a\n"
        "layer's non-zero gradients over all steps, without a loss scale, at the one there is now, and at the best.\n"
        "One scale for the whole model; over: a value would overflow.\n",
        sep="\n",
    )
    for formats in (FORMATS,) if out.width >= COLUMNS else (FORMATS[:2], FORMATS[2:]):
        out.print(table(rows, present, formats), "", sep="\n")
    now, none = (training.zeroed_by_autocast(batch, k) for k in (present, 0))
    remarks = {
        "Autocast": "has rounded these gradients to FP16 once already: what that zeroed is among the zeros. Its "
        f"share of one batch, against FP32 arithmetic: {now} at the present scale; {none} without one.",
        "Not said": "how training in these formats would go: it would round weights and activations too.",
    }
    words = Table.grid(padding=(0, 2, 0, 0))
    for heading, sentence in [*verdict(rows, present), *remarks.items()]:
        words.add_row(Text(heading, "bold", no_wrap=True), sentence)
    out.print(words)


def as_json(training: Training) -> str:
    """Return every number of the table, exact; ``overflowed`` is a range, both ends included."""
    rows, present = training.rows, training.scale_exponent
    lost = [
        {"layer": name, "format": fmt.name, "scale": which, "exponent": k, "flushed": census.flushed(fmt, k)}
        | {"overflowed": [census.overflowed(fmt, k).low, census.overflowed(fmt, k).high]}
        for fmt in FORMATS
        for which, k in scales_for(fmt, rows, present).items()
        for name, census in rows.items()
    ]
    run = {"losses": training.losses, "skipped": training.skipped, "scale_exponent": present}
    return strict_json.dumps({**run, "lost": lost, "census": {name: row.as_dict() for name, row in rows.items()}})


def main(argv: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # do not fail on a terminal without arrows
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=50.0, help="how long to train (default: 50)")
    parser.add_argument("--steps", type=int, help="stop after this many steps")
    parser.add_argument("--scale-exponent", type=int, default=16, help="start at a loss scale of 2^this (default: 16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there, exact")
    args = parser.parse_args(argv)
    if not 0 <= args.scale_exponent <= 100:
        parser.error("--scale-exponent: from 0 to 100")
    torch.manual_seed(0)
    text = TEXT.read_text(encoding="utf-8")
    data, training = batches(text), Training(CharGPT(len(set(text))), args.scale_exponent)
    train(training, data, console(sys.stderr), seconds=args.seconds, steps=args.steps)
    if not training.rows:
        print("Nothing to show: no step was completed without overflow. Train longer.", file=sys.stderr)
        return 1
    show(training, next(data), console())
    if args.json:
        args.json.write_text(as_json(training), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
