from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.check.source.line_references import spot
from ampwise.check.source.scalers import scalers_made
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import SourceFile
    from ampwise.watch.run_events import ScalerStep

RULE = Rule(
    code="AMP309",
    name="fsdp-plain-gradscaler",
    severity=Severity.ERROR,
    summary="An FSDP model is trained with a plain GradScaler instead of ShardedGradScaler.",
    why=(
        "With FullyShardedDataParallel each rank holds a shard of the gradients and checks only that shard for inf. A "
        "plain GradScaler does not share the result: one rank skips the step while the others take it, and the scales "
        "and weights of the ranks drift apart. ShardedGradScaler reduces the result over all ranks. (FSDP2's "
        "`fully_shard` uses DTensors, which work with the plain scaler.)"
    ),
    fix="Use `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`.",
    bad='model = FullyShardedDataParallel(model)\nscaler = torch.amp.GradScaler("cuda")',
    good=(
        "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n\n"
        "model = FullyShardedDataParallel(model)\nscaler = ShardedGradScaler()"
    ),
)
NEEDS = (("GradScaler(",), ("FullyShardedDataParallel", "FSDP"))

FSDP1 = (
    "torch.distributed.fsdp.FullyShardedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
)
OTHER_WAYS = ("ShardedGradScaler", "fully_shard(", "NO_SHARD")


def check_source(code: SourceFile) -> Findings:
    if any(way in code.script.text for way in OTHER_WAYS):
        return
    wrapped = [site for site in code.calls if site.context.frame.qualified(site.call.func) in FSDP1]
    answers: dict[str, set[bool]] = {}
    for guard in (guard for site in wrapped for guard in site.context.guards):
        answers.setdefault(guard.text, set()).add(guard.holds)
    used = any(event.kind in ("scaled backward", "scaler step") for event in code.events)
    for made in scalers_made(code) if wrapped and used else ():
        # Both can happen in one run: no condition must hold for one and fail for the other.
        wanted = [{guard.text: guard.holds for guard in context.guards} for context, _ in made.contexts]
        if any(all(answers.get(text, {holds}) == {holds} for text, holds in one.items()) for one in wanted):
            place = code.script.place(made.node)
            line = spot(wrapped[0].node, wrapped[0].context.frame, place)
            yield RULE.at(place, f"the model is wrapped by FSDP in {line}: use ShardedGradScaler")


def check_event(step: ScalerStep) -> Findings:
    if step.fsdp:
        yield RULE.at(
            step.site.place, "the parameters are FSDP shards, and this scaler checks only those of its own rank"
        )
