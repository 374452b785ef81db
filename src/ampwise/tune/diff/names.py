"""Find the models that a function uses, and name their modules and parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from ampwise.errors import UnknownName
from ampwise.trace.call_arguments import outer_variables
from ampwise.trace.call_site import code_owner
from ampwise.train.precision.policy import named_modules

DEEPEST = 3  # levels of nested functions and objects to search
LONGEST = 200  # longer containers are data


def find_models(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Module]:
    """Return the models that a function can reach, by their variable names; parts of other models are left out."""
    found: dict[Module, str] = {}
    for name, model in _reached("", function, DEEPEST, set()):
        found.setdefault(model, name)
    for name, value in (*((f"argument {number}", each) for number, each in enumerate(args, 1)), *kwargs.items()):
        for inner, model in _reached(name, value, 1, set()):
            found.setdefault(model, inner)
    inside = {part for model in found for part in model.modules() if part is not model}
    return {name: model for model, name in found.items() if model not in inside}


def _reached(name: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Module]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Module):
        yield name, value
    elif depth:
        for step, inner in _parts(value):
            yield from _reached(step, inner, depth - 1, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield from (("", each) for each in (value.func, *value.args))
        yield from value.keywords.items()
    elif inspect.ismethod(value):
        yield from (("self", value.__self__), ("", value.__func__))
    elif isinstance(value, FunctionType):
        inner = inspect.unwrap(value)
        if isinstance(inner, FunctionType) and code_owner(inner.__code__.co_filename) == "own":
            yield from outer_variables(inner).items()
    elif isinstance(value, Mapping | list | tuple) and len(value) > LONGEST:
        return
    elif isinstance(value, Mapping):
        yield from ((str(key), each) for key, each in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(number), each) for number, each in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor | type) and not inspect.ismodule(value):
        yield from vars(value).items()


class ModuleNames:
    """Names of modules and parameters. The trained model has no prefix; others have the name of their variable."""

    def __init__(self, models: Mapping[str, Module], patterns: Sequence[str] = ()) -> None:
        self._patterns = tuple(patterns)
        self._names: dict[int, str] = {}
        self._parameters: dict[int, str] = {}
        self.roots: list[Module] = []
        self.looked_into = True  # False: models are known, but their modules are not compared
        main = [model for model in models.values() if _is_trained(model)] or list(models.values())
        self.main = main[0] if len(main) == 1 else None
        for name, model in models.items():
            self.learn(model, "" if model is self.main else name)
        if models:
            self.check_patterns()

    def learn(self, model: Module, name: str | None = None) -> None:
        """Add a model; ``name`` is the prefix of its modules' names.

        None: its variable is unknown. Then there is no prefix if it is the only trained one, else it is its class.
        """
        prefix = "" if name is None else name
        if name is None and (any(map(_is_trained, self.roots)) or not _is_trained(model)):
            taken = {known.partition(".")[0] for known in self._names.values()}
            kind = type(model).__name__
            prefix = kind if kind not in taken else f"{kind}{sum(each.startswith(kind) for each in taken) + 1}"
        self.roots.append(model)
        for path, module in named_modules(model).items():
            self._names.setdefault(id(module), ".".join(part for part in (prefix, path) if part))
            for own, parameter in module.named_parameters(recurse=False):
                full = ".".join(part for part in (prefix, path, own) if part)
                self._parameters.setdefault(id(parameter), full)

    def __contains__(self, module: Module) -> bool:
        return id(module) in self._names

    def of(self, module: Module) -> str:
        """Return the name in its model; "" for the model itself."""
        return self._names[id(module)]

    def of_parameter(self, parameter: Tensor) -> str | None:
        return self._parameters.get(id(parameter))

    def watched(self, model: Module) -> Iterator[Module]:
        """Yield the modules of a model to compare, each once."""
        for module in dict.fromkeys(named_modules(model).values()) if self.looked_into else ():
            if self.matches(self.of(module)):
                yield module

    def matches(self, name: str) -> bool:
        """Whether a module of this name is to be compared."""
        return not self._patterns or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def parameters(self) -> list[Parameter]:
        """Return the trained parameters, each once."""
        found = (parameter for model in self.roots for parameter in model.parameters())
        return list(dict.fromkeys(each for each in found if each.requires_grad and not is_lazy(each)))

    def check_patterns(self) -> None:
        """Raise UnknownName if a pattern matches no module."""
        for pattern in self._patterns:
            if not any(fnmatchcase(name, pattern) for name in self._names.values()):
                listing = "Use names of model.named_modules(); * matches any part of a name, including dots."
                raise UnknownName("module", pattern, filter(None, self._names.values()), listing=listing)


def _is_trained(model: Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())
