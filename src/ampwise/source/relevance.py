"""What is worth reading: the words without which a file, or a function, has nothing to do with mixed precision.

Most files of a large tree are passed over by these words alone, without being parsed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampwise.source.outline import Function

__all__ = ["can_hold_findings", "computes", "steps", "takes_part", "trains"]

# Any of these alone can be a finding.
ALONE = (b"GradScaler", b"unscale_", b"cuda.amp", b"cpu.amp", b"import amp", b"allow_tf32", b"float32_matmul_precision")
# With a backward in the same file: training, in a precision that matters.
WITH_BACKWARD = (b"autocast", b"caler", b"float16", b".half(", b"loss_scale")
# With autocast in the same file.
WITH_AUTOCAST = (
    *(b"enabled=False", b"autograd.Function", b"(Function)", b"BCELoss", b"binary_cross_entropy", b"masked_fill"),
    *(b"1e-8", b"1e-9", b"1e-1", b"e9", b"e10"),
)

# A file without these holds no training step and no autocast region.
TRAINS = re.compile(r"\.backward\(|autocast|GradScaler|unscale_|caler\.(?:step|scale|update)\(|\.half\(|float16")
# What makes, changes or applies gradients, or decides in which precision: worth following into another file.
STEPS = re.compile(
    r"\.backward\(|autocast|[sS]caler|unscale_|clip_grad|clamp_\(|\.grad\b|_foreach_|\.half\(|float16|"
    r"(?:optim|opt|sched)\w*\.(?:step|zero_grad)\("
)
# What happens around it: worth following within the file.
AROUND = re.compile(STEPS.pattern + r"|\.step\(|zero_grad|torch\.save|save_checkpoint|no_grad|inference_mode|\.eval\(\)")
COMPUTES = re.compile(
    r"BCE|binary_cross_entropy|masked_fill|where\(|exp\(|log\(|\beps\b|1e-|sqrt|softmax|sigmoid|autocast|[cC]riterion|[lL]oss"
)


def can_hold_findings(data: bytes) -> bool:
    """Whether any rule can find anything in a file with this text."""
    if any(word in data for word in ALONE):
        return True
    if b".backward(" in data and any(word in data for word in WITH_BACKWARD):
        return True
    return b"autocast" in data and any(word in data for word in WITH_AUTOCAST)


def trains(text: str) -> bool:
    """Whether a file may hold a training step, or an autocast region."""
    return TRAINS.search(text) is not None


def steps(function: Function) -> bool:
    """Whether a function itself may make, change or apply gradients, or choose a precision."""
    return STEPS.search(function.text) is not None


def takes_part(function: Function) -> bool:
    """Whether a function itself may do anything that belongs to training: stepping, saving, evaluating."""
    return AROUND.search(function.text) is not None


def computes(function: Function) -> bool:
    """Whether a function itself may compute something that autocast makes fragile."""
    return COMPUTES.search(function.text) is not None
