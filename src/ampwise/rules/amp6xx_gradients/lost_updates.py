from __future__ import annotations

from collections import Counter
from dataclasses import replace
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
STILL = 0.05  # nothing is learned
REPORTS, REPORTS_OF_STILL = 2, 4
TRIED = 100  # weights: with fewer, the fraction is noise
STANDS_STILL = replace(RULE, severity=Severity.ERROR)


def check_gradients(health: GradientHealth) -> Findings:
    if len(health.updates) < REPORTS:
        return
    moved, tried = Counter[str](), Counter[str]()
    for report in health.updates:
        for name, counts in report.items():
            moved[name] += counts.moved
            tried[name] += counts.tried
    judged = [name for name in tried if tried[name] >= TRIED]
    shares = {name: moved[name] / tried[name] for name in judged if moved[name] < MOVED * tried[name]}
    if not shares:
        return
    worst = min(shares, key=shares.__getitem__)
    cast = health.cast_at.get(worst)
    place = Place() if cast is None else cast.place
    total, changed = sum(tried.values()), sum(moved.values())
    if changed < STILL * total and len(health.updates) >= REPORTS_OF_STILL:
        rule = STANDS_STILL
        said = (
            f"the weights hardly move: {len(health.updates)} updates that were looked at changed {changed:,} of "
            f"{total:,} weights with a gradient ({changed / total:.1%})"
        )
    else:
        others = f" (and too few in {len(shares) - 1} more parameters)" if len(shares) > 1 else ""
        rule = RULE
        said = f"updates change only {shares[worst]:.1%} of the weights that have a gradient{others}"
    yield rule.at(
        place.but(parameter=worst, step=health.last_step),
        said,
        evidence={
            "moved_share": round(shares[worst], 4),
            "moved": sum(moved[name] for name in shares),
            "tried": sum(tried[name] for name in shares),
            "parameters": len(shares),
            "of": len(judged),
            "lost_updates": {"optimizer": health.optimizer, "moved": {n: round(s, 4) for n, s in shares.items()}},
        },
    )
