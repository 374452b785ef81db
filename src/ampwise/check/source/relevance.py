"""Decide what is worth analysing: words without which a file or a function has no part in a training step.

Words are plain substrings: searching for all of them takes a fraction of the time of one regular expression.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from ampwise.check.source.lazy_pattern import LazyPattern

if TYPE_CHECKING:
    from ampwise.check.source.outline import FunctionOutline

Words = tuple[str, ...]
CALL = LazyPattern(r"(?<!def )\b(\w++)\(")  # not where it is defined

# A file without these has no training step and no autocast region.
TRAINS: Words = (
    *(".backward(", "autocast", "GradScaler", "unscale_(", ".half(", "float16"),
    *("caler.step(", "caler.scale(", "caler.update("),
)
# What makes, changes or applies gradients: worth following into another file.
STEPS: Words = (
    *(".backward(", "autocast(", "GradScaler", "unscale_", "clip_grad", ".grad.", ".grad,", "grads.", "_foreach_"),
    *("caler.scale(", "caler.update(", ".step(", ".zero_grad("),
)
STEPS_OR_SAVES: Words = (*STEPS, "torch.save(")
STEPS_OR_EVALUATES: Words = (*STEPS_OR_SAVES, ".eval()")
# What wraps a model that then needs another scaler.
SHARDS: Words = ("FSDP(", "FullyShardedDataParallel(")
WORTH_FOLLOWING: Words = (*STEPS_OR_SAVES, *SHARDS)
# Everything that belongs to training, stepping, saving, evaluating: worth following within the file.
TAKES_PART: Words = (
    *STEPS,
    *("caler", ".half(", ".grad", "torch.save", "save_checkpoint", "no_grad", "inference_mode", ".eval()"),
    *("FSDP", "DDP(", "DataParallel"),
)
# Computations that autocast makes fragile.
COMPUTES: Words = (
    *("BCE", "bce", "binary_cross_entropy", "masked_fill", "where(", "exp(", "log(", "eps", "1e-", "-1e", "sqrt"),
    *("softmax", "sigmoid", "autocast", "riterion", "loss", "Loss"),
)
# Losses of scores, which are inaccurate on scores in half.
LOSSES: Words = (
    "cross_entropy",
    "CrossEntropy",
    "log_softmax",
    "LogSoftmax",
    "kl_div",
    "KLDiv",
    "logsumexp",
    "with_logits",
)
# What an imported file may have: a part of the step, a scheduler, a loss or a model of a training script, a save.
WORTH_READING: Words = (
    *(*STEPS_OR_EVALUATES, *SHARDS, "def step(self", "Loss(", "_loss(", "loss_fn(", "loss = "),
    *("nn.Module)", "(Module)", "cross_entropy(", "float16", "bf16", "optim."),
)
IN_HALF: Words = ("autocast", "caler", "float16", ".half(")


def has_any(text: str, words: Words) -> bool:
    """Whether a text contains one of the words."""
    for word in words:  # noqa: SIM110 (a generator would take twice the time)
        if word in text:
            return True
    return False


def is_worth_importing(text: str, names: set[str]) -> bool:
    """Whether the definition of one of these names has a part of the step or a loss ("*": all names).

    The text of a top-level function or class ends at the next definition.
    """
    if "*" in names or not has_any(text, WORTH_READING):
        return has_any(text, WORTH_READING)
    for name in names:
        for head in (f"\ndef {name}(", f"\nclass {name}(", f"\nclass {name}:"):
            start = text.find(head)
            if start >= 0:
                ends = [end for mark in ("\ndef ", "\nclass ", "\n@") if (end := text.find(mark, start + 1)) >= 0]
                if has_any(text[start : min(ends, default=len(text))], WORTH_READING):
                    return True
    return False


def says(function: FunctionOutline, words: Words) -> bool:
    """Whether a function contains one of the words; each file is searched once, for all its functions."""
    known = function.outline.lines_with
    if words not in known:
        text = function.outline.script.text
        positions = []
        for word in words:
            position = text.find(word)
            while position >= 0:
                positions.append(position)
                position = text.find(word, position + 1)
        known[words] = []
        line, reached = 1, 0
        for position in sorted(positions):
            line += text.count("\n", reached, position)
            reached = position
            known[words].append(line)
    lines = known[words]
    first, last = function.lines
    index = bisect.bisect_left(lines, first)
    return index < len(lines) and lines[index] <= last


def names_called(function: FunctionOutline) -> set[str]:
    """Return the names that a function calls, found in its text."""
    if function.names_called is None:
        calls = function.outline.calls_by_line
        if calls is None:
            text = function.outline.script.text
            calls = []
            line, reached = 1, 0
            for match in CALL.finditer(text):
                start = match.start()
                line += text.count("\n", reached, start)
                reached = start
                calls.append((line, match[1]))
            calls.sort()
            function.outline.calls_by_line = calls  # with their lines, in order
        first, last = function.lines
        start, end = bisect.bisect_left(calls, (first, "")), bisect.bisect_left(calls, (last + 1, ""))
        function.names_called = {name for _, name in calls[start:end]}
    return function.names_called
