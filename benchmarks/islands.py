"""What FP32 islands cost under autocast: the loss, single operations, layers, and everything.

``python -m benchmarks.islands`` times GPT-2 124M on a GPU, and a small GPT on a CPU. An island is a method that runs
with autocast off, on inputs cast to FP32, as ``@ampwise.keep("fp32")`` does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ampwise import keep
from benchmarks.gpt import GPT, GPT2_124M, GPT_4M, Shape
from benchmarks.harness import Contender, Result, alternate, publish_parts

ROUNDS, CALLS = 7, 3


def fp32(*owners: Any, method: str = "forward") -> None:
    """Make islands of the methods of these modules."""
    for owner in owners:
        setattr(owner, method, keep("fp32")(getattr(owner, method)))


def loss_of_logits(model: GPT) -> None:
    """Make an island of the cross entropy only; the head's matmul stays in 16 bits."""

    def loss(x: Tensor, nexts: Tensor) -> Tensor:
        logits = F.linear(model.ln_f(x), model.wte.weight)
        return keep("fp32")(F.cross_entropy)(logits.flatten(0, 1), nexts.flatten())

    model.loss = loss  # type: ignore[method-assign]


ISLANDS: dict[str, Callable[[GPT], object]] = {
    "nothing besides autocast's list": lambda model: None,
    "the cross entropy": loss_of_logits,
    "the whole loss: norm, head, cross entropy": lambda model: fp32(model, method="loss"),
    "every LayerNorm": lambda model: fp32(*(norm for block in model.blocks for norm in (block.ln_1, block.ln_2))),
    "one MLP's first matmul": lambda model: fp32(model.blocks[0].expand),
    "one block": lambda model: fp32(model.blocks[0]),
    "half of the blocks": lambda model: fp32(*list(model.blocks)[::2]),
    "everything": lambda model: fp32(model),
}


def step_with(island: Callable[[GPT], object], shape: Shape, device: str) -> Callable[[], None]:
    """Return a training step of a model with this island."""
    torch.manual_seed(0)
    model = GPT(shape).to(device)
    island(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):  # noqa: AMP303
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()

    return step


def islands() -> Result:
    device, shape = ("cuda", GPT2_124M) if torch.cuda.is_available() else ("cpu", GPT_4M)
    contenders = [Contender(name=name, work=step_with(island, shape, device)) for name, island in ISLANDS.items()]
    times = alternate(contenders, rounds=ROUNDS, calls=CALLS)
    result = Result(
        name=f"islands_{'gpu' if device == 'cuda' else 'cpu'}",
        title=f"FP32 islands in {shape.name}",
        claim=f"Whole training steps of {shape.name}, {shape.batch}×{shape.length} tokens, BF16 autocast, fused AdamW, "
        "in turns in one run. The ratio is to the first row, its median within a round: above 1 is slower.",
        columns=["in FP32", "step ms", "× the time"],
    )
    result.rows += [[each.name, each.median_ms, each.ratio(times[0])] for each in times]
    return result


if __name__ == "__main__":
    publish_parts("islands", (__doc__ or "").partition("\n")[0], {"islands": islands}, only_on_gpu=())
