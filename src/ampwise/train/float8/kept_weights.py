"""Weights cast to FP8 once for all micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.nn import Linear, Module, Parameter

from ampwise.train.float8.fp8_cast import Fp8Matrix, cast_to_fp8, recast_fp8_
from ampwise.train.float8.layer_forward import AmpwiseForward, Fp8Forward, use_kept_weight

__all__ = ["KeptWeights"]

SHARDING = frozenset({"FullyShardedDataParallel", "FSDPModule"})  # whose layers get other weights in each pass


class KeptWeights:
    """FP8 copies of the weights of layers with current scales.

    They are written again into the same tensors, which captured CUDA graphs read.
    """

    def __init__(self, layers: Mapping[Linear, Fp8Forward], models: Sequence[Module]) -> None:
        classes = {kind for model in models for part in model.modules() for kind in type(part).__mro__}
        sharded = any(kind.__name__ in SHARDING for kind in classes)
        self._layers = {} if sharded else {each: how for each, how in layers.items() if isinstance(how, AmpwiseForward)}
        self._copies: dict[
            Linear, tuple[Fp8Matrix, Parameter, int]
        ] = {}  # with their weights, and the version of those

    @contextmanager
    def used(self, *, first: bool) -> Iterator[bool]:
        """Let layers use the copies, after those of weights that have changed are written.

        first: whether this is the first micro-batch of a step. Then all are written: an optimizer may change weights
            through ``.data``, which their version counters do not show.

        Returns:
            a context manager; its value is whether copies are elsewhere than in the pass before.
        """
        elsewhere = False
        for module, how in self._layers.items():
            weight = module._parameters.get("weight")
            if weight is None or hasattr(weight, "device_mesh"):  # computed from others in each pass, or split
                continue
            copy, of, version = self._copies.get(module, (None, None, -1))
            if copy is None or of is not weight or copy.inverse.device != weight.device:
                elsewhere |= copy is not None
                copy = cast_to_fp8(weight.detach(), None, e5m2=False, rows=how.narrow[0], columns=how.narrow[1])
            elif first or version != weight._version:
                recast_fp8_(weight.detach(), copy)
            self._copies[module] = copy, weight, weight._version
            use_kept_weight(module, copy)
        try:
            yield elsewhere
        finally:
            for module in self._layers:
                use_kept_weight(module, None)
