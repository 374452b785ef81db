"""Register custom operators, which torch.compile does not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["register_op"]

NAMESPACE = "ampwise"


def register_op(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register ``function`` as an operator and return it; ``fake`` returns empty tensors like its results.

    Uses torch's older interface: ``torch.library.custom_op`` checks all arguments and results in each call, which takes
    several times as long, and a step of a large model has hundreds of calls. The operators must not change or return
    their arguments, and have no derivative: they are called where autograd is off.
    """
    name = f"{NAMESPACE}::{schema.partition('(')[0]}"
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, ("CPU", "CUDA"), function)
    torch.library.register_fake(name, fake)
    found: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name.partition("::")[2]).default
    return found
