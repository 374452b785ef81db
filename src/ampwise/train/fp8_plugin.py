"""``precision="fp8"``: linear layers whose matmuls run in FP8; everything else runs in BF16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Linear, Module, ModuleList

from ampwise.errors import BadInput, MissingDependency, PrecisionUnavailable
from ampwise.finding import Finding
from ampwise.finding.registry import run_checks
from ampwise.numbers.emulation.eager_mode import run_eagerly
from ampwise.train.float8.backends import is_delayed, make_forward, refuse_wrong_kernels
from ampwise.train.float8.delayed_scaling import DelayedScales
from ampwise.train.float8.layer_choice import (
    CHOICES_IN_USE,
    GATHERED_IN_FP8,
    LayerChoice,
    choose_layers,
    gathers_in_fp8,
    is_prepared,
    use_fp8_forward,
    use_linear_forward,
)
from ampwise.train.float8.layer_forward import ShapeRecorder, install_forward, remove_forward
from ampwise.train.float8.layer_stats import Float8LayerStats
from ampwise.train.float8.operand_census import CountingForward, OperandCensuses, report_layers
from ampwise.train.float8.recipe import MEASURED, OURS, Fp8
from ampwise.train.float8.recipe_timing import LayerShapes, TimedRecipe, candidate_recipes, time_recipes
from ampwise.train.precision.contexts import NO_CONTEXT
from ampwise.train.precision.policy import Policy
from ampwise.train.precision_plugin import PrecisionPlugin
from ampwise.train.ranks import Ranks

__all__ = ["Fp8Plugin"]

NAMED = 3  # layers in a message
PATIENCE = 8  # steps to wait until a layer that is to be timed is used
UNUSED = TimedRecipe(recipe=None, why="not used in the step that was measured, or in FP32 only")


class Fp8Plugin(PrecisionPlugin):
    """Runs a model's linear layers in FP8, by one recipe for all or, with "measured", by the fastest for each.

    The first step runs without torch.compile if it must provide data: input shapes for timing, or magnitudes for
    delayed scaling. The model is then compiled once, in its final form.
    """

    def __init__(
        self,
        models: Sequence[Module],
        policy: Policy,
        asked: Fp8 | None,
        device: torch.device,
        *,
        graphed: bool = False,
    ) -> None:
        self._fp8, self._device, self._graphed = asked or Fp8(), device, graphed
        if torch.version.hip is not None:
            raise PrecisionUnavailable("Engine(precision='fp8') needs an NVIDIA GPU. On AMD, use precision='bf16'.")
        self._ranks = Ranks(models)
        whole = models[0] if len(models) == 1 else ModuleList(models)
        self._choices = choose_layers(whole, policy.patterns(whole), self._fp8)
        _refuse_none(self._choices, self._fp8)
        self._prepared = [module for module in self._choices if is_prepared(module)]
        for module in self._prepared:
            choice = self._choices[module]
            if not choice.fp8 and gathers_in_fp8(module):
                raise BadInput(f"Engine(precision='fp8'): {choice.name} is {choice.why}, but {GATHERED_IN_FP8}")
        self._open = [module for module, choice in self._choices.items() if choice.recipe == MEASURED]
        self._noting: dict[Linear, ShapeRecorder] = {}  # while input shapes are being recorded
        self._times: dict[Linear, TimedRecipe] = {}
        self._samples: dict[str, OperandCensuses] = {}  # by layer
        self._steps = 0
        self.graph_version = 0
        self.bypass_graphs = False
        # Now, so that a missing dependency is reported before anything has changed.
        if self._open:
            try:
                candidate_recipes(self._fp8, device)
            except (MissingDependency, PrecisionUnavailable) as error:
                raise type(error)(f"Fp8({MEASURED!r}, backend={self._fp8.backend!r}) takes {error}") from error
        self._make({each: self._fp8 for each, choice in self._choices.items() if choice.recipe == self._fp8.recipe})

    def _make(self, recipes: Mapping[Linear, Fp8]) -> None:
        """Create the layers' FP8 forwards without installing them; layers still to be timed have no recipe yet."""
        recipes = {module: fp8 for module, fp8 in recipes.items() if fp8.recipe != MEASURED}
        for fp8 in {fp8 for fp8 in recipes.values() if fp8.made_by == OURS}:
            refuse_wrong_kernels(fp8, self._device)
        delayed = [module for module, fp8 in recipes.items() if is_delayed(fp8)]
        names = [self._choices[module].name for module in delayed]
        self._scales = DelayedScales(names, self._fp8, self._device) if delayed else None
        self._recipes = recipes
        self._layers = {module: make_forward(module, fp8) for module, fp8 in recipes.items()}
        self._delayed = delayed  # in the order of the scales
        self._known = [False] * len(delayed)  # whether the scales have magnitudes for each layer
        self._followed = 0  # steps since then, or since a state was loaded

    # Install and uninstall

    def install(self) -> None:
        CHOICES_IN_USE.update(self._choices)
        if self._open and not self._times:
            self._noting = {module: ShapeRecorder() for module in self._open}
            for module, noting in self._noting.items():
                install_forward(module, noting)
        for module in self._prepared:
            (use_fp8_forward if self._choices[module].fp8 else use_linear_forward)(module)
        self._fit_layers()

    def _fit_layers(self) -> None:
        for module, how in self._layers.items():
            if self.bypass_graphs:
                how = CountingForward(how, self._recipes[module], self._samples.setdefault(self._name(module), {}))
            slot = scales = None
            if self._scales is not None and module in self._delayed:
                place = self._delayed.index(module)
                slot = self._scales.slots[place]
                scales = self._scales.values[place] if self._known[place] else None
            install_forward(module, how, slot, scales)

    def uninstall(self) -> None:
        self._unfit_layers()
        for module in self._prepared:
            use_linear_forward(module)

    @property
    def locked_because(self) -> str:
        names = [self._name(module) for module in self._prepared if gathers_in_fp8(module)]
        return f"not with {names[0]}: {GATHERED_IN_FP8}" if names else ""

    def _unfit_layers(self) -> None:
        self._noting = {}
        for module in self._choices:
            CHOICES_IN_USE.pop(module, None)
            remove_forward(module)

    # During training

    def pass_context(self) -> AbstractContextManager[Any]:
        learns = self._noting or self.bypass_graphs or (self._delayed and not any(self._known))
        return run_eagerly() if learns else NO_CONTEXT

    def step_ended(self) -> None:
        """Update the scales. Syncs only in the first steps, which provide data, and after a sampled step."""
        self._steps += 1
        if self._scales is not None:
            self._scales.update(self._ranks.process_group, together=self._ranks.several)
            self._followed += 1
            # After 1, 2, 4, 8 … steps: a layer may be used late, or never.
            if not all(self._known) and self._followed & (self._followed - 1) == 0:
                self._go_by(self._scales)
        if self._noting:
            # Time them once some layer was used on some rank, or the wait for one is over.
            seen = self._steps >= PATIENCE or any(noting.shapes for noting in self._noting.values())
            if self._ranks.several:
                on_any = torch.tensor(float(seen), device=self._device)
                dist.all_reduce(on_any, dist.ReduceOp.MAX, self._ranks.process_group)
                seen = bool(on_any)
            if seen:
                self._measure()
        if self.bypass_graphs:
            self.bypass_graphs = False
            self._fit_layers()  # the same forwards as before, so that captured graphs stay valid

    def _go_by(self, scales: DelayedScales) -> None:
        """Switch layers to delayed scaling once their magnitudes are known; until then they use current scaling."""
        before, self._known = self._known, scales.known()
        if self._known != before:
            self._changed()

    def _changed(self) -> None:
        """Reinstall the layers in their current form."""
        self._unfit_layers()
        self.install()
        self.graph_version += 1

    # Timing

    def _measure(self) -> None:
        used = {module: noting for module, noting in self._noting.items() if noting.shapes}
        shapes: LayerShapes = {module: max(noting.shapes, key=lambda each: each[0]) for module, noting in used.items()}
        compiled = any(noting.compiled for noting in used.values())
        self._unfit_layers()
        try:
            found = time_recipes(shapes, self._fp8, self._device, compiled=compiled, graphed=self._graphed)
        except BaseException:
            self.install()  # time them after the next step instead
            raise
        times = [found.get(module, UNUSED) for module in self._open]
        if self._ranks.several:  # all ranks must choose the same recipes: those of the first
            told: list[Any] = [times]
            group = self._ranks.process_group
            first = 0 if group is None else dist.get_global_rank(group, 0)
            dist.broadcast_object_list(told, src=first, group=group)
            times = list(told[0])
        self._decide(dict(zip(self._open, times, strict=True)))

    def _decide(self, times: dict[Linear, TimedRecipe]) -> None:
        self._unfit_layers()
        self._times = times
        for module, found in times.items():
            name = self._name(module)
            self._choices[module] = LayerChoice(
                name=name, fp8=bool(found.recipe), why=found.why, recipe=found.recipe or ""
            )
        self._make({module: self._fp8.by(found.recipe) for module, found in times.items() if found.recipe})
        self._changed()

    # Report

    def sample(self) -> None:
        """Count the operands of the layers in the next step."""
        if self._noting:
            raise BadInput("sample_fp8(): the layers are timed in the next step. Call it after that step.")
        self.bypass_graphs = True
        self._samples = {}
        self._fit_layers()

    def report(self) -> Float8LayerStats:
        """Return what is known about each layer's operands. Syncs with the device."""
        layers = {self._name(module): fp8 for module, fp8 in self._recipes.items()}
        return report_layers(layers, self._samples, self._scales, self._steps)

    def findings(self) -> list[Finding]:
        return run_checks(self.report())

    # State

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._times:
            found["measured"] = {self._name(module): [each.recipe, each.why] for module, each in self._times.items()}
        if self._scales is not None:
            found["delayed"] = self._scales.state()
        return found

    def load(self, state: Mapping[str, Any]) -> None:
        """Load saved choices and scales. If a layer is new, all are timed again; a state without scales resets them."""
        decided = state.get("measured")
        if self._open and decided:
            found = {module: decided.get(self._name(module)) for module in self._open}
            times = {module: TimedRecipe(recipe=told[0], why=told[1]) for module, told in found.items() if told}
            if len(times) == len(found) and times != self._times:
                self._decide(times)
        if self._scales is not None:
            if state.get("delayed"):
                self._scales.load(state["delayed"])
            else:
                self._scales.clear()
            self._followed = 0
            self._go_by(self._scales)

    def _name(self, module: Linear) -> str:
        return self._choices[module].name

    @property
    def layers(self) -> list[str]:
        """Names of the layers that run in FP8."""
        return [choice.name for module, choice in self._choices.items() if choice.fp8 and module not in self._noting]


def _refuse_none(found: Mapping[Linear, LayerChoice], fp8: Fp8) -> None:
    """Raise if no layer would run in FP8, unless the policy, ``Fp8`` or "measured" asked for that."""
    if any(choice.fp8 or choice.is_asked for choice in found.values()) or fp8.recipe == MEASURED:
        return
    if not found:
        raise BadInput("Engine(precision='fp8'): the model has no linear layer, and FP8 is only for those. Use 'bf16'.")
    shown = "; ".join(f"{choice.name or 'the model itself'}: {choice.why}" for choice in [*found.values()][:NAMED])
    more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
    raise BadInput(
        f"Engine(precision='fp8'): no linear layer of this model can run in FP8 ({shown}{more}). Use precision='bf16', "
        'or request layers by name: precision=ampwise.Fp8(narrow=("blocks.*",)).'
    )
