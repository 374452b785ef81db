from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.events import EventKind
from ampwise.check.source.half_models import half_by_default, half_optimizers
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text
from ampwise.check.source.torch_names import BF16
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.half_models import TrainedHalfModel
    from ampwise.check.source.project import SourceFile
    from ampwise.watch.run_events import OptimizerStep

RULE = Rule(
    code="AMP306",
    name="pure-bf16-plain-optimizer",
    severity=Severity.WARNING,
    summary="BF16 parameters are updated in place by a plain torch optimizer.",
    why=(
        "BF16 has 8 significant bits. An update smaller than about 1/512 of a weight is rounded away, and with usual "
        "learning rates most updates are that small: as training goes on, more and more weights stop changing."
    ),
    fix=(
        "Keep FP32 weights, and run the forward pass under `torch.autocast('cuda', dtype=torch.bfloat16)`. Or keep "
        "BF16 weights and train with `ampwise.Engine(model, optimizer, 'bf16-pure')`."
    ),
    bad="model = Net().to(torch.bfloat16)\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)",
    good=(
        "model = Net()\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n"
        'with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)'
    ),
)
NEEDS = ((".backward(",),)

# What surely keeps no FP32 copy. A model's own `configure_optimizers` makes one of these, as in nanoGPT.
PLAIN = LazyPattern(r"^(torch\.optim\.\w|transformers\.(optimization\.)?AdamW$)|(^|\.)configure_optimizers$")


def check_source(code: SourceFile) -> Findings:
    if (code.uses_framework and not code.is_accelerated_alone) or not code.names("bfloat16"):
        return
    for pair in half_optimizers(code, BF16):
        if _may_be_plain(pair):
            since, lost = pair.model.spot(pair.place), "updates below 1/512 of a weight are lost"
            how = "may have been" if pair.model.given else "have been"
            yield RULE.at(pair.place, f"the weights {how} BF16 since {since}: {lost}")
    if any(region.has(EventKind.OPTIMIZER_STEP) for region in code.visible_regions):
        for cast in half_by_default(code):
            if cast.dtype == BF16:
                yield RULE.at(code.script.place(cast.node), "new parameters are BF16: updates below 1/512 are lost")


def _may_be_plain(pair: TrainedHalfModel) -> bool:
    """Whether the class of an optimizer is a plain one, or one of those that an option chooses among."""
    func = pair.optimizer.func
    held = pair.frame.values(func) if isinstance(func, ast.Name | ast.Attribute) else []
    names = [home.qualified(value) or dotted_text(value) for value, home in held if value is not None]
    names.append(pair.frame.qualified(func) or dotted_text(func))
    target = pair.frame.callee(pair.optimizer)
    if target is not None and target[0].outline is not pair.frame.outline:  # get_optimizer(model) of another file
        made = pair.frame.enter(target[0], pair.optimizer, target[1])
        values = [value for one in target[0].returns if one is not None for value in made.values(one)]
        names += [home.qualified(value.func) for value, home in values if isinstance(value, ast.Call)]
    return any(name is not None and PLAIN.search(name) for name in names)


def check_event(step: OptimizerStep) -> Findings:
    if step.plain and step.parameters == ("bf16",):
        yield RULE.at(
            (step.cast_at or step.site).place,
            f"{step.optimizer} adds its updates directly to BF16 weights, which have 8 significant bits",
        )
