"""What a script has changed since the checkpoint that it resumes: whose value is used, and what is said about it.

A run that resumes to the bit uses the checkpoint's values. Where the script has another one, that is no accident that
may go unsaid: it is one line on stderr, or a refusal where going on makes no sense. ``Guard(override=[...])`` names
what the script is to decide.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ampwise.engine.engine import Engine
from ampwise.engine.precision.policy import Policy
from ampwise.errors import BadInput
from ampwise.guard.plain import from_json, to_json

__all__ = ["Changes"]

PARTS = ("precision", "optimizer", "schedulers", "scaler", "state", "data")
SHOWN = 40  # characters of a value


class _Changed(NamedTuple):
    name: str
    saved: Any
    here: Any

    def __str__(self) -> str:
        values = [f"{each:g}" if isinstance(each, float) else str(each) for each in (self.saved, self.here)]
        return f"{self.name} ({' -> '.join(values)})" if max(map(len, values)) <= SHOWN else self.name


class Changes:
    """Between the script, as it made its engine, and the script that a checkpoint was saved by.

    Values that move during a training, such as the rate that a scheduler sets, are compared as both scripts gave them,
    which is why a checkpoint has those, too. What was overridden once is the same from then on, and goes on.
    """

    def __init__(
        self, engine: Engine, names: Iterable[str], override: Iterable[str], say: Callable[[str], None]
    ) -> None:
        self._engine, self._names, self._say = engine, frozenset(names), say
        self._override = _checked(override, engine)
        self._policy = engine.policy
        self._here: dict[str, Any] = {}  # what this script gave
        self.given: dict[str, Any] = {}  # what its checkpoints say that it gave: without what it has changed in vain

    def begin(self) -> None:
        """Before anything is read: what the script has made."""
        self._policy = self._engine.policy
        self.given = self._here = from_json(to_json(_given(self._engine), "what the script gave"))

    def overrides(self, name: str) -> bool:
        return name in self._override

    def precision(self, plain: Mapping[str, Any]) -> Policy:
        """The one to go on in. The guard may have changed it, which stays; or the script, which a person decides."""
        now, guard = Policy.from_dict(plain["engine"]["policy"]), plain.get("guard") or {}
        before = guard.get("policies_before") or ()
        then, here = (Policy.from_dict(before[0]) if before else now), self._policy
        if here == then != now:
            self._say(f"it goes on in {_words(now)}, to which the guard has changed from {_words(here)}")
        if here in (then, now):
            return now
        if not self.overrides("precision"):
            raise BadInput(
                f"it was saved in {_words(then)}, and the script's engine trains in {_words(here)}. Make the engine as "
                "it was; or go on in the script's precision: Guard(override=['precision'])."
            )
        guard.update(policies_before=[])
        self._say(f"saved in {_words(now)}; it goes on in the script's {_words(here)}")
        return here

    def settle(self, plain: dict[str, Any], trained: Sequence[Iterable[str]]) -> None:
        """Change what was read to what is to be gone on with, and say so. BadInput for what cannot be.

        trained: names of the parameters of each optimizer.
        """
        saved = (plain.get("guard") or {}).get("given") or self._here  # or it does not say
        self.given = dict(saved)
        for line in [*self._optimizers(plain, saved, trained), *self._parts(plain, saved), *self._states(plain)]:
            self._say(line)

    def _optimizers(
        self, plain: dict[str, Any], saved: Mapping[str, Any], trained: Sequence[Iterable[str]]
    ) -> Iterator[str]:
        kinds, here = ([each["kind"] for each in given["optimizers"]] for given in (saved, self._here))
        if kinds == here:
            yield from self._hyper_parameters(plain["optimizers"], saved["optimizers"])
            for rest, names in zip(plain["optimizers"], trained, strict=False):
                if left := sorted(rest.get("state", {}).keys() - names):
                    more = f" and {len(left) - 1:,} more" if len(left) > 1 else ""
                    yield f"the optimizer no longer trains {left[0]}{more}: the checkpoint's state of it is dropped"
        elif self.overrides("optimizer"):
            plain["optimizers"] = [
                {"state": {name: {} for name in names}, "groups": given["groups"]}
                for names, given in zip(trained, self._here["optimizers"], strict=True)
            ]
            self.given["optimizers"] = self._here["optimizers"]
            yield f"{', '.join(here)} begins anew, without the checkpoint's state of {', '.join(kinds)}"
        else:
            raise BadInput(
                f"it was saved with {', '.join(kinds)}, and the script trains with {', '.join(here)}. Make the "
                "optimizer as it was; or begin it anew on the checkpoint's weights: Guard(override=['optimizer'])."
            )

    def _hyper_parameters(self, plain: list[Any], saved: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Those that the script decides are changed in the plain state; of others, it is said."""
        in_vain: dict[str, _Changed] = {}
        self.given["optimizers"] = copy.deepcopy(saved)
        for place, (then, here) in enumerate(zip(saved, self._here["optimizers"], strict=True)):
            for number, (old, new) in enumerate(zip(then["groups"], here["groups"], strict=False)):
                for each in _differing(old, new, ""):
                    if self.overrides(each.name):
                        plain[place]["groups"][number][each.name] = each.here
                        self.given["optimizers"][place]["groups"][number][each.name] = each.here
                    else:
                        in_vain.setdefault(each.name, each)
        if in_vain:
            scheduled = ["schedulers"] if "lr" in in_vain and self._here["schedulers"] else []
            yield _kept(in_vain.values(), [*in_vain, *scheduled])

    def _parts(self, plain: dict[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
        """Schedulers, and the loss scale where there is one."""
        for part in ("schedulers", "scaler"):
            changed = list(_differing(saved[part], self._here[part], part.removesuffix("s")))
            if not changed or (part == "scaler" and not (saved[part] and self._here[part])):
                continue
            if self.overrides(part):
                self.given[part] = plain["engine"][part] = self._here[part]
                yield f"the script has changed {_listed(changed)}, which begins anew"
            else:
                yield _kept(changed, [part])

    def _states(self, plain: dict[str, Any]) -> Iterator[str]:
        """What Guard(state=...) names: modules, and other objects."""
        modules = {name.removeprefix("other."): name for name in plain["modules"] if name.startswith("other.")}
        saved = {*plain["others"], *modules}
        gone = sorted(saved - self._names)
        if gone and not self.overrides("state"):
            raise BadInput(
                f"it has the state of {gone[0][:80]!r}, and Guard(state=...) does not name it. Name it; or drop what "
                "was saved: Guard(override=['state'])."
            )
        for name in gone:
            plain["others"].pop(name, None)
            plain["modules"].pop(modules.get(name, ""), None)
            yield f"the checkpoint's state of {name!r} is dropped"
        for name in sorted(self._names - saved):
            yield f"the checkpoint has no state of {name!r}: it begins with the values that the script gave it"


def _given(engine: Engine) -> dict[str, Any]:
    state = engine.state_dict()
    optimizers = []
    for optimizer in engine.optimizers:
        plain = type(optimizer).state_dict is Optimizer.state_dict  # of any other, nobody knows what it saves
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in (optimizer.param_groups if plain else ())
        ]
        optimizers.append({"kind": type(optimizer).__name__, "groups": groups})
    return {"optimizers": optimizers, "schedulers": state["schedulers"], "scaler": state["scaler"]}


def _differing(saved: Any, here: Any, name: str) -> Iterator[_Changed]:
    """The innermost that differ, by name."""
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        for key in dict.fromkeys([*saved, *here]):
            yield from _differing(saved.get(key), here.get(key), f"{name}.{key}" if name else str(key))
    elif _are_mappings(saved) and _are_mappings(here) and len(saved) == len(here):
        for then, now in zip(saved, here, strict=True):
            yield from _differing(then, now, name)
    elif not _same(saved, here):
        yield _Changed(name, saved, here)


def _are_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    return bool(one == other)


def _listed(changed: Iterable[_Changed]) -> str:
    return ", ".join(map(str, changed))


def _kept(changed: Iterable[_Changed], names: Sequence[str]) -> str:
    return (
        f"the script has changed {_listed(changed)} since the checkpoint, whose values are used; for the script's: "
        f"Guard(override={list(names)})"
    )


def _words(policy: Policy) -> str:
    kept = ", ".join(f"{rule.pattern} in {rule.precision}" for rule in policy.rules)
    return f"{policy.base} with {kept}" if kept else policy.base


def _checked(override: Any, engine: Engine) -> frozenset[str]:
    options = {key for each in engine.optimizers for group in each.param_groups for key in group} - {"params"}
    given = [override] if isinstance(override, str) else list(override)
    if isinstance(override, str) or not all(isinstance(name, str) and name in {*PARTS, *options} for name in given):
        raise BadInput(
            f"Guard(override={override!r}): a list is expected of {', '.join(map(repr, PARTS))} and options of the "
            f"optimizer: {', '.join(sorted(options))}."
        )
    names = frozenset(given)
    if "lr" in names and not {"schedulers", "optimizer"} & names and engine.state_dict()["schedulers"]:
        raise BadInput("Guard(override=['lr']): a scheduler sets it. Override both: ['lr', 'schedulers'].")
    return names
