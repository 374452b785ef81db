"""FLOPs of a step, forward and backward, by torch's flop counter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ampwise.tune.compare.contender import Contender

__all__ = ["count_flops"]

Shape = Sequence[int]


def count_flops(contender: Contender) -> float | None:
    """Return the FLOPs of one step's matmuls; None where there are none. Call it in the contender's turn.

    Gradients are dropped: the weights stay as they are.
    """
    with FlopCounterMode(display=False, custom_mapping=_missing()) as counter:
        contender.step.forward_and_backward()
    contender.step.optimizer.zero_grad(set_to_none=True)
    return float(counter.get_total_flops()) or None


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _missing() -> dict[Any, Any]:
    """Return counters for the CPU's attention, which torch's flop counter lacks."""
    ops: Any = torch.ops.aten
    return {
        ops._scaled_dot_product_flash_attention_for_cpu: _attention,
        ops._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
