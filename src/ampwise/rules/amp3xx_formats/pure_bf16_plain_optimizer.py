from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.check.source.half_models import half_optimizers
from ampwise.check.source.torch_names import BF16
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
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
NEEDS = (("bfloat16",), (".backward(",))


def check_source(code: SourceFile) -> Findings:
    text = code.script.text
    if "bfloat16" not in text or "backward(" not in text or code.uses_framework:
        return
    for pair in half_optimizers(code, BF16):
        if (pair.frame.qualified(pair.optimizer.func) or "").startswith("torch.optim."):
            since, lost = pair.model.spot(pair.place), "updates below 1/512 of a weight are lost"
            yield RULE.at(pair.place, f"the weights have been BF16 since {since}: {lost}")


def check_event(step: OptimizerStep) -> Findings:
    if step.plain and step.parameters == ("bf16",):
        yield RULE.at(
            step.site.place,
            f"{step.optimizer} adds its updates directly to BF16 weights, which have 8 significant bits",
        )
