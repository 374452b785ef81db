"""``precision="fp8"``: linear layers whose products run in FP8, the rest in BF16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Linear, Module, ModuleList

from ampwise.compiled import as_written
from ampwise.engine.fitting import AS_IT_IS, Fitting
from ampwise.engine.precision.policy import Policy
from ampwise.engine.ranks import Ranks
from ampwise.errors import BadInput, MissingDependency, PrecisionUnavailable
from ampwise.evidence.narrow import NarrowLayers
from ampwise.finding import Finding
from ampwise.float8.checking import refuse_wrong_kernels
from ampwise.float8.choosing import Choice, choices
from ampwise.float8.decided import decided_on, forget
from ampwise.float8.layer import Noting, fit, unfit
from ampwise.float8.layers import is_delayed, made
from ampwise.float8.measuring import Measured, Shapes, candidates, measured
from ampwise.float8.prepared import GATHERED, gathers_in_fp8, is_prepared, narrow, widen
from ampwise.float8.recipe import MEASURED, OURS, Fp8, fp8_from
from ampwise.float8.sampling import Sample, Sampled, findings_of, narrow_layers
from ampwise.float8.scales import Scales

__all__ = ["Fp8Fitting"]

NAMED = 3  # layers in a message
PATIENCE = 8  # steps for a layer to be used that is to be measured
UNUSED = Measured(recipe=None, why="not used in the step that was measured, or in FP32 only")


class Fp8Fitting(Fitting):
    """The layers of a model that run in FP8, by one recipe or, measured, each by its own.

    The first step is run without torch.compile where something has to be learned from it: shapes to measure, or the
    magnitudes that delayed scaling goes by. So a model is compiled once, as it stays.
    """

    def __init__(
        self, models: Sequence[Module], policy: Policy, asked: Any, device: torch.device, *, graphed: bool = False
    ) -> None:
        self._fp8, self._device, self._graphed = fp8_from(asked), device, graphed
        if torch.version.hip is not None:
            raise PrecisionUnavailable("Engine(precision='fp8'): on NVIDIA GPUs only. Use precision='bf16' on AMD's.")
        self._ranks = Ranks(models)
        whole = models[0] if len(models) == 1 else ModuleList(models)
        self._choices = choices(whole, policy.patterns(whole), self._fp8)
        _refuse_none(self._choices, self._fp8)
        self._prepared = [module for module in self._choices if is_prepared(module)]
        self._refuse_gathered()
        self._open = [module for module, choice in self._choices.items() if choice.recipe == MEASURED]
        self._noting: dict[Linear, Noting] = {}  # while what they are given is noted
        self._times: dict[Linear, Measured] = {}
        self._samples: dict[str, Sample] = {}  # by layer
        self._steps = 0
        self.phase = 0
        self.plain = False
        # At once, so that what is missing is missed before anything has changed.
        if self._open:
            _refuse_missing(self._fp8, device)
        self._make({each: self._fp8 for each, choice in self._choices.items() if choice.recipe == self._fp8.recipe})

    def _make(self, recipes: Mapping[Linear, Fp8]) -> None:
        """The layers, not put on yet; those to be measured have no recipe so far."""
        recipes = {module: fp8 for module, fp8 in recipes.items() if fp8.recipe != MEASURED}
        for fp8 in {fp8 for fp8 in recipes.values() if fp8.made_by == OURS}:
            refuse_wrong_kernels(fp8, self._device)
        delayed = [module for module, fp8 in recipes.items() if is_delayed(fp8)]
        names = [self._choices[module].name for module in delayed]
        self._scales = Scales(names, self._fp8, self._device) if delayed else None
        self._recipes = recipes
        self._layers = {module: made(module, fp8) for module, fp8 in recipes.items()}
        self._delayed = delayed  # in the order of the table
        self._known = [False] * len(delayed)  # whether the table has magnitudes of them
        self._followed = 0  # steps since then, or since a state was loaded

    # On and off

    def put_on(self) -> None:
        decided_on(self._choices)
        if self._open and not self._times:
            self._noting = {module: Noting() for module in self._open}
            for module, noting in self._noting.items():
                fit(module, noting)
        for module in self._prepared:
            (narrow if self._choices[module].fp8 else widen)(module)
        self._fit_layers()

    def _fit_layers(self) -> None:
        for module, how in self._layers.items():
            sampled = (
                Sampled(how, self._recipes[module], self._samples.setdefault(self._name(module), {}))
                if self.plain
                else how
            )
            fit(module, sampled, *self._delayed_of(module))

    def take_off(self) -> None:
        self._unfit_layers()
        for module in self._prepared:
            widen(module)

    @property
    def stays(self) -> str:
        names = [self._name(module) for module in self._prepared if gathers_in_fp8(module)]
        return f"not with {names[0]}: {GATHERED}" if names else ""

    def _refuse_gathered(self) -> None:
        for module in self._prepared:
            choice = self._choices[module]
            if not choice.fp8 and gathers_in_fp8(module):
                raise BadInput(f"Engine(precision='fp8'): {choice.name} is {choice.why}, but {GATHERED}")

    def _unfit_layers(self) -> None:
        forget(self._choices)
        self._noting = {}
        for module in self._choices:
            unfit(module)

    def _delayed_of(self, module: Linear) -> tuple[Tensor, Tensor | None] | tuple[()]:
        """A layer's slot, and its scales as soon as there are any."""
        if self._scales is None or module not in self._delayed:
            return ()
        place = self._delayed.index(module)
        return self._scales.slots[place], self._scales.values[place] if self._known[place] else None

    # In steps

    def products(self) -> AbstractContextManager[Any]:
        learns = self._noting or self.plain or (self._delayed and not any(self._known))
        return as_written() if learns else AS_IT_IS

    def step_ended(self) -> None:
        """The next scales. It waits only for what has to be learned: in the first steps, and in one that is sampled."""
        self._steps += 1
        if self._scales is not None:
            self._scales.update(self._ranks.process_group, together=self._ranks.several)
            self._followed += 1
            # 1, 2, 4, 8 …: a layer may be used late, or never.
            if not all(self._known) and self._followed & (self._followed - 1) == 0:
                self._go_by(self._scales)
        if self._noting and self._have_seen_enough():
            self._measure()
        if self.plain:
            self.plain = False
            self._fit_layers()  # the same as before, so that graphs of them stay right

    def _go_by(self, scales: Scales) -> None:
        """Layers whose magnitudes are known go by them from now on; until then, by those of the moment."""
        before, self._known = self._known, scales.known()
        if self._known != before:
            self._changed()

    def _changed(self) -> None:
        """Put the layers on anew, as they are now."""
        self._unfit_layers()
        self.put_on()
        self.phase += 1

    # Measured

    def _measure(self) -> None:
        used = {module: noting for module, noting in self._noting.items() if noting.shapes}
        shapes: Shapes = {module: max(noting.shapes, key=lambda each: each[0]) for module, noting in used.items()}
        compiled = any(noting.compiled for noting in used.values())
        self._unfit_layers()
        try:
            found = measured(shapes, self._fp8, self._device, compiled=compiled, graphed=self._graphed)
        except BaseException:
            self.put_on()  # to be measured in the next step
            raise
        times = [found.get(module, UNUSED) for module in self._open]
        self._decide(dict(zip(self._open, self._told_by_the_first(times), strict=True)))

    def _have_seen_enough(self) -> bool:
        """Some layer was used, on some rank; or none was for so long that one need not wait for it."""
        seen = self._steps >= PATIENCE or any(noting.shapes for noting in self._noting.values())
        if not self._ranks.several:
            return seen
        on_any = torch.tensor(float(seen), device=self._device)
        dist.all_reduce(on_any, dist.ReduceOp.MAX, self._ranks.process_group)
        return bool(on_any)

    def _told_by_the_first(self, times: list[Measured]) -> list[Measured]:
        """Ranks whose layers differ would train apart."""
        if not self._ranks.several:
            return times
        told: list[Any] = [times]
        group = self._ranks.process_group
        first = 0 if group is None else dist.get_global_rank(group, 0)
        dist.broadcast_object_list(told, src=first, group=group)
        return list(told[0])

    def _decide(self, times: dict[Linear, Measured]) -> None:
        self._unfit_layers()
        self._times = times
        for module, found in times.items():
            name = self._name(module)
            self._choices[module] = Choice(name=name, fp8=bool(found.recipe), why=found.why, recipe=found.recipe or "")
        self._make({module: self._fp8.by(found.recipe) for module, found in times.items() if found.recipe})
        self._changed()

    # What is lost

    def sample(self) -> None:
        """Count, in the next step, what the operands of its layers hold."""
        if self._noting:
            raise BadInput("sample_fp8(): the layers are still to be measured, in the next step. Ask after it.")
        self.plain = True
        self._samples = {}
        self._fit_layers()

    def report(self) -> NarrowLayers:
        """What is known of each layer's operands. Waits for the device."""
        layers = {self._name(module): fp8 for module, fp8 in self._recipes.items()}
        return narrow_layers(layers, self._samples, self._scales, self._steps)

    def findings(self) -> list[Finding]:
        return findings_of(self.report())

    # State

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._times:
            found["measured"] = {self._name(module): [each.recipe, each.why] for module, each in self._times.items()}
        if self._scales is not None:
            found["delayed"] = self._scales.state()
        return found

    def load(self, state: Mapping[str, Any]) -> None:
        if self._open and state.get("measured"):
            self._load_measured(state["measured"])
        if self._scales is not None:
            self._load_delayed(self._scales, state.get("delayed"))

    def _load_measured(self, decided: Mapping[str, Sequence[Any]]) -> None:
        """Unless a layer is new: then all are measured, in the next step."""
        found = {module: decided.get(self._name(module)) for module in self._open}
        times = {module: Measured(recipe=told[0], why=told[1]) for module, told in found.items() if told}
        if len(times) == len(found) and times != self._times:
            self._decide(times)

    def _load_delayed(self, scales: Scales, state: Mapping[str, Any] | None) -> None:
        """A state from before there were any begins them anew."""
        if state:
            scales.load(state)
        else:
            scales.clear()
        self._followed = 0
        self._go_by(scales)

    def _name(self, module: Linear) -> str:
        return self._choices[module].name

    @property
    def layers(self) -> list[str]:
        """The names of those in FP8."""
        return [choice.name for module, choice in self._choices.items() if choice.fp8 and module not in self._noting]


def _refuse_missing(fp8: Fp8, device: torch.device) -> None:
    """A backend that was asked for by name, to be measured."""
    try:
        candidates(fp8, device)
    except (MissingDependency, PrecisionUnavailable) as error:
        raise type(error)(f"Fp8({MEASURED!r}, backend={fp8.backend!r}) takes {error}") from error


def _refuse_none(found: Mapping[Linear, Choice], fp8: Fp8) -> None:
    """Nothing would run in FP8, and nobody has said so: neither by the policy, nor by Fp8, nor by measuring."""
    if any(choice.fp8 or choice.is_asked for choice in found.values()) or fp8.recipe == MEASURED:
        return
    if not found:
        raise BadInput("Engine(precision='fp8'): the model has no linear layer, which is what FP8 is for. Use 'bf16'.")
    shown = "; ".join(f"{choice.name or 'the model itself'}: {choice.why}" for choice in [*found.values()][:NAMED])
    more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
    raise BadInput(
        f"Engine(precision='fp8'): no linear layer of this model becomes FP8 ({shown}{more}). Use precision='bf16', or "
        'ask for layers by name: fp8=ampwise.Fp8(narrow=("blocks.*",)).'
    )
