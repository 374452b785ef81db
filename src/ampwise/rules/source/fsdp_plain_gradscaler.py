"""A plain GradScaler on parameters that FSDP has sharded."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.finding import Finding, Rule, Severity

if TYPE_CHECKING:
    from ampwise.source.events import Guard
    from ampwise.source.project import Code
    from ampwise.source.walk import Site

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP309",
    name="fsdp-plain-gradscaler",
    severity=Severity.ERROR,
    summary="An FSDP model is trained with a plain GradScaler instead of ShardedGradScaler.",
    why=(
        "With FullyShardedDataParallel each rank holds a shard of the gradients and looks for infs in that alone. A "
        "plain GradScaler does not tell the other ranks: one skips the step, the others take it, and the scales and "
        "the weights of the ranks drift apart. ShardedGradScaler reduces what was found over all ranks. (FSDP2's "
        "`fully_shard` uses DTensors, and there the plain one is right.)"
    ),
    fix="Use `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`.",
    bad="model = FullyShardedDataParallel(model)\nscaler = torch.amp.GradScaler('cuda')",
    good=(
        "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n\n"
        "model = FullyShardedDataParallel(model)\nscaler = ShardedGradScaler()"
    ),
)

FSDP1 = frozenset(
    (
        "torch.distributed.fsdp.FullyShardedDataParallel",
        "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    )
)
OTHER_WAYS = ("ShardedGradScaler", "fully_shard(", "NO_SHARD")


def check(code: Code) -> Iterator[Finding]:
    text = code.script.text
    if "FullyShardedDataParallel" not in text or "GradScaler" not in text or any(way in text for way in OTHER_WAYS):
        return
    from ampwise.source.scaler_objects import is_switched_off, scaler_constructors

    wrapped = [site for site in code.calls if _wraps(site)]
    used = any(event.kind in ("scaled backward", "scaler step") for event in code.events)
    reported = set()
    for site in scaler_constructors(code) if wrapped and used else ():
        assert isinstance(site.node, ast.Call)
        off = is_switched_off(site.node, site.context.frame)
        together = all(_compatible(site.context.guards, other.context.guards) for other in wrapped)
        if not off and together and site.node not in reported:
            reported.add(site.node)
            line = getattr(wrapped[0].node, "lineno", 0)
            yield RULE.at(
                code.script.place(site.node), f"the model is wrapped by FSDP in line {line}: use ShardedGradScaler"
            )


def _wraps(site: Site) -> bool:
    return isinstance(site.node, ast.Call) and site.context.frame.qualified(site.node.func) in FSDP1


def _compatible(some: tuple[Guard, ...], others: tuple[Guard, ...]) -> bool:
    """Whether both can happen in one run: no test that the one wants to hold and the other to fail."""
    answers = {guard.text: guard.holds for guard in some}
    return all(answers.get(guard.text, guard.holds) == guard.holds for guard in others)
