from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING

from ampwise.check.source.scaled_losses import may_be_scaled
from ampwise.check.source.torch_names import NOT_A_GRAD_SCALER
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import SourceFile
    from ampwise.watch.run_events import OptimizerStep

RULE = Rule(
    code="AMP301",
    name="fp16-no-scaler",
    severity=Severity.ERROR,
    summary="FP16 is trained with a plain `backward()` and without a GradScaler.",
    why=(
        "FP16 cannot represent magnitudes below 6e-8. Activation gradients are often smaller, so without loss scaling "
        "they become zero, and the layers below them stop learning while the loss still looks reasonable."
    ),
    fix="Scale the loss with `torch.amp.GradScaler`, or use `dtype=torch.bfloat16` if the GPU supports it.",
    bad=(
        'with torch.autocast("cuda", dtype=torch.float16):\n    loss = loss_fn(model(x), y)\n'
        "loss.backward()\noptimizer.step()"
    ),
    good=(
        'with torch.autocast("cuda", dtype=torch.float16):\n    loss = loss_fn(model(x), y)\n'
        "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()"
    ),
)
NEEDS = (("autocast",), (".backward(",))


def check_source(code: SourceFile) -> Findings:
    if _may_scale(code):
        return
    for region in code.regions:
        if region.hidden or not region.has("optimizer step"):
            continue
        # Another file that the step goes through may have a scaler, or a framework that scales.
        others = {event.frame.outline.path for event in region.events} - {code.path}
        if any(_may_scale(code.project.code(path)) for path in sorted(others)):
            continue
        for backward, moments in region.visits("backward"):
            # The last forward before the backward, on each path.
            forwards = [next((e for e in m.earlier("forward") if not e.context.no_grad), None) for m in moments]
            autocasts = [None if forward is None else forward.context.autocast for forward in forwards]
            in_fp16 = all(autocast is not None and autocast.surely_fp16 for autocast in autocasts)
            if in_fp16 and forwards[0] is not None and not may_be_scaled(backward):
                line = forwards[0].spot(backward)
                message = f"the forward in {line} runs in FP16, but no scaler keeps its gradients from underflowing"
                yield RULE.at(backward.place, message)


@functools.lru_cache(maxsize=64)  # called for every training step, for its own file and others
def _may_scale(code: SourceFile) -> bool:
    """Return whether a file uses a framework, or anything in it is called a scaler, other than feature scalers."""
    if code.uses_framework or any("scaler" in node.arg.lower() for node in code.nodes(ast.arg)):
        return True
    named: list[tuple[ast.expr, str]] = [(node, node.id) for node in code.nodes(ast.Name)]
    named += [(node, node.attr) for node in code.nodes(ast.Attribute)]
    for node, name in named:
        if "scaler" in name.lower():
            frame = code.frame(code.function_at(node))
            if frame.role(node) is not None and not NOT_A_GRAD_SCALER.search(frame.qualified(node) or ""):
                return True
    return False


def check_event(step: OptimizerStep) -> Findings:
    alone = not step.scaled and not step.again and step.scaled_by_constant is None and step.backward is not None
    if alone and "fp16" in step.parameters:
        yield RULE.at(
            (step.backward or step.site).place,
            "the parameters are FP16 and this loss is not scaled: gradients below 6e-8 are zero at the "
            f"`{step.optimizer}.step` of {step.site.short}",
            fix="Keep the parameters in FP32, run the model under FP16 autocast, and scale the loss with a GradScaler.",
        )
    elif alone and "fp16" in step.precisions:
        beside = " by the GradScaler" if step.scaler else ""
        yield RULE.at(
            (step.backward or step.site).place,
            f"the model ran in FP16, but this loss is not scaled{beside}: gradients may underflow before the "
            f"`{step.optimizer}.step` of {step.site.short}",
        )
