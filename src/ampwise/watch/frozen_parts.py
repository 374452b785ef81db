"""Parameters that the script means to freeze and trains, and those that it means to train and that are frozen."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site, code_owner, own_files
from ampwise.watch.freezing_code import (
    attribute_set_at,
    freezes_at,
    frozen_unused_copy,
    gives_freeze,
    idle_freezes,
    is_misspelled,
    module_frozen_at,
    says_frozen,
)
from ampwise.watch.learning import HeldFrozen, IdleFreeze, Learning, OptimizerUse
from ampwise.watch.sampled_values import SampledValues, is_plain
from ampwise.watch.stale_buffers import StaleBuffers

__all__ = ["FrozenParts"]

REQUIRES_GRAD = nn.Module.requires_grad_.__code__
ON_PARAMETERS = "requires_grad"
MOST_SITES = 256  # lines that call ``parameters()``
MOST_MODULES = 32  # at one of them
FIRST_LOOK = 3  # step of an optimizer before which nothing is judged
EVALUATES = ("freeze", "frozen")  # in the names of functions that are to freeze something
STATISTICS = ("bn", "norm", "stat")  # and of those that freeze statistics only


@dataclass(slots=True)
class _Loop:
    """A line that asks modules for their parameters."""

    site: CallSite
    modules: list[weakref.ref[nn.Module]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # values of names that conditions in the loop read
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class _Moved:
    """A frozen parameter that has a gradient at a step."""

    ref: weakref.ref[Tensor]
    gradient: tuple[int, int | bool]  # its identity, and its version unless it is zero
    values: SampledValues


class FrozenParts:
    """Settings that are to freeze parameters, and what becomes of these in the first steps."""

    def __init__(self, facts: Learning) -> None:
        self._facts = facts
        self._loops: dict[tuple[CodeType, int], _Loop] = {}
        self._functions: dict[CodeType, list[_Loop]] = {}  # the same, by function
        self._set: list[tuple[weakref.ref[nn.Module], CallSite, str]] = []  # modules, and what is to freeze them
        self._made: list[tuple[weakref.ref[Tensor], CallSite]] = []  # embeddings that are frozen by default
        self._buffers = StaleBuffers(facts)
        self._moved: dict[int, _Moved] = {}  # frozen parameters that have a gradient

    # What the script does

    def switched_to_eval(self, module: nn.Module) -> None:
        """Note a call of ``eval()`` in a function that is to freeze something."""
        site = calling_site()
        name = site.function.lower()
        is_to_freeze = any(each in name for each in EVALUATES) and not any(each in name for each in STATISTICS)
        if is_to_freeze and not isinstance(module, nn.modules.batchnorm._NormBase) and len(self._set) < MOST_SITES:
            self._set.append((weakref.ref(module), site, "`eval()` changes the mode, and not what is trained"))

    def parameters_asked(self, module: nn.Module, frame: FrameType) -> None:
        """Note the line that asks a module for its parameters or its state. This runs at each such call."""
        if frame.f_code is REQUIRES_GRAD and frame.f_back is not None:  # ``module.requires_grad_(False)``
            frame = frame.f_back
        key = (frame.f_code, frame.f_lineno)
        known = self._loops.get(key)
        if known is None:
            if len(self._loops) >= MOST_SITES or code_owner(frame.f_code.co_filename) != "own":
                return
            site = CallSite(file=frame.f_code.co_filename, line=frame.f_lineno, function=frame.f_code.co_name)
            known = self._loops[key] = _Loop(site)
            self._functions.setdefault(frame.f_code, []).append(known)
            for idle in idle_freezes(frame.f_code.co_filename, frame.f_lineno):
                for name in idle.settings:
                    known.settings[name] = frame.f_locals.get(name, frame.f_globals.get(name))
        if len(known.modules) < MOST_MODULES and all(each() is not module for each in known.modules):
            known.modules.append(weakref.ref(module))
            known.is_new = True

    def asking_lines(self) -> list[CallSite]:
        """Return the lines that asked modules for their parameters."""
        return [each.site for each in self._loops.values()]

    def frozen_at(self, parameter: Tensor) -> CallSite | None:
        """Return the statement that freezes a parameter in a loop over those of its module; None if there is none."""
        lines = [each.site for each in self._loops.values() if _has(each.modules, parameter)]
        return next((site for each in lines if (site := freezes_at(each.file or "", each.line or 0))), None)

    def parameter_made(self, parameter: Tensor) -> None:
        """Note a frozen parameter that ``from_pretrained`` of torch's embeddings makes."""
        frame: FrameType | None = sys._getframe(1)
        for _ in range(12):
            if frame is None or code_owner(frame.f_code.co_filename) == "own":
                return
            if frame.f_code.co_name == "from_pretrained" and frame.f_code.co_filename.endswith("modules/sparse.py"):
                site = calling_site()
                if site.file is not None and not gives_freeze(site) and not says_frozen(site):
                    self._made.append((weakref.ref(parameter), site))
                return
            frame = frame.f_back

    # What becomes of it

    def step_begins(self, use: OptimizerUse, names: Sequence[str], parameters: Sequence[Any], models: Any) -> None:
        """Look at an optimizer's parameters in one of its steps, if it is not the very first."""
        if use.followed < FIRST_LOOK or len(names) != len(parameters):
            return
        named = dict(zip(map(id, parameters), names, strict=True))
        for refer, site, why in self._set:
            self._judge(refer(), site, why, named)
        for loop in self._loops.values():
            if loop.is_new:
                loop.is_new = False
                self._judge_loop(loop, named, parameters)
        if use.followed == FIRST_LOOK:
            self._judge_misspelled(parameters, models, named)
        self._look_at_averages(set(named), use.followed)
        for made, site in self._made:
            if (parameter := made()) is not None and id(parameter) in named:
                self._note_held(use, site, parameter, named[id(parameter)], "`from_pretrained` freezes it by default")
        for each in parameters:
            if isinstance(each, Tensor) and not isinstance(each, nn.Parameter) and each.grad is None:
                self._note_held(use, use.made_at, each, named[id(each)], "a plain tensor needs no gradient by default")
            if each.grad is not None and (not each.requires_grad or id(each) in self._moved):
                self._note_moved(each, named[id(each)])

    def _look_at_averages(self, held: set[int], step: int) -> None:
        """Look at modules whose parameters a line reads or, if all of its lines read one each, a function."""
        for code, loops in self._functions.items():
            together = [each for each in loops if len(each.modules) > 1]
            for each in together:
                self._buffers.look(each.site, [(each.site, each.modules)], held, step)
            if len(loops) > 1 and not together:
                self._buffers.look(code, [(each.site, each.modules) for each in loops], held, step)

    def _note_held(self, use: OptimizerUse, site: CallSite, parameter: Tensor, name: str, why: str) -> None:
        key = (site, name)
        if parameter.requires_grad:
            self._facts.held_frozen.pop(key, None)
            return
        held = HeldFrozen(name=name, optimizer=use.name, why=why, first=use.followed)
        self._facts.held_frozen.setdefault(key, held).last = use.followed

    def _note_moved(self, parameter: Tensor, name: str) -> None:
        """Note a frozen parameter that steps still change, by a gradient that no backward pass has computed."""
        gradient, before = parameter.grad, self._moved.pop(id(parameter), None)
        if parameter.requires_grad or gradient is None or not is_plain(parameter) or not is_plain(gradient):
            return
        left = bool(gradient.any()) if gradient.is_cpu else True
        if (
            before is not None
            and before.ref() is parameter
            and before.gradient == (id(gradient), left and gradient._version)
        ):
            frozen_at = self.frozen_at(parameter)
            if frozen_at is not None and bool(before.values.changed().read()[0]):
                what = "an old gradient" if left else "a gradient of zeros (`zero_grad(set_to_none=False)`)"
                why = f"steps go on with {what}, momentum and weight decay, as the optimizer still has them"
                known = self._facts.idle_freezes.setdefault(frozen_at, IdleFreeze(why=why, are_frozen=True))
                known.parameters[name] = None
                return
        noted = (id(gradient), left and gradient._version)
        self._moved[id(parameter)] = _Moved(weakref.ref(parameter), noted, SampledValues(parameter))

    def _judge(
        self, module: nn.Module | None, site: CallSite, why: str, named: dict[int, str], *, is_for_some: bool = False
    ) -> None:
        own = [] if module is None else list(nn.Module.parameters(module))
        trained = [each for each in own if id(each) in named and each.grad is not None]
        if trained and all(each.requires_grad for each in own):
            known = self._facts.idle_freezes.setdefault(site, IdleFreeze(why=why, is_for_some=is_for_some))
            known.parameters.update(dict.fromkeys(named[id(each)] for each in trained))

    def _judge_loop(self, loop: _Loop, named: dict[int, str], parameters: Sequence[Any]) -> None:
        file, line = loop.site.file or "", loop.site.line or 0
        for idle in idle_freezes(file, line):
            if idle.needs_settings and not all(_is_names(loop.settings.get(name)) for name in idle.settings):
                continue
            for refer in loop.modules:
                self._judge(refer(), idle.site, idle.why, named, is_for_some=idle.is_for_some)
        copied, frozen_at = loop.modules[-1](), frozen_unused_copy(file, line)
        own = list(nn.Module.parameters(copied)) if copied is not None and frozen_at is not None else []
        if frozen_at is not None and own and not any(each.requires_grad or id(each) in named for each in own):
            shapes = Counter(each.shape for each in own)
            alike = [each for each in parameters if each.shape in shapes and each.grad is not None]
            if Counter(each.shape for each in alike) >= shapes:
                why = "it freezes a copy of the module that the script uses for nothing else"
                known = self._facts.idle_freezes.setdefault(frozen_at, IdleFreeze(why=why, is_for_some=True))
                known.parameters.update(dict.fromkeys(named[id(each)] for each in alike))

    def _judge_misspelled(self, parameters: Sequence[Any], models: Sequence[nn.Module], named: dict[int, str]) -> None:
        """Look for attributes of parameters and modules that are meant to be ``requires_grad``."""
        modules = {id(each): (name, each) for model in models for name, each in model.named_modules()}.values()
        for path, thing, held in [*(("", each, [each]) for each in parameters), *((*each, None) for each in modules)]:
            for name in [
                each for each in getattr(thing, "__dict__", ()) if is_misspelled(each) or each == ON_PARAMETERS
            ]:
                site = None
                if vars(thing)[name] is False:
                    files = tuple(own_files())
                    is_right = name == ON_PARAMETERS
                    site = (
                        module_frozen_at(path.rpartition(".")[2], files) if is_right else attribute_set_at(name, files)
                    )
                own = held or list(nn.Module.parameters(thing))
                trained = [each for each in own if id(each) in named and each.grad is not None]
                if site is not None and trained and all(each.requires_grad for each in own):
                    why = f"`{name}` means nothing to torch: the attribute of a parameter is `requires_grad`"
                    if name == ON_PARAMETERS:
                        why = "`requires_grad` of a module is an attribute that torch does not look at"
                    known = self._facts.idle_freezes.setdefault(site, IdleFreeze(why=why))
                    known.parameters.update(dict.fromkeys(named[id(each)] for each in trained))


def _has(modules: Sequence[weakref.ref[nn.Module]], parameter: Tensor) -> bool:
    return any(
        each is parameter
        for refer in modules
        if (module := refer()) is not None
        for each in nn.Module.parameters(module)
    )


def _is_names(value: Any) -> bool:
    """Whether a setting names parts of a model; an empty one, or a switch, may ask for nothing to be frozen."""
    if isinstance(value, str):
        return bool(value)
    return isinstance(value, list | tuple | set | frozenset) and bool(value) and all(map(_is_names, value))
