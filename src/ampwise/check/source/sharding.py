"""FSDP's policies in a script: the dtypes in which it runs a model, returns its output, sums gradients."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from ampwise.check.source.cases import cases_of
from ampwise.check.source.dictionary_changes import changes_of
from ampwise.check.source.frame import Frame, PossibleValue
from ampwise.check.source.line_references import spot
from ampwise.check.source.modes import UNKNOWN, dtype_in
from ampwise.check.source.precision import argument_of
from ampwise.check.source.project import SourceFile
from ampwise.finding import Place

POLICY_ARGUMENTS = ("param_dtype", "reduce_dtype", "output_dtype")


@dataclass(frozen=True, slots=True, eq=False)
class ShardingPolicy:
    """A call of ``MixedPrecisionPolicy``, or of ``MixedPrecision``, of which only ``param_dtype`` is asked."""

    call: ast.Call
    frame: Frame

    def dtype(self, name: str) -> str | None:
        """Return a dtype of the policy; None: not given; UNKNOWN: an option chooses it."""
        given = argument_of(self.call, name, POLICY_ARGUMENTS.index(name))
        found = {None} if given is None else {dtype_in(case) for case in cases_of(self.frame, given)}
        return found.pop() if len(found) == 1 else UNKNOWN

    def spot(self, seen_from: Place) -> str:
        """Return how a message refers to its line."""
        return spot(self.call, self.frame, seen_from)


def sharding_policies(code: SourceFile) -> Iterator[ShardingPolicy]:
    """Yield all policies that the file makes for ``fully_shard``."""
    for call in code.nodes(ast.Call) if "MixedPrecisionPolicy" in code.script.text else ():
        frame = code.frame(code.function_at(call))
        if _is_policy(call, frame):
            yield ShardingPolicy(call, frame)


@functools.lru_cache(maxsize=4)
def sharded_models(code: SourceFile) -> dict[str, ShardingPolicy]:
    """Return the models that the file shards with one policy, by key; of several modules of a model, the outermost."""
    found: dict[str, ShardingPolicy] = {}
    for site in code.calls if "fully_shard" in code.script.text and "MixedPrecisionPolicy" in code.script.text else ():
        call, frame = site.call, site.context.frame
        name = frame.qualified(call.func) or ""
        if not (name.startswith("torch.") and name.endswith(".fully_shard")):
            continue
        module = argument_of(call, "module", 0)
        key = None if module is None else frame.key(module)
        policies = list(_policies_given(call, frame))
        if key is not None and len(policies) == 1:
            found[key] = policies[0]
    return found


@functools.lru_cache(maxsize=4)
def wrapped_models(code: SourceFile) -> dict[str, list[ShardingPolicy]]:
    """Return the models that the file wraps in ``FullyShardedDataParallel`` with a policy, by key, with its policies.

    Its forward casts the inputs, too, and leaves the output in the dtype it was computed in.
    """
    found: dict[str, list[ShardingPolicy]] = {}
    for site in code.statements if "MixedPrecision(" in code.script.text else ():
        statement, frame = site.node, site.context.frame
        call = statement.value if isinstance(statement, ast.Assign) else None
        name = (frame.qualified(call.func) or "") if isinstance(call, ast.Call) else ""
        given = argument_of(call, "mixed_precision") if isinstance(call, ast.Call) else None
        if given is None or not (name.startswith("torch.") and name.endswith(".FullyShardedDataParallel")):
            continue
        key = frame.key(statement.targets[0]) if isinstance(statement, ast.Assign) else None
        for value, home in frame.values(given) if key is not None else ():
            made = (home.qualified(value.func) or "") if isinstance(value, ast.Call) else ""
            if isinstance(value, ast.Call) and made.startswith("torch.") and made.endswith(".MixedPrecision"):
                found.setdefault(key or "", []).append(ShardingPolicy(value, home))
    return found


def _policies_given(call: ast.Call, frame: Frame) -> Iterator[ShardingPolicy]:
    """Yield the policies that a call of ``fully_shard`` may get, also by ``**kwargs``."""
    given: list[PossibleValue] = []
    for word in call.keywords:
        if word.arg == "mp_policy":
            given += frame.values(word.value)
        elif word.arg is None:
            for held, home in frame.values(word.value):
                if isinstance(held, ast.Dict):
                    pairs = zip(held.keys, held.values, strict=True)
                    values = [one for key, one in pairs if isinstance(key, ast.Constant) and key.value == "mp_policy"]
                else:
                    values = [one.value for one in getattr(held, "keywords", ()) if one.arg == "mp_policy"]
                given += [value for one in values for value in home.values(one)]
            if isinstance(word.value, ast.Name):
                changes = changes_of(word.value.id, frame.function.node, frame.outline)
                given += [value for _, key, one in changes if key == "mp_policy" for value in frame.values(one)]
    for value, home in given:
        if isinstance(value, ast.Call) and _is_policy(value, home):
            yield ShardingPolicy(value, home)


def _is_policy(call: ast.Call, frame: Frame) -> bool:
    name = frame.qualified(call.func) or ""
    return name.startswith("torch.") and name.endswith(".MixedPrecisionPolicy")
