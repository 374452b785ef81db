"""What is worth following: the words without which a file, or a function, has no part in a training step."""

from __future__ import annotations

import bisect

from ampwise.source.pattern import Pattern

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from ampwise.source.outline import Function

__all__ = ["computes", "is_worth_reading", "steps", "takes_part", "trains", "trains_in_half"]

# A file without these holds no training step and no autocast region.
TRAINS = Pattern(r"\.backward\(|autocast|GradScaler|unscale_|caler\.(?:step|scale|update)\(|\.half\(|float16")
# What makes, changes or applies gradients: worth following into another file.
STEPS = Pattern(
    r"\.backward\(|autocast\(|GradScaler|unscale_|clip_grad|clamp_\(|\.grad\.|_foreach_|caler\.(?:step|scale|update)\(|"
    r"(?:optim|opt|sched)\w*\.(?:step|zero_grad)\("
)
# What happens around it: worth following within the file.
AROUND = Pattern(
    STEPS.text + r"|[sS]caler|\.half\(|\.grad\b|zero_grad|torch\.save|save_checkpoint|no_grad|inference_mode|\.eval\(\)"
)
COMPUTES = Pattern(
    r"BCE|binary_cross_entropy|masked_fill|where\(|exp\(|log\(|\beps\b|1e-|sqrt|softmax|sigmoid|autocast|"
    r"[cC]riterion|[lL]oss"
)
# A loss, or a model: what a training script imports to compute with.
LOSSES = Pattern(r"(?:class|def) \w*(?:[lL]oss|[cC]riterion|ntropy)|nn\.Module|\(Module\)")


def trains(text: str) -> bool:
    """Whether a file may hold a training step, or an autocast region."""
    return TRAINS.search(text) is not None


def is_worth_reading(text: str) -> bool:
    """Whether a file that others import from may do a part of their step, or compute their loss."""
    return STEPS.search(text) is not None or LOSSES.search(text) is not None


def trains_in_half(text: str) -> bool:
    """Whether a file makes gradients, and may do so in half precision."""
    return ".backward(" in text and ("autocast" in text or "caler" in text or "float16" in text or ".half(" in text)


def steps(function: Function) -> bool:
    """Whether a function itself may make, change or apply gradients."""
    return _says(function, STEPS)


def takes_part(function: Function) -> bool:
    """Whether a function itself may do anything that belongs to training: stepping, saving, evaluating."""
    return _says(function, AROUND)


def computes(function: Function) -> bool:
    """Whether a function itself may compute something that autocast makes fragile."""
    return _says(function, COMPUTES)


def _says(function: Function, words: Pattern) -> bool:
    """Whether one of the words stands in a function; each file is searched once, for all its functions."""
    known = function.outline.lines_with
    if words not in known:
        known[words] = _lines_with(words, function.outline.script.text)
    lines = known[words]
    first, last = function.lines
    index = bisect.bisect_left(lines, first)
    return index < len(lines) and lines[index] <= last


def _lines_with(words: Pattern, text: str) -> list[int]:
    """The numbers of the lines with one of the words, in order."""
    found: list[int] = []
    line, position = 1, 0
    for match in words.finditer(text):
        line += text.count("\n", position, match.start())
        position = match.start()
        if not found or found[-1] != line:
            found.append(line)
    return found
