from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.gradient_health import GradientHealth

RULE = Rule(
    code="AMP611",
    name="lost-updates",
    severity=Severity.WARNING,
    summary="Most updates are too small to change the low-precision weights.",
    why=(
        "BF16 has 8 significant bits: an update below half the gap between a weight and the next representable value, "
        "about 1/512 of the weight, is rounded away. With usual learning rates that is most updates, and ever more: "
        "one run had 97.8% of its weights unchanged after 10 steps. Only weights with a nonzero gradient are counted."
    ),
    fix=(
        "Let the updates reach FP32 weights: use autocast instead of BF16 parameters. Or round stochastically: "
        "`ampwise.Engine(model, optimizer, 'bf16-pure')`."
    ),
    bad="model = Net().to(torch.bfloat16)\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)",
    good=(
        "model = Net().to(torch.bfloat16)\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n"
        'engine = ampwise.Engine(model, optimizer, "bf16-pure")'
    ),
    consequence_of=("AMP306",),
)

MOVED = 0.5  # of the weights with a gradient: a healthy FP32 update changes nearly all
REPORTS = 2
TRIED = 100  # weights: with fewer, the fraction is noise


def check_gradients(health: GradientHealth) -> Findings:
    if len(health.updates) < REPORTS:
        return
    moved, tried = Counter[str](), Counter[str]()
    for report in health.updates:
        for name, counts in report.items():
            moved[name] += counts.moved
            tried[name] += counts.tried
    judged = [name for name in tried if tried[name] >= TRIED]
    stuck = [name for name in judged if moved[name] < MOVED * tried[name]]
    if not stuck:
        return
    worst = min(stuck, key=lambda name: moved[name] / tried[name])
    share = moved[worst] / tried[worst]
    others = f" (and too few in {len(stuck) - 1} more parameters)" if len(stuck) > 1 else ""
    cast = health.cast_at.get(worst)
    place = Place() if cast is None else cast.place
    yield RULE.at(
        place.but(parameter=worst, step=health.last_step),
        f"updates change only {share:.1%} of the weights that have a gradient{others}",
        evidence={
            "moved_share": round(share, 4),
            "moved": sum(moved[name] for name in stuck),
            "tried": sum(tried[name] for name in stuck),
            "parameters": len(stuck),
            "of": len(judged),
        },
    )
