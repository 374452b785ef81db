"""Gain from padding: whole training steps of models with odd sizes, before and after ``ampwise.pad_``.

Runs all parts, each with its own result, or one: ``python -m benchmarks.align --part mlp``.

vocabulary   GPT-2 124M with its 50,257 tokens, whose logits are a matmul with the embedding's weight.
mlp          layers of 1021 and 4093, 8,191 rows.

The output of a padded model is first compared with that of the original. The table has the gain, and the saving that
``ampwise align`` predicts for the matmuls alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ampwise.tune.align.align import align
from ampwise.tune.align.matmuls import better_size
from ampwise.tune.align.pad import pad_
from ampwise.tune.align.result import Alignment
from ampwise.tune.train_case import TrainCase, TrainingStep, make_factory, make_optimizer
from benchmarks.gpt import GPT, GPT2_124M, Shape
from benchmarks.harness import Contender, Result, Times, alternate, note, publish_parts
from benchmarks.step import PAIRED, Turns, device, has_gpu

__all__ = ["mlp", "vocabulary"]

Pad = Callable[[nn.Module], object]
PLAIN = "as it is"
CLOSE = 64  # ulps of FP32 by which a loss may differ that is summed in another order
WIDE, HIDDEN, ROWS, DEPTH = 1021, 4093, 8191, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of odd sizes, and the ways to pad it."""

    name: str
    make: Callable[..., Any]
    pads: dict[str, Pad]  # by what is done
    rows: int  # of the batch that is compared first


def gpt_of(shape: Shape) -> Callable[..., Any]:
    def make(batch: int = shape.batch) -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
        torch.manual_seed(0)
        model = GPT(shape)
        tokens = torch.randint(shape.vocabulary, (batch, shape.length + 1))
        return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), model

    return make


def mlp_of(wide: int, hidden: int, rows: int, depth: int = DEPTH) -> Callable[..., Any]:
    def make(batch: int = rows) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
        torch.manual_seed(0)
        blocks = [(nn.Linear(wide, hidden), nn.GELU(), nn.Linear(hidden, wide), nn.GELU()) for _ in range(depth)]
        model = nn.Sequential(*(layer for block in blocks for layer in block))
        return model, torch.randn(batch, wide), lambda x: model(x).square().mean()

    return make


def made(case: Case, pad: Pad | None, batch: int | None = None) -> TrainCase:
    subject = make_factory(case.make, case.name).make(device(), batch)
    if pad is not None:
        pad(subject.model)
    return subject


def loss_apart(case: Case, pad: Pad) -> float:
    """By how many ulps the loss of a padded model differs in FP32, on a small batch."""
    plain, padded = (made(case, each, case.rows) for each in (None, pad))
    for subject in (plain, padded):
        subject.model.eval()
    with torch.no_grad():
        expected, got = float(plain.loss()), float(padded.loss())
    return abs(got - expected) / (torch.finfo(torch.float32).eps * abs(expected))


def contender(case: Case, name: str, pad: Pad | None, compiled: bool) -> Contender:
    subject = made(case, pad)
    optimizer = make_optimizer("adamw", subject.parameters, fused=has_gpu())
    step = TrainingStep(subject, "bf16" if has_gpu() else "fp32", optimizer, compiled=compiled)
    return Contender(name=name, work=step)


def race(case: Case, names: Sequence[str], compiled: bool, turns: Turns) -> list[Times]:
    torch._dynamo.reset()
    pads: dict[str, Pad | None] = {PLAIN: None, **case.pads}
    runners = [contender(case, name, pads[name], compiled) for name in names]
    for runner in runners:
        for _ in range(3):
            runner.work()
    times = alternate(runners, **turns._asdict())
    del runners
    gc.collect()
    if has_gpu():
        torch.cuda.empty_cache()
    note(
        f"{case.name}, {'compiled' if compiled else 'eager'}: "
        + ", ".join(f"{t.name} {t.median_ms:.4g} ms" for t in times)
    )
    return times


def ranking(found: Alignment) -> list[str]:
    """What align says about the layers, as it would print it."""
    return [f"align: {'  '.join(row)}" for row in found.rows()]


def measured(case: Case, result: Result, turns: Turns) -> Result:
    for name, pad in case.pads.items():
        apart = loss_apart(case, pad)
        assert apart <= CLOSE, f"{case.name}, {name}: the loss differs by {apart:.3g} ulps"
        result.notes.append(f"{name}: the loss in FP32 is that of the model as it is, within {apart:.2g} ulps.")
    found = align(case.make, precision="bf16", device=device())
    saved = sum(layer.saved_ms or 0.0 for layer in found.off)
    result.notes += ranking(found)
    for compiled in (False, True):
        names = [PLAIN, *case.pads] if not compiled else [PLAIN, next(iter(case.pads))]
        times = race(case, names, compiled, turns)
        how = "compiled" if compiled else "eager"
        for each in times:
            gain = times[0].median_ms - each.median_ms
            said = f"{saved:.3g}" if each is not times[0] and not compiled else "-"
            result.rows.append([how, each.name, each.median_ms, each.ratio(times[0]), gain, said])
    result.notes.append(PAIRED.format(**turns._asdict()))
    result.notes.append("Compiled, torch pads products by itself where it finds that faster (shape_padding).")
    return result


COLUMNS = ["model", "sizes", "ms a step", "ratio", "saved ms", "align says"]


def vocabulary(shape: Shape | None = None, turns: Turns | None = None) -> Result:
    shape = shape or replace(GPT2_124M, vocabulary=50257)
    case = Case(
        name=f"{shape.name}, {shape.vocabulary} tokens",
        make=gpt_of(shape),
        pads={
            "padded, logits sliced": lambda model: pad_(model, head="wte"),
            "padded, logits masked": lambda model: pad_(model, head="wte", logits="masked"),
        },
        rows=2,
    )
    result = Result(
        name="align_vocabulary_gpu",
        title=f"Padding a vocabulary of {shape.vocabulary} to {better_size(shape.vocabulary, 'bf16')}",
        claim=f"{shape.name}, {shape.batch}×{shape.length} tokens, BF16, fused AdamW, clipped to 1.0; logits by "
        "F.linear with the embedding's weight. Ratio of a whole step's time to that of the model as it is, in one run.",
        columns=COLUMNS,
    )
    return measured(case, result, turns or Turns(8, 4))


def mlp(sizes: tuple[int, int, int] = (WIDE, HIDDEN, ROWS), turns: Turns | None = None) -> Result:
    wide, hidden, rows = sizes
    case = Case(
        name=f"MLP of {wide} and {hidden}",
        make=mlp_of(wide, hidden, rows),
        pads={"padded by pad_": lambda model: pad_(model, only="*")},
        rows=64,
    )
    result = Result(
        name="align_mlp_gpu",
        title=f"Padding layers of {wide} and {hidden}",
        claim=f"{DEPTH} blocks {wide} → {hidden} → {wide}, {rows} rows, BF16, fused AdamW, clipped to 1.0. Ratio of a "
        "whole step's time to that of the model as it is, in one run.",
        columns=COLUMNS,
    )
    return measured(case, result, turns or Turns(10, 10))


if __name__ == "__main__":
    publish_parts(
        "align",
        (__doc__ or "").partition("\n")[0],
        {"vocabulary": vocabulary, "mlp": mlp},
        only_on_gpu=("vocabulary", "mlp"),
    )
