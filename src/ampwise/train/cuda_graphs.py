"""Capture forward and backward passes in CUDA graphs, for models so small that launching takes longer than computing.

A pass is captured once for each kind of batch, and then replayed on new data: the host makes one launch instead of
hundreds. Python does not run in a replay. The optimizer step stays outside, so that learning rates, scales, clipping
and skips work as without graphs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ampwise.errors import BadInput

__all__ = ["CudaGraphs", "capture_graph"]

WARM_UP = 3  # eager passes before a capture, in which libraries choose algorithms and allocate workspaces
MAX_GRAPHS = 8  # graphs at most: each holds the memory of a pass

PassFunction = Callable[..., Any]


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture the kernels launched within the context, on the current device; restore torch's state if that fails."""
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    except BaseException:
        torch.cuda.set_stream(before)  # torch may still be on the capture stream
        # A failed capture leaves torch's generator in capture mode, until another one is completed.
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros((), device="cuda")
        raise


@dataclass(slots=True)
class CapturedPass:
    """A graph, its input tensors and its results."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    returned: Any

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """Replay on new data. Returns copies of the results: the next replay overwrites them."""
        if tensors:
            torch._foreach_copy_(self.inputs, list(tensors))
        self.graph.replay()
        return tree_map_only(Tensor, lambda each: each.detach().clone(), self.returned)


class CudaGraphs:
    """Captured passes of an engine, by the kind of batch."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise BadInput(f"Engine(graph=True): CUDA graphs need a CUDA device, but the model is on {device}.")
        self._graph_version = 0
        self._seen: dict[Hashable, int] = {}
        self._captured: dict[Hashable, CapturedPass] = {}
        self._functions: dict[int, Any] = {}  # by id; kept alive, so that no other gets the same id
        self._reached: set[Parameter] = set()  # parameters that get gradients; all others must stay without
        self._gradients: dict[Parameter, Tensor] = {}  # the tensors that the graphs accumulate into
        self._pool = torch.cuda.graph_pool_handle()

    def run(
        self,
        one_pass: PassFunction,
        function: Any,
        *,
        graph_version: int,
        fixed: Hashable,
        args: Any,
        parameters: Sequence[Parameter],
    ) -> Any:
        """Run ``one_pass(args)``, by a replay if possible. It may depend only on ``args``, ``function`` and ``fixed``.

        A new ``graph_version`` means that passes do something else now: all captured graphs are dropped.
        """
        if graph_version != self._graph_version:
            self._graph_version = graph_version
            self._seen.clear()
            self._captured.clear()
            self._functions.clear()
            self._pool = torch.cuda.graph_pool_handle()
        leaves, shape = tree_flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._functions[id(function)] = function
        key = (id(function), fixed, str(shape), _kinds(leaves))
        captured = self._captured.get(key)
        if captured is None:
            if key not in self._seen and len(self._seen) >= MAX_GRAPHS:
                raise BadInput(
                    f"Engine(graph=True): more than {MAX_GRAPHS} kinds of batches or loss functions. Define "
                    "the loss function once, outside the loop, and use batches of the same shapes."
                )
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= WARM_UP:
                returned = one_pass(args)
                self._reached.update(each for each in parameters if each.grad is not None)
                return returned
            captured = self._captured[key] = self._capture(one_pass, leaves, shape)
        self._put_gradients_back()
        return captured.replay(tensors)

    def clear_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Set gradients that graphs accumulate into to zero, and all others to None."""
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

    def _capture(self, one_pass: PassFunction, leaves: list[Any], shape: Any) -> CapturedPass:
        statics = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for parameter in self._reached - self._gradients.keys():
            before = parameter.grad  # from earlier micro-batches of this step
            self._gradients[parameter] = torch.zeros_like(parameter) if before is None else before.clone()
        self._put_gradients_back()
        # A backward graph in a garbage cycle keeps each gradient's AccumulateGrad node alive, which syncs with the
        # stream it was created on: that would break the capture.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        try:
            with capture_graph(graph, self._pool):
                returned = one_pass(tree_unflatten(statics, shape))
        except Exception as error:
            error.add_note(
                "ampwise: graph=True cannot capture a loss function that syncs with the GPU, or copies to it."
            )
            raise
        return CapturedPass(graph, [leaf for leaf in statics if isinstance(leaf, Tensor)], returned)


def _kinds(leaves: Sequence[Any]) -> Hashable:
    """Return what a graph depends on: shape, dtype and requires_grad of tensors, and all other values."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.device.type != "cuda":
            raise BadInput(
                "Engine(graph=True): a tensor of the batch is not on the GPU. Move it to the GPU before engine.step()."
            )
    kinds = tuple((each.shape, each.dtype, each.requires_grad) if isinstance(each, Tensor) else each for each in leaves)
    try:
        hash(kinds)
    except TypeError:
        raise BadInput("Engine(graph=True): arguments of the loss function must be tensors or hashable.") from None
    return kinds
