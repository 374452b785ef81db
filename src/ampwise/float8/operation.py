"""An operation of ours that torch.compile leaves whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["operation"]

NAMESPACE = "ampwise"


def operation(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """What is called in the place of ``function``; ``fake`` makes room for the same results, with nothing in it.

    By torch's older interface: ``torch.library.custom_op`` looks at all arguments and results in each call, which
    takes several times as long, and a step of a large model has hundreds of calls. Neither changes an argument nor
    returns one, and neither has a derivative: they are called where autograd is off.
    """
    name = f"{NAMESPACE}::{schema.partition('(')[0]}"
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, ("CPU", "CUDA"), function)
    torch.library.register_fake(name, fake)
    found: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name.partition("::")[2]).default
    return found
