"""Delayed scaling: scales computed from the magnitudes of past steps, in one table for all layers.

A backward pass returns its statistics as the gradient of a slot tensor. A hook adds them to the table, and once per
step the next scales are computed from it: a few launches for the whole model, and no sync.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.train.float8.fp8_cast import E4M3, E5M2, TOPS, scales_of
from ampwise.train.float8.recipe import Fp8

__all__ = ["OPERANDS", "DelayedScales"]

OPERANDS = ("input", "weight", "gradient")
ALIGNED = 4  # scales allocated per layer: 16 bytes, as torch.compile copies tensors that are not so aligned


class DelayedScales:
    """Scales and past magnitudes of the operands of all layers, by layer name."""

    def __init__(self, names: Sequence[str], fp8: Fp8, device: torch.device) -> None:
        self.names = tuple(names)
        self._margin, self._by_max = fp8.margin, fp8.update == "max"
        shape = (len(self.names), len(OPERANDS))
        self.values = torch.ones(shape[0], ALIGNED, device=device)[:, : len(OPERANDS)]
        self.history = torch.zeros(*shape, fp8.history, device=device)  # latest first; 0: nothing yet
        self.seen = torch.zeros(*shape, 2, device=device)  # since the last update: magnitude, saturated values
        self.cut_off = torch.zeros(*shape, 2, device=device)  # totals: steps with saturated values; saturated values
        gradients = TOPS[E5M2 if fp8.gradients == "e5m2" else E4M3]
        self._tops = torch.tensor([TOPS[E4M3], TOPS[E4M3], gradients], dtype=torch.int32, device=device)
        self.steps = 0  # updates so far
        self.slots: list[Tensor] = []
        for seen in self.seen:
            slot = torch.zeros_like(seen, requires_grad=True)
            slot.register_post_accumulate_grad_hook(partial(_merge_statistics, seen))
            self.slots.append(slot)

    def update(self, group: Any = None, *, together: bool = False) -> None:
        """Update the scales after a step. A tensor that was all zero, or not finite, leaves its scale unchanged."""
        seen = self.seen.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        if together:
            dist.all_reduce(seen, dist.ReduceOp.MAX, group)
        amax, cut_off = seen.unbind(-1)
        noted = (amax > 0) & amax.isfinite()
        moved = torch.cat([amax.unsqueeze(-1), self.history[..., :-1]], -1)
        self.history.copy_(torch.where(noted.unsqueeze(-1), moved, self.history))
        self._follow_history()
        self.cut_off.add_(torch.stack([cut_off > 0, cut_off], -1))
        seen.zero_()
        self.steps += 1

    def _follow_history(self) -> None:
        counts = self.history.amax(-1) if self._by_max else self.history[..., 0]
        self.values.copy_(torch.where(counts > 0, scales_of(counts, self._tops, self._margin), 1.0))

    def known(self) -> list[bool]:
        """Return whether each layer has run forward and backward. Syncs with the device."""
        found: list[bool] = (self.history[..., 0] > 0).all(-1).tolist()
        return found

    def clear(self) -> None:
        """Reset to the initial state."""
        for tensor in (self.history, self.cut_off, self.seen):
            tensor.zero_()
        self.values.fill_(1.0)
        self.steps = 0

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Scales are included for readers only; ``load`` recomputes them."""
        tensors = {"scales": self.values, "history": self.history, "cut_off": self.cut_off}
        return {
            "names": list(self.names),
            "steps": self.steps,
            **{name: tensor.clone() for name, tensor in tensors.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what ``state`` returned, by layer name; layers it lacks start with an empty history.

        A history of another length is truncated or extended. Scales are recomputed with the current update rule, margin
        and format, which may differ from the saved ones.
        """
        saved = {name: place for place, name in enumerate(state["names"])}
        here = [place for place, name in enumerate(self.names) if name in saved]
        if not here:
            raise BadInput(
                f"load_state_dict(): its FP8 scales belong to other layers ({', '.join([*saved][:3])}). Use the policy "
                "and Fp8(...) it was saved with."
            )
        there = [saved[self.names[place]] for place in here]
        shape = (len(saved), len(OPERANDS))
        if not all(tuple(state[key].shape[:2]) == shape for key in ("history", "cut_off")):
            raise BadInput("load_state_dict(): its FP8 scales are damaged: their shapes do not fit the layers.")
        device = self.values.device
        length = min(self.history.shape[-1], state["history"].shape[-1])
        self.clear()
        self.history[here, :, :length] = state["history"].to(device)[there, :, :length]
        self.cut_off[here] = state["cut_off"].to(device)[there]
        self._follow_history()
        self.steps = int(state["steps"])


def _merge_statistics(seen: Tensor, slot: Tensor) -> None:
    """Merge the statistics of a backward pass into those of this step."""
    assert slot.grad is not None
    torch.maximum(seen, slot.grad, out=seen)
    slot.grad = None
