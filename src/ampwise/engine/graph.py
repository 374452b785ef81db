"""Forward and backward passes captured in CUDA graphs: for models so small that launching takes longer than computing.

What a pass does is recorded once for each kind of batch, and then replayed on new data: the host makes one launch
instead of hundreds. Python does not run in a replay. The optimizer's turn stays outside, so that rates, scales,
clipping and skips are what they are without graphs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ampwise.capturing import capturing
from ampwise.errors import BadInput

__all__ = ["Graphs"]

WARM_UP = 3  # passes without a graph, in which libraries choose their algorithms and make room
MOST = 8  # graphs: each holds the memory of a pass

Pass = Callable[..., Any]


@dataclass(slots=True)
class Captured:
    """A graph, the tensors it reads and those it leaves."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    returned: Any

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """On new data. What is returned is copied: the next replay writes over it."""
        if tensors:
            torch._foreach_copy_(self.inputs, list(tensors))
        self.graph.replay()
        return tree_map_only(Tensor, lambda each: each.detach().clone(), self.returned)


class Graphs:
    """The passes of an engine, by the kind of batch."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise BadInput(f"Engine(graph=True): CUDA graphs need a CUDA device, and the model is on {device}.")
        self._phase = 0
        self._seen: dict[Hashable, int] = {}
        self._captured: dict[Hashable, Captured] = {}
        self._functions: dict[int, Any] = {}  # by identity; held, so that another does not come by the same
        self._reached: set[Parameter] = set()  # parameters that get gradients; others must stay without
        self._gradients: dict[Parameter, Tensor] = {}  # where the graphs add them up
        self._pool = torch.cuda.graph_pool_handle()

    def run(
        self,
        one_pass: Pass,
        function: Any,
        *,
        phase: int,
        fixed: Hashable,
        args: Any,
        parameters: Sequence[Parameter],
    ) -> Any:
        """``one_pass(args)``, replayed if it can be. It runs ``function``, and depends on nothing but ``fixed``.

        In another phase than before it does something else, and what was captured is not used again.
        """
        if phase != self._phase:
            self._phase = phase
            self._forget()
        leaves, shape = tree_flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._functions[id(function)] = function
        key = (id(function), fixed, str(shape), _kinds(leaves))
        captured = self._captured.get(key)
        if captured is None:
            if self._is_new(key):
                returned = one_pass(args)
                self._reached.update(each for each in parameters if each.grad is not None)
                return returned
            captured = self._captured[key] = self._capture(one_pass, leaves, shape)
        self._put_gradients_back()
        return captured.replay(tensors)

    def _is_new(self, key: Hashable) -> bool:
        """Such a batch was not seen often enough to be captured."""
        if key not in self._seen and len(self._seen) >= MOST:
            raise BadInput(
                f"Engine(graph=True): {MOST} kinds of batches or loss functions were seen, and here is another. Make "
                "the loss function once, outside of the loop, and give batches of the same shapes."
            )
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] <= WARM_UP

    def _forget(self) -> None:
        """All graphs, and with them the memory they have: others are captured into another."""
        self._seen.clear()
        self._captured.clear()
        self._functions.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def clear_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Begin a window: zeros where a graph adds, nothing elsewhere."""
        self._put_gradients_back()
        if self._gradients:
            torch._foreach_zero_(list(self._gradients.values()))
        for parameter in parameters:
            if parameter not in self._gradients:
                parameter.grad = None

    def _put_gradients_back(self) -> None:
        for parameter, gradient in self._gradients.items():
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def _capture(self, one_pass: Pass, leaves: list[Any], shape: Any) -> Captured:
        statics = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for parameter in self._reached - self._gradients.keys():
            before = parameter.grad  # of micro-batches of this window
            self._gradients[parameter] = torch.zeros_like(parameter) if before is None else before.clone()
        self._put_gradients_back()
        # A backward graph that is still somewhere in a cycle holds on to the node that adds up each gradient, which
        # waits for the stream that it was made on: no capture bears that.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, self._pool):
                returned = one_pass(tree_unflatten(statics, shape))
        except Exception as error:
            error.add_note(
                "ampwise: graph=True cannot capture a loss function that waits for the GPU, or copies to it."
            )
            raise
        return Captured(graph, [leaf for leaf in statics if isinstance(leaf, Tensor)], returned)


def _kinds(leaves: Sequence[Any]) -> Hashable:
    """What of a batch a graph depends on: the shapes of tensors, and all else as it is."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.device.type != "cuda":
            raise BadInput(
                "Engine(graph=True): a tensor of the batch is not on the GPU. Move it there before engine.step()."
            )
    kinds = tuple((each.shape, each.dtype, each.requires_grad) if isinstance(each, Tensor) else each for each in leaves)
    try:
        hash(kinds)
    except TypeError:
        raise BadInput("Engine(graph=True): what a loss function is given must be tensors or plain values.") from None
    return kinds
