"""Differences between the script and the checkpoint that it resumes: which value wins, and what is printed.

To resume bit for bit, a run uses the checkpoint's values. Where the script's value differs, the guard prints a line on
stderr, or refuses where resuming makes no sense. ``Guard(override=[...])`` names the settings to take from the script.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.guard.script_loop import SCRIPTS_OWN
from ampwise.guard.training import GuardedTraining
from ampwise.runs.plain_data import from_json, to_json
from ampwise.train.precision.policy import Policy

PARTS = ("precision", "optimizer", "schedulers", "scaler", "state", "data")
SHOWN = 40  # longest value that is printed, in characters


class _Changed(NamedTuple):
    name: str
    saved: Any
    here: Any

    def __str__(self) -> str:
        values = [f"{each:g}" if isinstance(each, float) else str(each) for each in (self.saved, self.here)]
        return f"{self.name} ({' -> '.join(values)})" if max(map(len, values)) <= SHOWN else self.name


class ScriptChanges:
    """Compares the settings of this script with those of the script that saved a checkpoint.

    Values that change during training, such as a scheduled learning rate, are compared as the scripts set them
    initially, which is why a checkpoint stores those, too. A setting overridden once stays overridden.
    """

    def __init__(self, engine: GuardedTraining, names: Iterable[str], override: Iterable[str]) -> None:
        self._engine, self._names = engine, frozenset(names)
        options = {key for each in engine.optimizers for group in each.param_groups for key in group} - {"params"}
        given = [override] if isinstance(override, str) else list(override)
        if isinstance(override, str) or not all(isinstance(name, str) and name in {*PARTS, *options} for name in given):
            raise BadInput(
                f"Guard(override={override!r}): expected a list of {', '.join(map(repr, PARTS))} and optimizer "
                f"options: {', '.join(sorted(options))}."
            )
        self._override = frozenset(given)
        schedules_too = self._override & {"schedulers", "optimizer"}
        if "lr" in self._override and not schedules_too and engine.state_dict()["schedulers"]:
            raise BadInput("Guard(override=['lr']): a scheduler sets it. Override both: ['lr', 'schedulers'].")
        self._policy = engine.policy
        self._here: dict[str, Any] = {}  # settings of this script
        self.given: dict[str, Any] = {}  # settings to store in checkpoints: without changes that were not applied

    def begin(self) -> None:
        """Record the script's settings, before a checkpoint is read."""
        self._policy = self._engine.policy
        state = self._engine.state_dict()
        settings = {"optimizers": [], "schedulers": state["schedulers"], "scaler": state["scaler"]}
        for optimizer in self._engine.optimizers:
            plain = type(optimizer).state_dict is Optimizer.state_dict  # others save in a format of their own
            groups = [
                {key: value for key, value in group.items() if key not in ("params", "param_names")}
                for group in (optimizer.param_groups if plain else ())
            ]
            settings["optimizers"].append({"kind": type(optimizer).__name__, "groups": groups})
        self.given = self._here = from_json(to_json(settings, "what the script gave"))

    def overrides(self, name: str) -> bool:
        return name in self._override

    def precision(self, plain: Mapping[str, Any]) -> tuple[Policy, list[str]]:
        """Return the precision to resume in, and what to print about it.

        It is the checkpoint's, also if the guard has changed it since the start. If the script has changed it, that
        needs override=['precision'].
        """
        saved_by, engine = plain["engine"]["precision"], self._engine.precision
        if SCRIPTS_OWN in (saved_by, engine) and saved_by != engine:
            kinds = {True: "a loop of the script's own (model=..., optimizer=...)", False: "an Engine"}
            raise BadInput(
                f"it was saved by the guard of {kinds[saved_by == SCRIPTS_OWN]}, and this is one of "
                f"{kinds[engine == SCRIPTS_OWN]}. Name another directory."
            )
        now, guard = Policy.from_dict(plain["engine"]["policy"]), plain.get("guard") or {}
        before = guard.get("policies_before") or ()
        then, here = (Policy.from_dict(before[0]) if before else now), self._policy
        if here == then != now:
            was = f"the guard has changed the precision from {_policy_text(here)}"
            return now, [f"resuming in {_policy_text(now)}: {was}"]
        if here == now:
            return now, []
        if not self.overrides("precision"):
            raise BadInput(
                f"it was saved in {_policy_text(then)}, and the script's engine trains in {_policy_text(here)}. "
                "Create the engine as it was, or use the script's precision: Guard(override=['precision'])."
            )
        guard.update(policies_before=[])
        return here, [f"saved in {_policy_text(now)}; resuming in the script's {_policy_text(here)}"]

    def settle(self, plain: dict[str, Any], trained: Sequence[Iterable[str]]) -> list[str]:
        """Apply the script's overrides to the state that was read; return a line about each difference.

        Raise BadInput for differences that cannot be resumed with. trained: parameter names of each optimizer.
        """
        saved = (plain.get("guard") or {}).get("given") or self._here  # older checkpoints do not have it
        self.given = dict(saved)
        return [*self._optimizers(plain, saved, trained), *self._parts(plain, saved), *self._states(plain)]

    def _optimizers(
        self, plain: dict[str, Any], saved: Mapping[str, Any], trained: Sequence[Iterable[str]]
    ) -> Iterator[str]:
        kinds, here = ([each["kind"] for each in given["optimizers"]] for given in (saved, self._here))
        if kinds == here:
            yield from self._hyperparameters(plain["optimizers"], saved["optimizers"])
            for rest, names in zip(plain["optimizers"], trained, strict=False):
                if left := sorted(rest.get("state", {}).keys() - names):
                    more = f" and {len(left) - 1:,} more" if len(left) > 1 else ""
                    yield f"the optimizer no longer trains {left[0]}{more}: its state in the checkpoint is dropped"
        elif self.overrides("optimizer"):
            plain["optimizers"] = [
                {"state": {name: {} for name in names}, "groups": given["groups"]}
                for names, given in zip(trained, self._here["optimizers"], strict=True)
            ]
            self.given["optimizers"] = self._here["optimizers"]
            yield f"{', '.join(here)} starts fresh, without the checkpoint's state of {', '.join(kinds)}"
        else:
            raise BadInput(
                f"it was saved with {', '.join(kinds)}, and the script trains with {', '.join(here)}. Create the "
                "optimizer as it was, or start it fresh on the checkpoint's weights: Guard(override=['optimizer'])."
            )

    def _hyperparameters(self, plain: list[Any], saved: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Put overridden hyperparameters into the plain state; report the changes that are not applied."""
        not_applied: dict[str, _Changed] = {}
        self.given["optimizers"] = copy.deepcopy(saved)
        for place, (then, here) in enumerate(zip(saved, self._here["optimizers"], strict=True)):
            for number, (old, new) in enumerate(zip(then["groups"], here["groups"], strict=False)):
                for each in _differing(old, new, ""):
                    if self.overrides(each.name):
                        plain[place]["groups"][number][each.name] = each.here
                        self.given["optimizers"][place]["groups"][number][each.name] = each.here
                    else:
                        not_applied.setdefault(each.name, each)
        if not_applied:
            scheduled = ["schedulers"] if "lr" in not_applied and self._here["schedulers"] else []
            yield _unapplied_message(not_applied.values(), [*not_applied, *scheduled])

    def _parts(self, plain: dict[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
        """Compare the schedulers, and the loss scaler if both have one."""
        for part in ("schedulers", "scaler"):
            changed = list(_differing(saved[part], self._here[part], part.removesuffix("s")))
            if not changed or (part == "scaler" and not (saved[part] and self._here[part])):
                continue
            if self.overrides(part):
                self.given[part] = plain["engine"][part] = self._here[part]
                yield f"the script has changed {', '.join(map(str, changed))}, which starts fresh"
            else:
                yield _unapplied_message(changed, [part])

    def _states(self, plain: dict[str, Any]) -> Iterator[str]:
        """Compare the modules and other objects that Guard(state=...) names."""
        modules = {name.removeprefix("other."): name for name in plain["modules"] if name.startswith("other.")}
        saved = {*plain["others"], *modules}
        gone = sorted(saved - self._names)
        if gone and not self.overrides("state"):
            raise BadInput(
                f"it has the state of {gone[0][:80]!r}, and Guard(state=...) does not name it. Name it, or drop the "
                "saved state: Guard(override=['state'])."
            )
        for name in gone:
            plain["others"].pop(name, None)
            plain["modules"].pop(modules.get(name, ""), None)
            yield f"the checkpoint's state of {name!r} is dropped"
        for name in sorted(self._names - saved):
            yield f"the checkpoint has no state of {name!r}: it starts with the values that the script gave it"


def _differing(saved: Any, here: Any, name: str) -> Iterator[_Changed]:
    """Yield the innermost values that differ, with their dotted names."""
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        for key in dict.fromkeys([*saved, *here]):
            yield from _differing(saved.get(key), here.get(key), f"{name}.{key}" if name else str(key))
    elif _are_mappings(saved) and _are_mappings(here) and len(saved) == len(here):
        for then, now in zip(saved, here, strict=True):
            yield from _differing(then, now, name)
    else:
        if isinstance(saved, torch.Tensor) or isinstance(here, torch.Tensor):
            is_same = type(saved) is type(here) and torch.equal(saved, here)
        else:
            is_same = bool(saved == here)
        if not is_same:
            yield _Changed(name, saved, here)


def _are_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


def _unapplied_message(changed: Iterable[_Changed], names: Sequence[str]) -> str:
    return (
        f"the script has changed {', '.join(map(str, changed))} since the checkpoint. The checkpoint's values are "
        f"used; to use the script's: Guard(override={list(names)})"
    )


def _policy_text(policy: Policy) -> str:
    kept = ", ".join(f"{rule.pattern} in {rule.precision}" for rule in policy.rules)
    return f"{policy.base} with {kept}" if kept else policy.base
