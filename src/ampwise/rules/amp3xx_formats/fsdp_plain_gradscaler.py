from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ampwise.check.source.call_events import ANYTHING
from ampwise.check.source.guards import guards_of
from ampwise.check.source.line_references import spot
from ampwise.check.source.names import last_name
from ampwise.check.source.precision import argument_of
from ampwise.check.source.scalers import scalers_followed
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import BranchGuard, CodeSite, CodeTrace, SourceFile
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
NEEDS = (("caler",), ("FullyShardedDataParallel", "FSDP", "fsdp"))

FSDP1 = (
    "torch.distributed.fsdp.FullyShardedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "fairscale.nn.FullyShardedDataParallel",
    "fairscale.nn.data_parallel.FullyShardedDataParallel",
)
USES = ("scaled backward", "scaler step", "opaque")


def check_source(code: SourceFile) -> Findings:
    names = [*code.nodes(ast.Name), *code.nodes(ast.Attribute)]  # more than an import
    if any((code.outline.imports.qualified(name) or "").endswith("ShardedGradScaler") for name in names):
        return
    wrapped = [(site, one) for one in code.traces for site in one.calls if _shards(site)]
    uses = [(event, one) for one in code.traces for event in one.events() if wrapped and event.kind in USES]
    for made in scalers_followed(code) if wrapped else ():
        for context, trace in made.contexts:
            home = context.frame.outline
            if home is not code.outline and "ShardedGradScaler" in home.script.text:
                break  # a helper of another file that can make either
            # One run must be able to wrap the model, make the scaler, enable it and use it.
            on = guards_of(made.enabled, context.frame)[0] if made.enabled is not None else ()
            used = [event.context.guards for event, one in uses if event.key != ANYTHING and _in_one_run(one, trace)]
            ways = [site for site, one in wrapped if _in_one_run(one, trace)]
            ways = [
                site
                for site in ways
                if any(_agree((*site.context.guards, *context.guards, *on, *guards)) for guards in used)
            ]
            if ways:
                place = home.script.place(made.node)
                line = spot(ways[0].node, ways[0].context.frame, place)
                yield RULE.at(place, f"the model is wrapped by FSDP in {line}: use ShardedGradScaler")
                break


def _in_one_run(one: CodeTrace, other: CodeTrace) -> bool:
    """Whether two traces are of one run: the same, methods of one class, or one is of the module itself."""
    ours, theirs = one.frame.function, other.frame.function
    is_module = ours.parent is None or theirs.parent is None
    return one is other or is_module or (ours.owner is not None and ours.owner is theirs.owner)


def _shards(site: CodeSite) -> bool:
    """Whether a call wraps a model in FSDP1, with any strategy but NO_SHARD; or makes ``partial(FSDP, ...)``."""
    call, frame = site.call, site.context.frame
    wrapper: ast.expr | None = call.func
    if last_name(call.func) == "partial" and call.args:
        wrapper = call.args[0]
    elif last_name(call.func) == "enable_wrap":
        wrapper = argument_of(call, "wrapper_cls")
    if wrapper is None or frame.qualified(wrapper) not in FSDP1:
        return False
    strategy = argument_of(call, "sharding_strategy")
    return strategy is None or last_name(strategy) != "NO_SHARD"


def _agree(guards: Iterable[BranchGuard]) -> bool:
    """Whether no condition must both hold and fail."""
    answers: dict[str, bool] = {}
    return all(answers.setdefault(guard.text, guard.holds) == guard.holds for guard in guards)


def check_event(step: ScalerStep) -> Findings:
    if step.fsdp:
        yield RULE.at(
            step.site.place, "the parameters are FSDP shards, and this scaler checks only those of its own rank"
        )
