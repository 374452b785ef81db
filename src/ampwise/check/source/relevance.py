"""Decide what is worth analysing: words without which a file or a function has no part in a training step.

Words are plain substrings: searching for all of them takes a fraction of the time of one regular expression.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from ampwise.check.source.lazy_pattern import LazyPattern

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from ampwise.check.source.outline import FunctionOutline

__all__ = [
    "is_worth_importing",
    "is_worth_reading",
    "may_lose_precision",
    "may_step",
    "may_step_or_save",
    "may_take_part",
    "may_train",
    "may_train_in_half",
    "names_called",
]

Words = tuple[str, ...]
CALL = LazyPattern(r"(?<!def )\b(\w+)\(")  # not where it is defined

# A file without these has no training step and no autocast region.
TRAINS = (
    *(".backward(", "autocast", "GradScaler", "unscale_", ".half(", "float16"),
    *("caler.step(", "caler.scale(", "caler.update("),
)
# What makes, changes or applies gradients: worth following into another file.
STEPS = (
    *(".backward(", "autocast(", "GradScaler", "unscale_", "clip_grad", "clamp_(", ".grad.", "_foreach_"),
    *("caler.scale(", "caler.update(", ".step(", ".zero_grad("),
)
STEPS_OR_SAVES = (*STEPS, "torch.save(")
# Everything that belongs to training: worth following within the file.
TAKES_PART = (
    *STEPS,
    *("caler", ".half(", ".grad", "torch.save", "save_checkpoint", "no_grad", "inference_mode", ".eval()"),
)
# Computations that autocast makes fragile.
COMPUTES = (
    *(
        "BCE",
        "binary_cross_entropy",
        "masked_fill",
        "where(",
        "exp(",
        "log(",
        "eps",
        "1e-",
        "sqrt",
        "softmax",
        "sigmoid",
    ),
    *("autocast", "riterion", "loss", "Loss"),
)
# Losses and models that a training script imports.
LOSSES = ("Loss(", "_loss(", "loss_fn(", "nn.Module)", "(Module)", "cross_entropy(")
IN_HALF = ("autocast", "caler", "float16", ".half(")


def may_train(text: str) -> bool:
    """Whether a file may have a training step or an autocast region."""
    return any(word in text for word in TRAINS)


def may_train_in_half(text: str) -> bool:
    """Whether a file computes gradients, possibly in half precision."""
    return ".backward(" in text and any(word in text for word in IN_HALF)


def is_worth_reading(text: str) -> bool:
    """Whether an imported file may do a part of the step, compute the loss, or save the state."""
    return any(word in text for word in (*STEPS_OR_SAVES, *LOSSES))


def is_worth_importing(text: str, names: set[str]) -> bool:
    """Whether the definition of one of these names has a part of the step or a loss ("*": all names)."""
    if not is_worth_reading(text) or "*" in names:
        return is_worth_reading(text)
    return any(is_worth_reading(definition) for name in names for definition in _definitions(name, text))


def _definitions(name: str, text: str) -> Iterator[str]:
    """Yield the text of top-level functions and classes of this name, up to the next definition."""
    for head in (f"\ndef {name}(", f"\nclass {name}(", f"\nclass {name}:"):
        start = text.find(head)
        if start >= 0:
            ends = [end for mark in ("\ndef ", "\nclass ", "\n@") if (end := text.find(mark, start + 1)) >= 0]
            yield text[start : min(ends, default=len(text))]


def may_step(function: FunctionOutline) -> bool:
    """Whether a function itself may compute, change or apply gradients."""
    return _says(function, STEPS)


def may_step_or_save(function: FunctionOutline) -> bool:
    """Whether a function itself may compute, change or apply gradients, or save state."""
    return _says(function, STEPS_OR_SAVES)


def may_take_part(function: FunctionOutline) -> bool:
    """Whether a function itself may do anything that belongs to training: stepping, saving, evaluating."""
    return _says(function, TAKES_PART)


def may_lose_precision(function: FunctionOutline) -> bool:
    """Whether a function itself may compute something that autocast makes fragile."""
    return _says(function, COMPUTES)


def names_called(function: FunctionOutline) -> set[str]:
    """Return the names that a function calls, found in its text."""
    if function.names_called is None:
        calls = function.outline.calls_by_line
        if calls is None:
            calls = function.outline.calls_by_line = _calls_in(function.outline.script.text)
        first, last = function.lines
        start, end = bisect.bisect_left(calls, (first, "")), bisect.bisect_left(calls, (last + 1, ""))
        function.names_called = {name for _, name in calls[start:end]}
    return function.names_called


def _calls_in(text: str) -> list[tuple[int, str]]:
    """Return the calls by name in a text, each with its line, in order."""
    found = []
    line, reached = 1, 0
    for match in CALL.finditer(text):
        line += text.count("\n", reached, match.start())
        reached = match.start()
        found.append((line, match[1]))
    return sorted(found)


def _says(function: FunctionOutline, words: Words) -> bool:
    """Whether a function contains one of the words; each file is searched once, for all its functions."""
    known = function.outline.lines_with
    if words not in known:
        known[words] = _lines_with(words, function.outline.script.text)
    lines = known[words]
    first, last = function.lines
    index = bisect.bisect_left(lines, first)
    return index < len(lines) and lines[index] <= last


def _lines_with(words: Words, text: str) -> list[int]:
    """Return the numbers of the lines that contain one of the words, in order."""
    found: list[int] = []
    line, reached = 1, 0
    for position in sorted(position for word in words for position in _positions(word, text)):
        line += text.count("\n", reached, position)
        reached = position
        if not found or found[-1] != line:
            found.append(line)
    return found


def _positions(word: str, text: str) -> Iterator[int]:
    """Yield the positions of a word."""
    position = text.find(word)
    while position >= 0:
        yield position
        position = text.find(word, position + 1)
