"""Speed-up over FP32 by size of model, from 1 M to 3 B parameters, with few and many tokens a step; and energy.

Whole training steps of GPTs: forward, backward, clip to 1.0, fused AdamW. All precisions take turns on one model;
compiled ones are compiled block by block. GPU only.

Compiling takes most of the time. ``--warm`` does only that, for some of the sizes: several processes can share it.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import torch

from ampwise.errors import AmpwiseError
from ampwise.tune.bench.clocks import opened
from ampwise.tune.bench.lineup import float8_layers
from ampwise.tune.train_case import TrainCase, TrainingStep, make_factory, make_optimizer
from benchmarks import subjects
from benchmarks.gpt import GPT, GPT2_124M, Shape
from benchmarks.harness import Result, note
from benchmarks.subjects import GPT_1_3B

__all__ = ["main"]

SHAPES = (
    Shape(name="1 M", layers=4, width=128, heads=4, vocabulary=1024, length=1024, batch=1),
    Shape(name="4 M", layers=4, width=256, heads=4, vocabulary=2048, length=1024, batch=1),
    Shape(name="12 M", layers=6, width=384, heads=6, vocabulary=4096, length=1024, batch=1),
    Shape(name="30 M", layers=8, width=512, heads=8, vocabulary=8192, length=1024, batch=1),
    replace(GPT2_124M, name="124 M"),
    Shape(name="350 M", layers=24, width=1024, heads=16, vocabulary=50304, length=1024, batch=1),
    replace(GPT_1_3B, name="1.3 B"),
    Shape(name="3 B", layers=36, width=2560, heads=20, vocabulary=50304, length=1024, batch=1),
)
ORDER = (4, 0, 6, 2, 5, 7, 1, 3)  # of SHAPES, for a run that is given less time than all of them take
BATCHES = (8, 1)  # sequences of 1,024 tokens
EAGER, COMPILED = ("fp32", "tf32", "fp16", "bf16"), ("bf16", "fp8")
LABELS = (*EAGER[1:], *(f"{name} compiled" for name in COMPILED))
ROUNDS, TURN_S = 2, 0.25  # the driver counts energy every 20 to 100 ms
METERED = ("fp32", "bf16", "bf16 compiled", "fp8 compiled")


class Contender:
    """Steps in one precision on the model that all share."""

    def __init__(self, label: str, step: TrainingStep, around: Sequence[Callable[[], AbstractContextManager[object]]]):
        self.label, self.step, self._around = label, step, around
        self.seconds: list[float] = []
        self.joules: list[float] = []
        self.problem = ""
        self.calls = 1

    @contextmanager
    def turn(self) -> Iterator[None]:
        with ExitStack() as stack:
            for context in self._around:
                stack.enter_context(context())
            yield

    def warm_up(self) -> None:
        try:
            with self.turn():
                self.step()
                taken = _seconds(self.step, 1)
                if taken < TURN_S:  # kernels are chosen, and the clock is up, after a few
                    taken = _seconds(self.step, 3)
                self.calls = math.ceil(TURN_S / taken)
        except (RuntimeError, AmpwiseError) as error:
            self.problem = str(error).partition("\n")[0]
            self.step.optimizer.zero_grad(set_to_none=True)

    def measure(self, joules: Callable[[], float | None]) -> None:
        with self.turn():
            if self.calls > 1:
                self.step()
            torch.cuda.synchronize()
            before = joules()
            self.seconds.append(_seconds(self.step, self.calls))
            after = joules()
        if before is not None and after is not None:
            self.joules.append((after - before) / self.calls)


def _seconds(work: Callable[[], object], calls: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls


def contenders(case: TrainCase, names: Sequence[str] = EAGER, compiled: Sequence[str] = COMPILED) -> list[Contender]:
    """One for each precision, FP32 first; compiled blocks are set aside while an eager one has its turn."""
    optimizer = make_optimizer("adamw", case.parameters, fused=True)
    made = [Contender(name, TrainingStep(case, name, optimizer), []) for name in names]
    model = case.model
    assert isinstance(model, GPT)
    plain = model.loss
    model.compile_parts()
    parts = [(block, block._compiled_call_impl) for block in model.blocks]
    loss = model.loss

    def switch(on: bool) -> None:
        for block, call in parts:
            block._compiled_call_impl = call if on else None
        model.loss = loss if on else plain  # type: ignore[method-assign]

    @contextmanager
    def as_compiled() -> Iterator[None]:
        switch(True)
        try:
            yield
        finally:
            switch(False)

    switch(False)
    for name in compiled:
        step = TrainingStep(case, "bf16" if name == "fp8" else name, optimizer)
        try:
            around = [as_compiled, float8_layers(model)] if name == "fp8" else [as_compiled]
        except AmpwiseError:  # no layer is large enough
            continue
        made.append(Contender(f"{name} compiled", step, around))
    return made


def case_of(shape: Shape) -> TrainCase:
    torch.manual_seed(0)
    return make_factory(lambda batch=shape.batch: subjects.gpt(replace(shape, batch=batch)), shape.name).make("cuda")


def measured(shape: Shape) -> list[str | float]:
    """A row."""
    torch._dynamo.reset()
    case = case_of(shape)
    gpu = opened(torch.device("cuda"))
    lineup = contenders(case)
    for each in lineup:
        each.warm_up()
    for number in range(ROUNDS):
        running = [each for each in lineup if not each.problem]
        for each in reversed(running) if number % 2 else running:
            each.measure(lambda: None if gpu is None else gpu.joules())
    by_label = {each.label: each for each in lineup if not each.problem}
    wide = by_label["fp32"]
    parameters = sum(each.numel() for each in case.parameters)

    def ratio(label: str) -> str | float:
        its = by_label.get(label)
        return "-" if its is None else statistics.median(a / b for a, b in zip(wide.seconds, its.seconds, strict=True))

    def energy(label: str) -> str | float:
        its = by_label.get(label)
        return "-" if its is None or not its.joules else 1e3 * statistics.fmean(its.joules) / shape.tokens

    row = [
        f"GPT {shape.name}", parameters / 1e6, float(shape.tokens), 1e3 * statistics.median(wide.seconds),
        *map(ratio, LABELS), *map(energy, METERED),
    ]  # fmt: skip
    note(f"{shape.name}, {shape.tokens} tokens: {[each if isinstance(each, str) else f'{each:.4g}' for each in row]}")
    for each in lineup:
        if each.problem:
            note(f"  {each.label}: {each.problem}")
    return row


def sizes(shapes: Sequence[Shape], batches: Sequence[int], limit_s: float) -> Result:
    result = Result(
        name="sizes_gpu",
        title="Speed-up over FP32 by size of the model",
        claim="Whole training steps of GPTs, each precision in turns on one model; numbers below precisions are times "
        "as fast as eager FP32 without TF32, the median of rounds; mJ: energy of the whole GPU for a token, by the "
        "driver's counter.",
        columns=[
            "model", "M parameters", "tokens a step", "FP32 ms", *LABELS, *(f"{label} mJ/token" for label in METERED),
        ],
    )  # fmt: skip
    begin = time.perf_counter()
    for shape in [replace(shape, batch=batch) for batch in batches for shape in shapes]:
        if time.perf_counter() - begin > limit_s:
            note(f"{shape.name}, {shape.tokens} tokens: no time left")
            continue
        result.rows.append(measured(shape))
        gc.collect()
        torch.cuda.empty_cache()
    result.rows.sort(key=lambda row: (row[1], row[2]))
    result.notes.append(
        f"{ROUNDS} rounds of {TURN_S} s or one step each. fp8: linear layers of 512×512 weights and more, by current "
        "scales; smaller models have none."
    )
    return result


def warm(shape: Shape) -> None:
    """Compile what the size needs, on one layer: the others are alike."""
    torch._dynamo.reset()
    for each in contenders(case_of(replace(shape, layers=1)), ()):
        each.warm_up()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--size", choices=names, action="append", help="only this one; may be given again")
    parser.add_argument("--batch", type=int, choices=BATCHES, action="append", help="only this one")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no other row is begun")
    parser.add_argument("--warm", action="store_true", help="only compile")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device")
    in_order = [SHAPES[place] for place in ORDER]
    chosen = [shape for shape in in_order if given.size is None or shape.name in given.size]
    batches = given.batch or BATCHES
    if given.warm:
        for shape in chosen:
            for batch in batches:
                warm(replace(shape, batch=batch))
    else:
        sizes(chosen, batches, given.limit).publish()


if __name__ == "__main__":
    main()
