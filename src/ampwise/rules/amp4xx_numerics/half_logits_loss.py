from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.precision import argument_of
from ampwise.check.source.tensor_dtypes import HALF, LIKELY_HALF, layer_called, tensor_dtypes, torch_operation
from ampwise.check.source.torch_names import BF16
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import EventContext, SourceFile

RULE = Rule(
    code="AMP409",
    name="half-logits-loss",
    severity=Severity.WARNING,
    summary="Scores made under autocast meet their loss outside of it, still in half precision.",
    why=(
        "Autocast runs losses and softmax in FP32, but only inside its block. Outside, the FP16 output of a linear "
        "layer gives an FP16 loss: 11 bits, steps of 0.008 near 10 (0.06 in BF16), inf above 65504. The gradient of "
        "that loss is the loss scale, and GradScaler's first one, 65536, is inf in FP16: steps are skipped until it "
        "is 32768, and again each time it grows."
    ),
    fix="Compute the loss inside the autocast block, or on `.float()` scores.",
    bad='with torch.autocast("cuda"):\n    scores = model(x)\nloss = F.cross_entropy(scores, y)',
    good='with torch.autocast("cuda"):\n    scores = model(x)\n    loss = F.cross_entropy(scores, y)',
)
FUNCTIONS = (
    *("cross_entropy", "log_softmax", "logsumexp", "kl_div", "binary_cross_entropy_with_logits"),
    *("log", "soft_margin_loss", "poisson_nll_loss"),
)
LAYERS = ("CrossEntropyLoss", "LogSoftmax", "KLDivLoss", "BCEWithLogitsLoss", "SoftMarginLoss")
NEEDS = (("autocast",), (".backward(",), (*FUNCTIONS[:5], ".log(", *LAYERS))


def check_source(code: SourceFile) -> Findings:
    if code.uses_framework or "convert_outputs_to_fp32" in code.script.text:
        return
    reported: set[ast.AST] = set()
    for site in code.calls:
        call, context = site.call, site.context
        if call in reported or context.autocasts or context.no_grad or not _trains(context):
            continue
        if layer_called(call, context.frame) in LAYERS:
            tensor = argument_of(call, "input", 0)
        else:
            name, tensor = torch_operation(call, context.frame) or ("", None)
            tensor = tensor if name in FUNCTIONS and argument_of(call, "dtype") is None else None
        if tensor is None or isinstance(tensor, ast.BinOp):  # log(p + 1e-8) is AMP404's
            continue
        dtype = tensor_dtypes(code).dtype(tensor, context)
        if dtype in (HALF, LIKELY_HALF, BF16):  # BF16 only if it is certain: many models upcast their scores
            reported.add(call)
            name = "BF16" if dtype == BF16 else "FP16"
            message = (
                f"`{code.script.segment(tensor)[:40]}` left autocast in {name}, so this loss is computed in {name}"
            )
            yield RULE.at(code.script.place(call), message)


def _trains(context: EventContext) -> bool:
    """Return whether the function, or a caller, has a backward: scores of an evaluation may be in half."""
    return any(".backward(" in frame.function.text for frame in context.frame.callers())
