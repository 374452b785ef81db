"""A plain GradScaler on parameters that FSDP has sharded."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.events import Guard
from ampwise.source.project import Code
from ampwise.source.scalers import scalers_made
from ampwise.source.spots import spot
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
    bad='model = FullyShardedDataParallel(model)\nscaler = torch.amp.GradScaler("cuda")',
    good=(
        "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n\n"
        "model = FullyShardedDataParallel(model)\nscaler = ShardedGradScaler()"
    ),
)
NEEDS = (("GradScaler(",), ("FullyShardedDataParallel", "FSDP"))

FSDP1 = frozenset(
    (
        "torch.distributed.fsdp.FullyShardedDataParallel",
        "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    )
)
OTHER_WAYS = ("ShardedGradScaler", "fully_shard(", "NO_SHARD")


def check(code: Code) -> Iterator[Finding]:
    text = code.script.text
    if any(way in text for way in OTHER_WAYS):
        return
    wrapped = [site for site in code.calls if _wraps(site)]
    answers: dict[str, set[bool]] = {}
    for guard in (guard for site in wrapped for guard in site.context.guards):
        answers.setdefault(guard.text, set()).add(guard.holds)
    used = any(event.kind in ("scaled backward", "scaler step") for event in code.events)
    for made in scalers_made(code) if wrapped and used else ():
        if any(_compatible(context.guards, answers) for context, _ in made.contexts):
            place = code.script.place(made.node)
            line = spot(wrapped[0].node, wrapped[0].context.frame, place)
            yield RULE.at(place, f"the model is wrapped by FSDP in {line}: use ShardedGradScaler")


def _wraps(site: Site) -> bool:
    return isinstance(site.node, ast.Call) and site.context.frame.qualified(site.node.func) in FSDP1


def _compatible(guards: tuple[Guard, ...], others: dict[str, set[bool]]) -> bool:
    """Whether all can happen in one run: no test that the one wants to hold and another to fail."""
    wanted = {guard.text: guard.holds for guard in guards}
    return all(others.get(text, {holds}) == {holds} for text, holds in wanted.items())
