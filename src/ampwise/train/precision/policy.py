"""``Policy``: which modules of a model run in which precision, by rules over their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ampwise.errors import AmpwiseError, BadInput, UnknownName
from ampwise.finding.terminal import shortened
from ampwise.train.float8.recipe import Fp8
from ampwise.train.precision.call_in_precision import (
    FP32_OUT,
    checked_precision,
    is_wrapped_forward,
    operation_names,
    operations_named,
    wrap_forward,
    wrap_with_operations,
)
from ampwise.train.precision.policy_table import ModuleLine, policy_table
from ampwise.train.precision.precision import (
    AUTO,
    EMULATE,
    EXTRA_PRECISIONS,
    PRECISIONS,
    WITH_OPTIONS,
    precision_named,
)

__all__ = ["AppliedPolicy", "KeepRule", "Policy", "modules_with_wrappers", "name_and_parents", "named_modules"]

BASES = (AUTO, *PRECISIONS, *EXTRA_PRECISIONS)
# torch modules with parameters but without matmuls: emulation does not affect them.
WITHOUT_MATMULS = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.Embedding, nn.EmbeddingBag, nn.PReLU,
)  # fmt: skip
NO_MATMULS = ("fp32", "no matmuls")
VERSION = 1  # of as_dict

# What torch.compile, FSDP and activation checkpointing add to the name of a module that they wrap.
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


class KeepRule(NamedTuple):
    """A rule: modules that match the pattern run in the precision."""

    pattern: str
    precision: str


@dataclass(frozen=True, slots=True, repr=False)
class Policy:
    """Precision of a model, with exceptions by module.

    Patterns are globs over the dotted names of modules; ``*`` also matches dots, and the root module has no name.
    Prefixes added by DistributedDataParallel, FSDP, torch.compile and checkpointing are ignored. If several rules match
    a module, the last one wins. A rule for a ModuleList or ModuleDict, which is never called, applies to each module in
    it.

    Args:
        base: the precision, by the names that ``Engine`` takes.
        rules: exceptions; ``keep`` adds them.
        operations: exceptions by operation; ``keep_op`` adds them.
        fp8: with ``Policy("fp8")``, how its layers are scaled. Not part of ``as_dict``.

    Raises:
        BadInput: an argument does not fit.
        UnknownName: no such precision.

    >>> import torch, ampwise
    >>> model = torch.nn.Sequential()
    >>> model.body, model.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
    >>> policy = ampwise.Policy("bf16").keep("fp32", "head")
    >>> policy
    Policy('bf16').keep('fp32', 'head')
    >>> print(policy.describe(model))
    bf16 base; parameters: 72 in bf16, 18 in fp32
    module  class   params  runs in  why
    body    Linear      72  bf16     base
    head    Linear      18  fp32     kept by 'head'
    >>> with policy.apply(model), torch.autocast("cpu", torch.bfloat16):
    ...     model(torch.ones(1, 8)).dtype
    torch.float32
    """

    base: str = "auto"
    rules: tuple[KeepRule, ...] = ()
    operations: tuple[KeepRule, ...] = ()
    fp8: Fp8 | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.base, str):
            raise BadInput(f"Policy({self.base!r}): expected the name of a precision: {_listed(BASES)}.")
        if self.base.startswith(WITH_OPTIONS):
            precision_named(self.base)  # raises for an unknown format or option
        elif self.base not in BASES:
            raise UnknownName("precision", self.base, BASES, listing=f"Policy() takes {_listed(BASES)}.")
        for rules, method in ((self.rules, "keep"), (self.operations, "keep_op")):
            if not isinstance(rules, tuple) or not all(isinstance(rule, KeepRule) for rule in rules):
                raise BadInput(f"Policy({self.base!r}): add rules with {method}(precision, name).")
        if self.fp8 is not None and not (isinstance(self.fp8, Fp8) and self.base == "fp8"):
            raise BadInput(f"Policy({self.base!r}, fp8={self.fp8!r}): expected Policy('fp8', fp8=ampwise.Fp8(...)).")

    def keep(self, precision: str, *patterns: str) -> Policy:
        """Return a policy that also runs the modules matching any of these patterns in this precision.

        ``"fp32-out"`` is for linear layers, the modules themselves or those in them: 16-bit inputs and weights, as
        under autocast, but the output is the FP32 sum, not rounded to 16 bits again.

        Args:
            precision: such as ``"fp32"``.
            *patterns: names or globs of modules.

        Returns:
            the policy.

        Raises:
            BadInput: no pattern, or not a name.
            UnknownName: no such precision.
        """
        asked = f"Policy.keep({precision!r})"
        name = checked_precision(asked, precision, layers=True)
        if not patterns:
            raise BadInput(f'{asked}: expected names or globs of modules: keep({precision!r}, "*.router").')
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise BadInput(f"{asked}: expected names of modules, got {pattern!r}.")
            if not pattern:
                raise BadInput(f"{asked}: '' is the model itself. Set its precision with Policy({name!r}).")
        return replace(self, rules=(*self.rules, *(KeepRule(pattern, name) for pattern in patterns)))

    def keep_op(self, precision: str, *operations: str) -> Policy:
        """Return a policy that also runs these operations in this precision, wherever the model calls them.

        Operations have the names of torch's functions and of tensors' methods. Their inputs are cast, as by
        ``@ampwise.keep``; the output stays in the precision. This also holds inside of modules that ``keep`` names.

        Args:
            precision: such as ``"fp32"``.
            *operations: such as ``"softmax"``.

        Returns:
            the policy.

        Raises:
            BadInput: no operation, or not a name.
            UnknownName: no such precision, or no such operation.
        """
        asked = f"Policy.keep_op({precision!r})"
        name = checked_precision(asked, precision)
        if not operations or not all(isinstance(each, str) for each in operations):
            raise BadInput(f'{asked}: expected names of operations: keep_op({precision!r}, "softmax").')
        for each in operations:
            if not each.isidentifier() or not operations_named(each):
                listing = "Operations have the names of torch's functions, without torch. or F.: softmax, layer_norm."
                raise UnknownName("operation", each, operation_names(), listing=listing)
        return replace(self, operations=(*self.operations, *(KeepRule(each, name) for each in operations)))

    def __repr__(self) -> str:
        made = f"Policy({self.base!r}{'' if self.fp8 is None else f', fp8={self.fp8!r}'})"
        for precision, rules in groupby(self.rules, key=lambda rule: rule.precision):
            made += f".keep({_listed([precision, *(rule.pattern for rule in rules)])})"
        for precision, rules in groupby(self.operations, key=lambda rule: rule.precision):
            made += f".keep_op({_listed([precision, *(rule.pattern for rule in rules)])})"
        return shortened(made, 1000)

    def modules(self, model: nn.Module) -> dict[str, str]:
        """Return the precision of each module that a rule applies to, by name.

        A module with several names has the same precision under all of them.

        Args:
            model: whose modules are meant.

        Returns:
            precisions by name.

        Raises:
            UnknownName: a pattern matches nothing.
        """
        decided = self._decided(model)
        return {name: decided[module].precision for name, module in named_modules(model).items() if module in decided}

    def apply(self, model: nn.Module) -> AppliedPolicy:
        """Make the kept modules run in their precision from now on, or until the end of a ``with``.

        The base precision is not applied: use autocast, or ``ampwise.Engine``. Parameters and the state dict stay as
        they are. A module whose weights are used without calling it, such as ``out_proj`` in
        ``nn.MultiheadAttention``, is not affected: keep the module that uses them. Applying the same policy twice
        changes nothing.

        Args:
            model: changed until the policy is removed.

        Returns:
            what removes it: ``.remove()``, or the end of a ``with``.

        Raises:
            UnknownName: a pattern matches nothing.
            BadInput: another policy is applied.
        """
        decided = self._decided(model)
        on = [module for module in model.modules() if is_wrapped_forward(module.__dict__.get("forward"))]
        for module in on:
            other = module.__dict__["forward"].owner
            if other != self:
                raise BadInput(
                    f"{self!r}.apply(): another policy is applied to this model. "
                    f"Remove it first: {other!r}.apply(model).remove()"
                )
        fresh = [module for module in decided if module not in set(on)]
        for module in fresh:
            module.forward = wrap_forward(decided[module].precision, module, owner=self)
        precisions = {rule.pattern: rule.precision for rule in self.operations}
        # A call of any of these is a pass of the whole model.
        for module in _called(named_modules(model)[""]) if precisions else ():
            if module not in on:
                module.forward = wrap_with_operations(precisions, module, owner=self)
                fresh.append(module)
        return AppliedPolicy([*on, *fresh], fresh)

    def describe(self, model: nn.Module) -> str:
        """Return a table of what runs in which precision and why: modules with parameters, and those with a rule.

        Args:
            model: to describe.

        Returns:
            the table as text.
        """
        decided, named = self._decided(model), named_modules(model)
        by_layer = self._by_layer(model)
        lines: list[ModuleLine] = []
        running: dict[str, dict[nn.Parameter, int]] = {}  # shared parameters count once in each precision
        shown: set[nn.Module] = set()
        for name, module in named.items():
            own = {each: 0 if is_lazy(each) else each.numel() for each in module.parameters(recurse=False)}
            if module in shown or not (own or module in decided):
                continue
            above = next((part for part in name_and_parents(name) if named.get(part) in decided), None)
            rule = KeepRule("", self.base) if above is None else decided[named[above]]
            precision, why = by_layer.get(module, (self.base, "base")) if above is None else (rule.precision, "")
            line = ModuleLine(
                path=tuple(name.split(".")) if name else (),
                kind=type(module).__name__,
                parameters=sum(own.values()),
                precision=precision,
                why=f"kept by {rule.pattern!r}" if rule.pattern else why,
                inside=0 if above in (None, name) else above.count(".") + 1,
            )
            lines.append(line)
            shown.add(module)
            running.setdefault(line.precision, {}).update(own)
        counts = Counter({precision: sum(counts.values()) for precision, counts in running.items()})
        table = policy_table(self.base, counts, lines)
        kept = [f"{rule.pattern} in {rule.precision}" for rule in self.operations]
        return "\n".join([table, *([f"operations: {', '.join(kept)}"] if kept else [])])

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint, which ``from_dict`` reads."""
        plain = {"version": VERSION, "base": self.base, "keep": [rule._asdict() for rule in self.rules]}
        return plain | ({"operations": [rule._asdict() for rule in self.operations]} if self.operations else {})

    @classmethod
    def from_dict(cls, data: Any) -> Policy:
        """Return the policy that ``as_dict`` wrote.

        Args:
            data: plain data.

        Returns:
            the policy.

        Raises:
            BadInput: the data is not that of a policy.
        """
        optional = {"operations"} & set(data) if isinstance(data, dict) else set()
        parts = _parts(data, "a policy", {"version", "base", "keep"} | optional)
        if parts["version"] != VERSION or isinstance(parts["version"], bool):
            raise BadInput(f"Policy.from_dict(): expected version {VERSION}, got {parts['version']!r}.")
        for key in ("keep", *optional):
            if not isinstance(parts[key], list | tuple):
                raise BadInput(f"Policy.from_dict(): expected a list of rules in {key!r}, got {parts[key]!r}.")
        rules = [_parts(rule, "a rule", set(KeepRule._fields)) for rule in parts["keep"]]
        operations = [_parts(rule, "a rule", set(KeepRule._fields)) for rule in parts.get("operations", ())]
        try:
            policy = cls(parts["base"])
            for rule in rules:
                policy = policy.keep(rule["precision"], rule["pattern"])
            for rule in operations:
                policy = policy.keep_op(rule["precision"], rule["pattern"])
        except AmpwiseError as error:
            raise BadInput(f"Policy.from_dict(): {error}") from error
        return policy

    def patterns(self, model: nn.Module) -> dict[nn.Module, str]:
        """Return the modules that a rule applies to, with the rule's pattern.

        Args:
            model: whose modules are meant.

        Returns:
            patterns by module.
        """
        return {module: rule.pattern for module, rule in self._decided(model).items()}

    def _decided(self, model: nn.Module) -> dict[nn.Module, KeepRule]:
        """Return the rule of each module that has one."""
        if not isinstance(model, nn.Module):
            raise BadInput(f"{self!r}: expected a torch.nn.Module, got {type(model).__name__}.")
        named = named_modules(model)
        decided: dict[nn.Module, KeepRule] = {}
        for rule in self.rules:
            found = [module for name, module in named.items() if name and fnmatchcase(name, rule.pattern)]
            if not found:
                endings = dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in named if "." in name)
                raise UnknownName(
                    "module",
                    rule.pattern,
                    filter(None, [*named, *endings]),
                    listing="Names are those of model.named_modules(); * matches any part of a name, dots too.",
                )
            called: list[nn.Module]
            if rule.precision == FP32_OUT:
                inside = [inner for module in found for inner in module.modules()]
                called = [inner for inner in inside if isinstance(inner, nn.Linear)]
                why = "no nn.Linear, whose output 'fp32-out' is about"
            else:
                called = [inner for module in found for inner in _called(module)]
                why = "only empty containers, which are never called"
            if not called:
                raise BadInput(f"{self!r}: {rule.pattern!r} matches {why}.")
            decided.update((module, rule) for module in called)
        return decided

    def _by_layer(self, model: nn.Module) -> dict[nn.Module, tuple[str, str]]:
        """Return precision and reason for modules that do not run in the base precision."""
        from ampwise.train.float8.layer_choice import (
            describe_layers,
            torchao_layers,
        )  # imports this module, as the next
        from ampwise.train.precision.kept_layers import kept_layers

        if self.base == "fp8":
            return describe_layers(model, self.patterns(model))
        found = torchao_layers(model)  # in every precision
        if self.base.startswith(EMULATE):
            found.update((each, NO_MATMULS) for each in model.modules() if isinstance(each, WITHOUT_MATMULS))
            recipe = precision_named(self.base).recipe
            if recipe is not None and recipe.pretraining:
                found.update((module, ("bf16", why)) for module, why in kept_layers(model).items())
        return found


class AppliedPolicy:
    """A policy applied to a model, until ``remove`` or the end of a ``with``."""

    def __init__(self, modules: Iterable[nn.Module], fresh: Iterable[nn.Module]) -> None:
        self._forwards = {module: module.__dict__["forward"] for module in modules}
        self._fresh = set(fresh)  # modules that the policy was not applied to before

    def remove(self) -> None:
        """Remove the policy: every module gets its previous forward back."""
        self._take_off(self._forwards)

    def __enter__(self) -> AppliedPolicy:
        # Entering again reuses the same forwards, so that torch.compile's cache stays valid.
        for module, made in self._forwards.items():
            if not self._is_on(module):
                module.forward = made
        return self

    def __exit__(self, *error: object) -> None:
        self._take_off(self._fresh)  # the policy may have been applied before this block

    def _take_off(self, modules: Iterable[nn.Module]) -> None:
        on = [module for module in modules if self._is_on(module)]
        for module in on:
            earlier = module.__dict__.pop("forward").args[-1]
            if is_wrapped_forward(earlier):  # the module is kept, and its operations too
                earlier = earlier.args[-1]
            if earlier is not None:
                module.forward = earlier

    def _is_on(self, module: nn.Module) -> bool:
        made, now = self._forwards[module], module.__dict__.get("forward")
        if now is not made and now is not made.args[-1] and not is_wrapped_forward(now):
            raise BadInput(
                f"remove(): the forward of {type(module).__name__} was replaced after the policy was applied. "
                "Restore it first."
            )
        return now is made


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules by the names they have without wrappers; for a wrapper and its module, the module."""
    return dict(modules_with_wrappers(model))


def modules_with_wrappers(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules like ``named_modules``, and also each wrapper under the name of its module."""
    yield name, module
    is_wrapper = isinstance(module, DataParallel | DistributedDataParallel) or (not name and len(module._modules) == 1)
    for key, child in module._modules.items():
        if child is not None:
            is_wrapped = key in WRAPPERS or (key == "module" and is_wrapper)
            yield from modules_with_wrappers(child, name if is_wrapped else f"{name}.{key}".lstrip("."))


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, or the modules in it if it is a container that is never called."""
    if type(module).forward is not nn.Module.forward or "forward" in module.__dict__:
        yield module
        return
    for name, child in named_modules(module).items():
        if name and "." not in name:  # direct children, without their wrappers
            yield from _called(child)


def name_and_parents(name: str) -> Iterator[str]:
    """Yield the name, and the names of the modules that contain it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _parts(data: Any, what: str, expected: set[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise BadInput(f"Policy.from_dict(): expected {what} as a dict, got {data!r}.")
    if set(data) != expected:
        wrong = _listed(sorted(map(str, set(data) ^ expected)))
        raise BadInput(f"Policy.from_dict(): {what} has {_listed(sorted(expected))}; missing or unknown: {wrong}.")
    return data


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
