"""Which modules of a model run in which precision: rules over their names, put on the model and taken off again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ampwise.engine.precision.precision import AUTO, BEYOND, EMULATE, PRECISIONS, WITH_OPTIONS, precision_named
from ampwise.engine.precision.region import checked, forward_in, is_forward_in
from ampwise.engine.precision.table import Line, table
from ampwise.errors import AmpwiseError, BadInput, UnknownName

__all__ = ["Applied", "Kept", "Policy", "named_modules", "upwards", "with_wrappers"]

BASES = (AUTO, *PRECISIONS, *BEYOND)
# Modules of torch's with parameters that multiply no matrices: where those are emulated, they run as they are.
WITHOUT_PRODUCTS = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.Embedding, nn.EmbeddingBag, nn.PReLU,
)  # fmt: skip
NO_PRODUCTS = ("fp32", "no matrix products")
VERSION = 1  # of as_dict

# What torch.compile, FSDP and activation checkpointing put into the path of a module that they wrap.
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


class Kept(NamedTuple):
    """One rule."""

    pattern: str
    precision: str


@dataclass(frozen=True, slots=True, repr=False)
class Policy:
    """The precision of a model, and of the modules in it that differ.

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

    Patterns are globs over the dotted names of modules, in which ``*`` also matches dots, and the root has no name.
    What DistributedDataParallel, FSDP, torch.compile and checkpointing add to names does not count. Of the rules that
    match a module the last one wins. A ModuleList or ModuleDict is never called, so a rule for it is one for each
    module in it.
    """

    base: str = "auto"
    rules: tuple[Kept, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.base, str):
            raise BadInput(f"Policy({self.base!r}): a precision is expected by name: {_listed(BASES)}.")
        if self.base.startswith(WITH_OPTIONS):
            precision_named(self.base)  # which refuses what is no format, or no option
        elif self.base not in BASES:
            raise UnknownName("precision", self.base, BASES, listing=f"Policy() takes {_listed(BASES)}.")
        if not isinstance(self.rules, tuple) or not all(isinstance(rule, Kept) for rule in self.rules):
            raise BadInput(f"Policy({self.base!r}): rules are added by keep(precision, name).")

    def keep(self, precision: str, *patterns: str) -> Policy:
        """A policy that also runs the modules matching any of these patterns in this precision."""
        asked = f"Policy.keep({precision!r})"
        name = checked(asked, precision)
        if not patterns:
            raise BadInput(f'{asked}: which modules? Give their names or globs: keep({precision!r}, "*.router").')
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise BadInput(f"{asked}: names of modules are expected, not {pattern!r}.")
            if not pattern:
                raise BadInput(f"{asked}: '' is the model itself, whose precision is the policy's: Policy({name!r}).")
        return replace(self, rules=(*self.rules, *(Kept(pattern, name) for pattern in patterns)))

    def __repr__(self) -> str:
        made = f"Policy({self.base!r})"
        for precision, rules in groupby(self.rules, key=lambda rule: rule.precision):
            made += f".keep({_listed([precision, *(rule.pattern for rule in rules)])})"
        return made

    def modules(self, model: nn.Module) -> dict[str, str]:
        """The modules that a rule is for, by name, and the precision of each.

        A module that has several names has one precision under all of them.
        """
        decided = self._decided(model)
        return {name: decided[module].precision for name, module in named_modules(model).items() if module in decided}

    def apply(self, model: nn.Module) -> Applied:
        """Have the kept modules run in their precision from now on, or until the end of a ``with``.

        The base is not put on: that is for autocast around the model, or for ``ampwise.Engine``. Parameters and the
        state dict stay as they are. A module whose weights are used without a call of it, as ``nn.MultiheadAttention``
        does with its ``out_proj``, is not reached: keep the one that uses them. Where this same policy is on already,
        nothing changes.
        """
        decided = self._decided(model)
        on = [module for module in model.modules() if is_forward_in(module.__dict__.get("forward"))]
        for module in on:
            other = module.__dict__["forward"].owner
            if other != self:
                raise BadInput(
                    f"{self!r}.apply(): another policy is on this model. "
                    f"Take it off first: {other!r}.apply(model).remove()"
                )
        fresh = [module for module in decided if module not in set(on)]
        for module in fresh:
            module.forward = forward_in(decided[module].precision, module, owner=self)
        return Applied([*on, *fresh], fresh)

    def describe(self, model: nn.Module) -> str:
        """What runs how, and why, as text to print: modules with parameters, and those a rule is for."""
        return table(self.base, *self._lines(model))

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint, which ``from_dict`` reads."""
        return {"version": VERSION, "base": self.base, "keep": [rule._asdict() for rule in self.rules]}

    @classmethod
    def from_dict(cls, data: Any) -> Policy:
        """The policy that ``as_dict`` was called on."""
        parts = _parts(data, "a policy", {"version", "base", "keep"})
        if parts["version"] != VERSION or isinstance(parts["version"], bool):
            raise BadInput(f"Policy.from_dict(): version {parts['version']!r} is not the one read here: {VERSION}.")
        if not isinstance(parts["keep"], list | tuple):
            raise BadInput(f"Policy.from_dict(): 'keep' is to be a list of rules, not {parts['keep']!r}.")
        rules = [_parts(rule, "a rule", set(Kept._fields)) for rule in parts["keep"]]
        try:
            policy = cls(parts["base"])
            for rule in rules:
                policy = policy.keep(rule["precision"], rule["pattern"])
        except AmpwiseError as error:
            raise BadInput(f"Policy.from_dict(): {error}") from error
        return policy

    def patterns(self, model: nn.Module) -> dict[nn.Module, str]:
        """The modules that a rule is for, and the pattern of that rule."""
        return {module: rule.pattern for module, rule in self._decided(model).items()}

    def _decided(self, model: nn.Module) -> dict[nn.Module, Kept]:
        """The rule for each module that has one."""
        if not isinstance(model, nn.Module):
            raise BadInput(f"{self!r}: a torch.nn.Module is expected, not {type(model).__name__}.")
        named = named_modules(model)
        decided: dict[nn.Module, Kept] = {}
        for rule in self.rules:
            found = [module for name, module in named.items() if name and fnmatchcase(name, rule.pattern)]
            if not found:
                raise _no_match(rule.pattern, named)
            called = [inner for module in found for inner in _called(module)]
            if not called:
                raise BadInput(f"{self!r}: what {rule.pattern!r} matches is never called and has no modules in it.")
            decided.update((module, rule) for module in called)
        return decided

    def _by_layer(self, model: nn.Module) -> dict[nn.Module, tuple[str, str]]:
        """The precision and the reason of modules for which it is not the base's."""
        if self.base == "fp8":
            return _fp8_layers(model, self.patterns(model))
        found = _fp8_by_torchao(model)  # whatever the precision
        if self.base.startswith(EMULATE):
            found.update((each, NO_PRODUCTS) for each in model.modules() if isinstance(each, WITHOUT_PRODUCTS))
        return found

    def _lines(self, model: nn.Module) -> tuple[Counter[str], list[Line]]:
        """How many parameters run how, one shared by modules counted once for each precision, and the table's lines."""
        decided, named = self._decided(model), named_modules(model)
        by_layer = self._by_layer(model)
        lines: list[Line] = []
        running: dict[str, dict[nn.Parameter, int]] = {}
        shown: set[nn.Module] = set()
        for name, module in named.items():
            own = {parameter: _count(parameter) for parameter in module.parameters(recurse=False)}
            if module in shown or not (own or module in decided):
                continue
            above = next((part for part in upwards(name) if named.get(part) in decided), None)
            rule = Kept("", self.base) if above is None else decided[named[above]]
            precision, why = by_layer.get(module, (self.base, "base")) if above is None else (rule.precision, "")
            line = Line(
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
        return Counter({precision: sum(counts.values()) for precision, counts in running.items()}), lines


class Applied:
    """A policy that is on a model, until ``remove`` or the end of a ``with``."""

    def __init__(self, modules: Iterable[nn.Module], fresh: Iterable[nn.Module]) -> None:
        self._forwards = {module: module.__dict__["forward"] for module in modules}
        self._fresh = set(fresh)  # those that were not on before

    def remove(self) -> None:
        """Take the policy off: every module has the forward that it had before."""
        self._take_off(self._forwards)

    def __enter__(self) -> Applied:
        # It may be taken off and put on again: with the same forwards, for which torch.compile keeps what it has made.
        for module, made in self._forwards.items():
            if not self._is_on(module):
                module.forward = made
        return self

    def __exit__(self, *error: object) -> None:
        self._take_off(self._fresh)  # the policy may have been on around this

    def _take_off(self, modules: Iterable[nn.Module]) -> None:
        on = [module for module in modules if self._is_on(module)]
        for module in on:
            earlier = module.__dict__.pop("forward").args[-1]
            if earlier is not None:
                module.forward = earlier

    def _is_on(self, module: nn.Module) -> bool:
        made, now = self._forwards[module], module.__dict__.get("forward")
        if now is not made and now is not made.args[-1] and not is_forward_in(now):
            raise BadInput(
                f"Applied.remove(): the forward of {type(module).__name__} has been replaced since. "
                "Put back the one that was there."
            )
        return now is made


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by the names they have where nothing is wrapped; of a wrapper and what it wraps, the latter."""
    return dict(with_wrappers(model))


def with_wrappers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The same with each wrapper besides, under the name of what it wraps."""
    return _walk(model, "")


def _walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(child, name if _wraps(module, name, key) else f"{name}.{key}".lstrip("."))


def _wraps(parent: nn.Module, name: str, key: str) -> bool:
    """Whether the parent is there only to wrap this child of it."""
    if key != "module":
        return key in WRAPPERS
    return isinstance(parent, DataParallel | DistributedDataParallel) or (not name and len(parent._modules) == 1)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or those in it if it only holds them."""
    if type(module).forward is not nn.Module.forward or "forward" in module.__dict__:
        yield module
        return
    for name, child in named_modules(module).items():
        if name and "." not in name:  # what is wrapped rather than its wrapper
            yield from _called(child)


def _fp8_by_torchao(model: nn.Module) -> dict[nn.Module, tuple[str, str]]:
    from ampwise.float8.decided import put_there_before  # which few need

    return put_there_before(model)


def _fp8_layers(model: nn.Module, kept: dict[nn.Module, str]) -> dict[nn.Module, tuple[str, str]]:
    from ampwise.float8.decided import described  # which few need, and which asks for names here

    return described(model, kept)


def _count(parameter: nn.Parameter) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()


def upwards(name: str) -> Iterator[str]:
    """The name, and those of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _no_match(pattern: str, names: Iterable[str]) -> UnknownName:
    known = [*names, *dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in names if "." in name)]
    return UnknownName(
        "module",
        pattern,
        filter(None, known),
        listing="Names are those of model.named_modules(), and * matches any part of one, dots too.",
    )


def _parts(data: Any, what: str, expected: set[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise BadInput(f"Policy.from_dict(): {what} is to be a dict, not {data!r}.")
    if set(data) != expected:
        wrong = _listed(sorted(map(str, set(data) ^ expected)))
        raise BadInput(f"Policy.from_dict(): {what} has {_listed(sorted(expected))}; missing or not known: {wrong}.")
    return data


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
