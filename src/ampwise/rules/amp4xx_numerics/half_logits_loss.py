from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.modes import entered_by
from ampwise.check.source.precision import argument_of
from ampwise.check.source.reaching_definitions import reaching_values
from ampwise.check.source.sharding import wrapped_models
from ampwise.check.source.tensor_dtypes import (
    HALF,
    KEEPS,
    KEEPS_OUTSIDE,
    LIKELY_BF16,
    LIKELY_HALF,
    METHOD,
    PART,
    layers_called,
    tensor_dtypes,
    torch_operation,
)
from ampwise.check.source.torch_names import BF16, FP16
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import EventContext, SourceFile
    from ampwise.watch.run_events import Backward

RULE = Rule(
    code="AMP409",
    name="half-logits-loss",
    severity=Severity.WARNING,
    summary="Scores made under autocast, or by FSDP in 16 bits, meet their loss outside of it, still in 16 bits.",
    why=(
        "Autocast runs losses and softmax in FP32, but only inside its block. Outside, the FP16 output of a linear "
        "layer gives an FP16 loss: 11 bits, steps of 0.008 near 10 (0.06 in BF16), inf above 65504. The gradient of "
        "that loss is the loss scale, and GradScaler's first one, 65536, is inf in FP16: steps are skipped until it "
        "is 32768, and again each time it grows. FSDP's `MixedPrecisionPolicy` and `MixedPrecision` are no autocast: "
        "with `param_dtype` in 16 bits the model's output has 16 bits, unless `output_dtype` says otherwise, and no "
        "loss is run in FP32."
    ),
    fix="Compute the loss under autocast, or on `.float()` scores; with `fully_shard`: `output_dtype`.",
    bad='with torch.autocast("cuda"):\n    scores = model(x)\nloss = F.cross_entropy(scores, y)',
    good='with torch.autocast("cuda"):\n    scores = model(x)\n    loss = F.cross_entropy(scores, y)',
)
LOSSES = ("cross_entropy", "kl_div", "binary_cross_entropy_with_logits", "soft_margin_loss", "poisson_nll_loss")
FUNCTIONS = (*LOSSES, "log_softmax", "logsumexp", "log")  # what a training makes losses of
LOSS_LAYERS = (
    *("CrossEntropyLoss", "KLDivLoss", "BCEWithLogitsLoss", "SoftMarginLoss", "MultiLabelSoftMarginLoss"),
    *("LabelSmoothingCrossEntropy", "SoftTargetCrossEntropy"),  # of timm
    *("DiceCELoss", "DiceFocalLoss", "FocalLoss"),  # of MONAI
)
LAYERS = (*LOSS_LAYERS, "LogSoftmax")
SCORES = LazyPattern(r"logit|score|pred")
MOST_NAMES = 20  # between the scores of a loss and what its function gets
TRAINS = (".backward(", ".zero_grad(", "caler(loss")
NEEDS = (("autocast", "MixedPrecision"), TRAINS, (*FUNCTIONS[:3], "log_softmax", "logsumexp", ".log(", *LAYERS))


def check_source(code: SourceFile) -> Findings:
    if code.uses_framework or "convert_outputs_to_fp32" in code.script.text:
        return
    dtypes = tensor_dtypes(code, any_mode=True)
    # Language models of transformers upcast their logits only for a loss of their own, since 4.46.
    imported = [name for name in code.outline.imports.names.values() if name.startswith("transformers.")]
    keeps_its_dtype = any(name.endswith("ForCausalLM") for name in imported)
    reported: set[ast.AST] = set()
    for site in code.calls:
        call, context = site.call, site.context
        if context.autocasts or code.script.statement(call) in reported:
            continue
        for tensor in _scores(call, context):
            dtype = dtypes.dtype(tensor, context)
            is_scores = dtype == METHOD and bool(SCORES.search(ast.unparse(tensor)))
            # A part of an output in BF16 is often upcast by the model.
            if dtype == PART[LIKELY_BF16] and keeps_its_dtype:
                is_scores = any(".logits" in frame.function.text for frame in context.frame.callers())
            if is_scores or dtype in (HALF, LIKELY_HALF, PART[LIKELY_HALF], BF16, LIKELY_BF16):
                reported.add(code.script.statement(call))
                where = call
                if "autocast" in code.script.text:  # else there is no block that a caller could move the loss into
                    where, tensor = _given_by(call, tensor, context, code)
                if code.script.statement(where) in reported and where is not call:
                    break
                reported.add(code.script.statement(where))
                name = "BF16" if dtype in (BF16, LIKELY_BF16, PART[LIKELY_BF16]) else "FP16"
                scores = code.script.segment(tensor)[:40]
                verb = "may be" if _is_chosen(code) else "is"
                message = f"`{scores}` {verb} in {name} outside of autocast, so this loss {verb} computed in {name}"
                yield RULE.at(code.script.place(where), message)
                break


def _is_chosen(code: SourceFile) -> bool:
    """Return whether an option chooses between FP16 and BF16, for autocast or for FSDP."""
    regions = {autocast for site in code.statements for autocast in site.context.autocasts}
    if any(len({policy.dtype("param_dtype") for policy in own}) > 1 for own in wrapped_models(code).values()):
        return True
    return any({FP16, BF16} <= {one.dtype for one in entered_by(region)} for region in regions)


def check_event(event: Backward) -> Findings:
    if event.loss in ("fp16", "bf16") and event.loss == event.fsdp_output:
        name = event.loss.upper()
        yield RULE.at(
            event.site.place,
            f"this loss was computed in {name}: FSDP's policy gives the model's output {name}",
            fix="Compute the loss on `.float()` scores, or give the root module "
            "`MixedPrecisionPolicy(..., output_dtype=torch.float32)`.",
        )


def _given_by(call: ast.Call, tensor: ast.expr, context: EventContext, code: SourceFile) -> tuple[ast.Call, ast.expr]:
    """Return the call outside of autocast that gives the scores to a loss of this file, and the scores there."""
    frame = context.frame
    while frame.caller is not None and frame.call is not None and frame.caller.outline is code.outline:
        name = _name_of(tensor)
        for _ in range(MOST_NAMES):  # logits, for `flat = logits.reshape(-1, n)`
            values = reaching_values(name, frame) if name is not None and name.id not in frame.arguments else []
            if not values or values[0].node is None:
                break
            name = _name_of(values[0].node)
        if name is None or name.id not in frame.arguments:
            break
        call, tensor, frame = frame.call, frame.arguments[name.id], frame.caller
    return call, tensor


def _name_of(tensor: ast.expr) -> ast.Name | None:
    """Return the name of the tensor: ``logits``, of ``logits.view(-1, n)[0]`` or ``torch.flatten(logits)``."""
    while not isinstance(tensor, ast.Name):
        if isinstance(tensor, ast.Call):
            is_of_torch = isinstance(tensor.func, ast.Attribute) and ast.unparse(tensor.func.value) in ("torch", "F")
            if is_of_torch and tensor.args:
                tensor = tensor.args[0]
            elif isinstance(tensor.func, ast.Attribute) and tensor.func.attr in KEEPS | KEEPS_OUTSIDE:
                tensor = tensor.func.value  # but not `model.encode(x)`
            else:
                return None
        elif isinstance(tensor, ast.Attribute | ast.Subscript):
            tensor = tensor.value
        else:
            return None
    return tensor


def _scores(call: ast.Call, context: EventContext) -> list[ast.expr]:
    """Return the scores that a loss gets, or the first step of one; of an evaluation only those of whole losses.

    An evaluation with one loss for each row, without reduction, ranks the rows.
    """
    trains = not context.no_grad and _trains(context)
    layers = layers_called(call, context.frame)
    name, found = "", []
    if not layers.isdisjoint(LAYERS if trains else LOSS_LAYERS):
        name = "kl_div" if "KLDivLoss" in layers else ""
        found = [argument_of(call, "input", 0)]
    else:
        name, tensor = torch_operation(call, context.frame) or ("", None)
        reduction = argument_of(call, "reduction")
        is_ranked = isinstance(reduction, ast.Constant) and reduction.value == "none" and context.no_grad
        if name in (FUNCTIONS if trains else LOSSES) and argument_of(call, "dtype") is None and not is_ranked:
            found = [tensor]
    if name == "kl_div" and found:
        found.append(argument_of(call, "target", 1))
    # log(p + 1e-8) is AMP404's
    return [node for node in found if node is not None and not (name == "log" and isinstance(node, ast.BinOp))]


def _trains(context: EventContext) -> bool:
    """Return whether the function, or a caller, trains."""
    texts = [frame.function.text for frame in context.frame.callers()]
    return any(word in text for text in texts for word in TRAINS)
