"""Updates too small to change BF16 weights."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.gradient_health import GradientHealth, UpdateCounts

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP611",
    name="lost-updates",
    severity=Severity.WARNING,
    summary="Most updates are too small to change the low-precision weights.",
    why=(
        "BF16 has 8 significant bits: an update below half the gap between a weight and the next representable value, "
        "about 1/512 of the weight, is rounded away. With usual learning rates that is most updates, and more as "
        "training goes on: one run had 97.8% of its weights unchanged after 10 steps. Only weights with a nonzero "
        "gradient are counted."
    ),
    fix=(
        "Keep FP32 weights and run the forward pass under `torch.autocast('cuda', dtype=torch.bfloat16)`; or keep "
        "BF16 weights and train with `ampwise.Engine(model, optimizer, 'bf16-pure')`, or with an optimizer that has "
        "stochastic rounding, Kahan summation or FP32 master weights."
    ),
    bad="model = Net().to(torch.bfloat16)\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)",
    good=(
        "model = Net()\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n"
        'with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)'
    ),
)

MOVED = 0.5  # of the weights with a gradient: a healthy FP32 update changes nearly all
REPORTS = 2
TRIED = 100  # weights: with fewer, the fraction is noise


def check(health: GradientHealth) -> Iterator[Finding]:
    if len(health.updates) < REPORTS:
        return
    sums: dict[str, UpdateCounts] = {}
    for report in health.updates:
        for name, share in report.items():
            sums[name] = sums.get(name, UpdateCounts(0, 0)) + share
    judged = {name: share for name, share in sums.items() if share.tried >= TRIED}
    stuck = {name: share for name, share in judged.items() if share.moved < MOVED * share.tried}
    if not stuck:
        return
    worst = min(stuck, key=lambda name: stuck[name].moved / stuck[name].tried)
    moved = stuck[worst].moved / stuck[worst].tried
    total = sum(stuck.values(), start=UpdateCounts(0, 0))
    others = f" (and too few in {len(stuck) - 1} more parameters)" if len(stuck) > 1 else ""
    yield RULE.at(
        Place(parameter=worst, step=health.last_step),
        f"updates change only {moved:.1%} of the weights that have a gradient{others}",
        evidence={
            "moved_share": round(moved, 4),
            "moved": total.moved,
            "tried": total.tried,
            "parameters": len(stuck),
            "of": len(judged),
        },
    )
