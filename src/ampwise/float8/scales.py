"""Delayed scaling: scales that follow from what past steps held, one table for all layers.

A backward pass leaves what it has seen as the gradient of a slot. From there it goes to the table, and once a step the
table makes the next scales: a few launches for the whole model, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.float8.casting import E4M3, E5M2, TOPS, scales_of
from ampwise.float8.recipe import Fp8

__all__ = ["OPERANDS", "Scales"]

OPERANDS = ("input", "weight", "gradient")
ALIGNED = 4  # scales a layer has room for: 16 bytes, as torch.compile copies what does not begin at a multiple of that


class Scales:
    """Of layers by name: a scale for each operand, and the largest magnitudes of the last steps."""

    def __init__(self, names: Sequence[str], fp8: Fp8, device: torch.device) -> None:
        self.names = tuple(names)
        self._margin, self._by_max = fp8.margin, fp8.update == "max"
        shape = (len(self.names), len(OPERANDS))
        self.values = torch.ones(shape[0], ALIGNED, device=device)[:, : len(OPERANDS)]
        self.history = torch.zeros(*shape, fp8.history, device=device)  # the last first; 0: nothing yet
        self.seen = torch.zeros(*shape, 2, device=device)  # since the last update: magnitude, values cut off
        self.cut_off = torch.zeros(*shape, 2, device=device)  # in all: steps in which values were cut off; values
        gradients = TOPS[E5M2 if fp8.gradients == "e5m2" else E4M3]
        self._tops = torch.tensor([TOPS[E4M3], TOPS[E4M3], gradients], dtype=torch.int32, device=device)
        self.steps = 0  # that were counted
        self.slots = [self._slot(seen) for seen in self.seen]

    def _slot(self, seen: Tensor) -> Tensor:
        slot = torch.zeros_like(seen, requires_grad=True)
        slot.register_post_accumulate_grad_hook(partial(_note, seen))
        return slot

    def update(self, group: Any = None, *, together: bool = False) -> None:
        """The end of a step. A tensor that held nothing, or was not finite, leaves its scale as it was."""
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
        """Whether each layer has been seen, forward and backward. Waits for the device."""
        found: list[bool] = (self.history[..., 0] > 0).all(-1).tolist()
        return found

    def clear(self) -> None:
        """As in the beginning."""
        for tensor in (self.history, self.cut_off, self.seen):
            tensor.zero_()
        self.values.fill_(1.0)
        self.steps = 0

    def state(self) -> dict[str, Any]:
        """For a checkpoint; scales for whoever reads it, as ``load`` makes them anew."""
        tensors = {"scales": self.values, "history": self.history, "cut_off": self.cut_off}
        return {
            "names": list(self.names),
            "steps": self.steps,
            **{name: tensor.clone() for name, tensor in tensors.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """What ``state`` gave, by the names of layers: those it does not have begin anew, as they do in training.

        A history of another length is cut, or goes on from there. Scales follow from it by the rule, margin and format
        that are in use here, which may be others than those it was saved with.
        """
        saved = {name: place for place, name in enumerate(state["names"])}
        here = [place for place, name in enumerate(self.names) if name in saved]
        if not here:
            raise BadInput(
                f"load_state_dict(): the FP8 scales in it are of other layers ({', '.join([*saved][:3])}). Load it "
                "with the policy and Fp8(...) it was saved with."
            )
        there = [saved[self.names[place]] for place in here]
        shape = (len(saved), len(OPERANDS))
        if not all(tuple(state[key].shape[:2]) == shape for key in ("history", "cut_off")):
            raise BadInput("load_state_dict(): the FP8 scales in it are damaged: their shapes do not fit the layers.")
        device = self.values.device
        length = min(self.history.shape[-1], state["history"].shape[-1])
        self.clear()
        self.history[here, :, :length] = state["history"].to(device)[there, :, :length]
        self.cut_off[here] = state["cut_off"].to(device)[there]
        self._follow_history()
        self.steps = int(state["steps"])


def _note(seen: Tensor, slot: Tensor) -> None:
    """Add what a backward pass has seen to what others of this step have."""
    assert slot.grad is not None
    torch.maximum(seen, slot.grad, out=seen)
    slot.grad = None
