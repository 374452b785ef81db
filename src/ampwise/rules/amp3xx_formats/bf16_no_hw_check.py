from __future__ import annotations

import ast
import functools
import re
from typing import TYPE_CHECKING

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.precision import argument_of
from ampwise.check.source.questions import guard_source
from ampwise.check.source.torch_names import BF16
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import SourceFile

RULE = Rule(
    code="AMP303",
    name="bf16-no-hw-check",
    severity=Severity.INFO,
    summary="BF16 autocast runs on CUDA without a check, or with a wrong check, that the GPU supports it.",
    why=(
        "BF16 tensor cores came with compute capability 8.0. On a V100 (7.0) or T4 (7.5) torch silently emulates "
        "BF16, several times slower than FP16 or even FP32."
    ),
    fix=(
        "Choose by hardware: BF16 if `torch.cuda.get_device_capability() >= (8, 0)`, else FP16 with a GradScaler. "
        "`is_bf16_supported()` alone includes emulation."
    ),
    bad='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)',
    good=(
        "has_bf16 = torch.cuda.get_device_capability() >= (8, 0)\n"
        "dtype = torch.bfloat16 if has_bf16 else torch.float16\n"
        'with torch.autocast("cuda", dtype=dtype):\n    loss = loss_fn(model(x), y)'
    ),
)
NEEDS = (("bfloat16", "bf16"), ("autocast", "capability"), (".backward(", "capability"))

CHECKS_HARDWARE = LazyPattern(
    r"bf16_support|is_bf16|bfloat16_support|capability|\.major\b|bf16_available|supports_bf|has_bf16|can_bf16|"
    r"get_arch_list"
)
NOT_CUDA = ("cpu", "mps", "xla", "hpu")  # not CUDA devices
CHOSEN = LazyPattern(r"bf16|bfloat|dtype|precision|half|fp16", re.IGNORECASE)
ABOUT_BF16 = LazyPattern(r"bf16|bfloat16", re.IGNORECASE)


def check_source(code: SourceFile) -> Findings:
    if code.uses_framework:
        return
    yield from _low_thresholds(code)
    if CHECKS_HARDWARE.search(code.script.text):
        return
    if not any(region.has("backward", "scaled backward", "opaque") for region in code.regions):
        return  # inference code may be written for a known GPU
    for site in code.statements:
        autocast = site.context.autocast
        if autocast is None or not autocast.known or not autocast.may_be_on or autocast.device in NOT_CUDA:
            continue
        # The user may have chosen BF16 explicitly: `if args.bf16`, `enabled=cfg.bf16`.
        asked = [guard_source(guard) for guard in site.context.guards]
        enabled = argument_of(autocast.node, "enabled") if isinstance(autocast.node, ast.Call) else None
        asked += [] if enabled is None else [ast.unparse(enabled)]
        chosen = autocast.optional or CHOSEN.search(" ".join(asked))
        if autocast.is_surely(BF16) and not chosen:
            place = code.script.place(autocast.node)
            yield RULE.at(place, "BF16 is used on any GPU: before compute capability 8.0 it is emulated")
            return  # one check fixes them all


def _low_thresholds(code: SourceFile) -> Findings:
    """Yield a finding for checks like ``get_device_capability()[0] >= 7``, which a V100 passes."""
    if "capability" not in code.script.text or not re.search("bf16|bfloat16", code.script.text):
        return
    for node in code.nodes(ast.Compare):
        if len(node.ops) == 1 and "get_device_capability" in ast.unparse(node.left):
            least = _least(node)
            if least is not None and least < (8, 0) and _is_about_bf16(code.script.statement(node)):
                yield RULE.at(
                    code.script.place(node),
                    f"BF16 needs compute capability 8.0, but this lets {least[0]}.{least[1]} pass",
                )


def _least(node: ast.Compare) -> tuple[int, int] | None:
    """Return the smallest capability that passes."""
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


@functools.lru_cache(maxsize=8)
def _is_about_bf16(statement: ast.stmt) -> bool:
    head = statement.test if isinstance(statement, ast.If | ast.While) else statement
    return any(ABOUT_BF16.search(ast.unparse(part)) for part in (head, *getattr(statement, "body", [])[:3]))
