"""Load an optimizer's state with its saved dtypes; torch itself casts it to the dtype of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

__all__ = ["keep_saved_dtypes"]


def keep_saved_dtypes(optimizer: Optimizer) -> list[RemovableHandle]:
    """Make ``optimizer.load_state_dict`` keep the saved dtypes from now on."""
    given: list[Mapping[str, Any]] = []

    def before(_: Optimizer, state: dict[str, Any]) -> None:
        given[:] = [state]

    def after(loaded: Optimizer) -> None:
        state = given.pop()
        saved = chain.from_iterable(group["params"] for group in state["param_groups"])
        held = chain.from_iterable(group["params"] for group in loaded.param_groups)
        for number, parameter in zip(saved, held, strict=True):
            _put_back(loaded.state.get(parameter, {}), state["state"].get(number, {}))

    return [
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after),
    ]


def _put_back(loaded: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        now = loaded.get(key)
        if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
            loaded[key] = value.to(now.device, copy=True)
