"""BF16 on a GPU nobody asked whether it has it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.events import Context
from ampwise.source.pattern import Pattern
from ampwise.source.precision import Autocast
from ampwise.source.project import Code
from ampwise.source.questions import question
from ampwise.source.vocabulary import BF16

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP303",
    name="bf16-no-hw-check",
    severity=Severity.INFO,
    summary="BF16 autocast on CUDA without a check that the GPU has it, or with a wrong one.",
    why=(
        "BF16 matrix units came with compute capability 8.0. On a V100 (7.0) or T4 (7.5) torch emulates BF16, "
        "silently and several times slower than FP16 or even FP32."
    ),
    fix=(
        "Choose by hardware: `dtype = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else "
        "torch.float16` (`is_bf16_supported()` alone counts emulation too), with a GradScaler enabled for FP16."
    ),
    bad='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)',
    good=(
        "has_bf16 = torch.cuda.get_device_capability() >= (8, 0)\n"
        "dtype = torch.bfloat16 if has_bf16 else torch.float16\n"
        'with torch.autocast("cuda", dtype=dtype):\n    loss = loss_fn(model(x), y)'
    ),
)
NEEDS = (("bfloat16", "bf16"), ("autocast", "capability"), (".backward(", "capability"))

ASKS_HARDWARE = Pattern(
    r"bf16_support|is_bf16|bfloat16_support|capability|\.major\b|bf16_available|supports_bf|has_bf16|can_bf16|"
    r"get_arch_list"
)
ELSEWHERE = ("cpu", "mps", "xla", "hpu")  # than on a CUDA device
CHOSEN = Pattern(r"bf16|bfloat|dtype|precision|half|fp16", re.IGNORECASE)


def check(code: Code) -> Iterator[Finding]:
    if code.uses_framework:
        return
    yield from _low_thresholds(code)
    if ASKS_HARDWARE.search(code.script.text):
        return
    first = next(_always_in_bf16(code), None)  # one check mends them all
    if first is not None:
        yield RULE.at(
            code.script.place(first.node), "BF16 whatever the GPU: before compute capability 8.0 it is emulated"
        )


def _always_in_bf16(code: Code) -> Iterator[Autocast]:
    """The autocast regions of a file that trains; one that only infers may know the GPU it is for."""
    if not any(region.has("backward", "scaled backward", "opaque") for region in code.regions):
        return
    for site in code.statements:
        autocast = site.context.autocast
        if autocast is not None and _is_bf16_on_cuda(autocast) and not _is_an_option(site.context, autocast):
            yield autocast


def _is_bf16_on_cuda(autocast: Autocast) -> bool:
    return autocast.known and autocast.may_be_on and autocast.device not in ELSEWHERE and autocast.is_surely(BF16)


def _is_an_option(context: Context, autocast: Autocast) -> bool:
    """The user asked for BF16 by name: ``if args.bf16``, ``enabled=cfg.bf16``."""
    guards = " ".join(question(guard) for guard in context.guards)
    enabled = next((w.value for w in getattr(autocast.node, "keywords", []) if w.arg == "enabled"), None)
    asked = guards + (ast.unparse(enabled) if enabled is not None else "")
    return autocast.optional or bool(CHOSEN.search(asked))


def _low_thresholds(code: Code) -> Iterator[Finding]:
    """``get_device_capability()[0] >= 7`` lets a V100 pass."""
    if "capability" not in code.script.text or not re.search("bf16|bfloat16", code.script.text):
        return
    for node in code.nodes(ast.Compare):
        if len(node.ops) == 1 and "get_device_capability" in ast.unparse(node.left):
            least = _least(node)
            decides = _decides_bf16(node, code)
            if least is not None and least < (8, 0) and decides:
                yield RULE.at(
                    code.script.place(node),
                    f"BF16 needs compute capability 8.0, and this lets {least[0]}.{least[1]} pass",
                )


def _least(node: ast.Compare) -> tuple[int, int] | None:
    """The smallest capability that passes."""
    try:
        limit = ast.literal_eval(node.comparators[0])
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    numbers = limit if isinstance(limit, tuple) else (limit,)
    if not 1 <= len(numbers) <= 2 or not all(isinstance(number, int) for number in numbers):
        return None
    major, minor = (*numbers, 0)[:2]
    if isinstance(node.ops[0], ast.GtE):
        return major, minor
    if isinstance(node.ops[0], ast.Gt):
        return (major + 1, 0) if len(numbers) == 1 else (major, minor + 1)
    return None


def _decides_bf16(node: ast.Compare, code: Code) -> bool:
    """Whether the statement this comparison stands in is about BF16."""
    return _is_about_bf16(code.script.statement(node))


@functools.lru_cache(maxsize=8)
def _is_about_bf16(statement: ast.stmt) -> bool:
    head = statement.test if isinstance(statement, ast.If | ast.While) else statement
    body = " ".join(ast.unparse(part) for part in getattr(statement, "body", [])[:3])
    return bool(re.search(r"bf16|bfloat16", ast.unparse(head) + " " + body, re.IGNORECASE))
