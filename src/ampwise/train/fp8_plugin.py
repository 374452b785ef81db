"""``precision="fp8"``: linear layers whose matmuls run in FP8; everything else runs in BF16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Linear, Module, ModuleList

from ampwise.errors import BadInput, MissingDependency, PrecisionUnavailable
from ampwise.finding import Finding
from ampwise.finding.registry import run_checks
from ampwise.numbers.emulation.eager_mode import run_eagerly
from ampwise.train.float8.auto_choice import DECIDE_AFTER, choose_matmuls, has_errors
from ampwise.train.float8.backends import is_delayed, make_forward, refuse_wrong_kernels
from ampwise.train.float8.delayed_scaling import DelayedScales
from ampwise.train.float8.kept_weights import KeptWeights
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
from ampwise.train.float8.layer_forward import Fp8Forward, ShapeRecorder, install_forward, remove_forward
from ampwise.train.float8.layer_stats import Float8LayerStats
from ampwise.train.float8.matmul_choices import Fp8Choices, MatmulChoice
from ampwise.train.float8.matmul_errors import ProbingForward, empty_sums, relative_errors
from ampwise.train.float8.operand_census import CountingForward, OperandCensuses, report_layers
from ampwise.train.float8.recipe import AUTO, MATMULS, MEASURED, OURS, Fp8
from ampwise.train.float8.recipe_timing import (
    LayerShapes,
    LayerTimes,
    TimedRecipe,
    candidate_recipes,
    time_layers,
    time_recipes,
)
from ampwise.train.precision.contexts import NO_CONTEXT
from ampwise.train.precision.policy import Policy
from ampwise.train.precision_plugin import PrecisionPlugin
from ampwise.train.ranks import Ranks

__all__ = ["Fp8Plugin"]

NAMED = 3  # layers in a message
PATIENCE = 8  # steps to wait until a layer that is to be timed is used
UNUSED = TimedRecipe(recipe=None, why="not used in the step that was measured, or in FP32 only")
UNDECIDED = (MEASURED, AUTO)  # recipes that stand for others, which are chosen while the model trains


class Fp8Plugin(PrecisionPlugin):
    """Runs a model's linear layers in FP8, by one recipe for all or, with "measured", by the fastest for each.

    With "auto" the matmuls of each layer are chosen, by their times and their errors. Times are measured once, errors
    in a few later steps too, which run in BF16: the first step has shown that it fits into memory.

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
        self._fp8, self._device, self._graphed, self._models = asked or Fp8(), device, graphed, models
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
        self._open = [module for module, choice in self._choices.items() if choice.recipe in UNDECIDED]
        self._auto = _AutoState(self._fp8, [self._name(each) for each in self._open], device)
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
                raise type(error)(f"Fp8({self._fp8.recipe!r}, backend={self._fp8.backend!r}) takes {error}") from error
        self._make({each: self._fp8 for each, choice in self._choices.items() if choice.recipe == self._fp8.recipe})

    def _make(self, recipes: Mapping[Linear, Fp8]) -> None:
        """Create the layers' FP8 forwards without installing them; layers still to be timed have no recipe yet."""
        recipes = {module: fp8 for module, fp8 in recipes.items() if fp8.recipe not in UNDECIDED}
        for fp8 in {fp8 for fp8 in recipes.values() if fp8.made_by == OURS}:
            refuse_wrong_kernels(fp8, self._device)
        delayed = [module for module, fp8 in recipes.items() if is_delayed(fp8)]
        names = [self._choices[module].name for module in delayed]
        self._scales = DelayedScales(names, self._fp8, self._device) if delayed else None
        self._recipes = recipes
        self._layers = {module: make_forward(module, fp8) for module, fp8 in recipes.items()}
        self._kept: KeptWeights | None = None  # made when a step has several micro-batches
        self._delayed = delayed  # in the order of the scales
        self._known = [False] * len(delayed)  # whether the scales have magnitudes for each layer
        self._followed = 0  # steps since then, or since a state was loaded

    # Install and uninstall

    def install(self) -> None:
        CHOICES_IN_USE.update(self._choices)
        if self._open and not self._times:
            self._noting = {module: ShapeRecorder() for module in self._open}
            for module, noting in self._noting.items():
                install_forward(module, self._probed(module, noting))
            self.bypass_graphs = self._is_auto
        for module in self._prepared:
            (use_fp8_forward if self._choices[module].fp8 else use_linear_forward)(module)
        self._fit_layers()

    def _fit_layers(self) -> None:
        for module in self._open if self._is_auto and not self._noting else ():
            remove_forward(module)
            if self._auto.probing:
                install_forward(module, self._probed(module, ShapeRecorder()))
        for module, how in () if self._auto.probing else self._layers.items():
            if self.bypass_graphs:
                how = CountingForward(how, self._recipes[module], self._samples.setdefault(self._name(module), {}))
            slot = scales = None
            if self._scales is not None and module in self._delayed:
                place = self._delayed.index(module)
                slot = self._scales.slots[place]
                scales = self._scales.values[place] if self._known[place] else None
            install_forward(module, how, slot, scales)

    @property
    def _is_auto(self) -> bool:
        return self._fp8.recipe == AUTO

    def _probed(self, module: Linear, how: Fp8Forward) -> Fp8Forward:
        """Return a forward that also measures errors for "auto", and counts operands."""
        if not self._is_auto:
            return how
        name = self._name(module)
        probing = ProbingForward(how, self._auto.sums_of(name), e5m2=self._fp8.gradients == "e5m2")
        return CountingForward(probing, self._fp8.by("current"), self._samples.setdefault(name, {}))

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

    @contextmanager
    def micro_batch_context(self, *, first: bool) -> Iterator[None]:
        """Cast weights in the first micro-batch of a step only, where scales are current ones."""
        if self._kept is None:
            current = {module: how for module, how in self._layers.items() if self._recipes[module].recipe == "current"}
            self._kept = KeptWeights(current, self._models)
        with self._kept.used(first=first) as elsewhere:
            self.graph_version += elsewhere
            yield

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
        was_sampled, self.bypass_graphs = self.bypass_graphs, False
        if self._noting:
            # Time them once some layer was used on some rank, or the wait for one is over.
            seen = self._steps >= PATIENCE or any(noting.shapes for noting in self._noting.values())
            if self._ranks.several:
                on_any = torch.tensor(float(seen), device=self._device)
                dist.all_reduce(on_any, dist.ReduceOp.MAX, self._ranks.process_group)
                seen = bool(on_any)
            if seen:
                self._measure()
            self.bypass_graphs = self._is_auto and bool(self._noting)
        elif self._auto.probing:
            self._decide_again()
        if was_sampled and not self._auto.probing:
            self._fit_layers()  # the same forwards as before, so that captured graphs stay valid
        self._probe_if_due()

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
        if self._is_auto and not (self._auto.read(self._ranks) or self._steps >= PATIENCE):
            return  # a skipped step
        used = {module: noting for module, noting in self._noting.items() if noting.shapes}
        shapes: LayerShapes = {module: max(noting.shapes, key=lambda each: each[0]) for module, noting in used.items()}
        compiled = any(noting.compiled for noting in used.values())
        self._unfit_layers()
        settings: dict[str, Any] = {"compiled": compiled, "graphed": self._graphed}
        try:
            if self._is_auto:
                recipes = candidate_recipes(self._fp8, self._device)
                layers = time_layers(shapes, recipes, self._device, **settings)
                self._auto.times = self._as_the_first_rank({self._name(each): layers[each] for each in layers})
                self._decide(self._chosen(self._steps))
                return
            found = time_recipes(shapes, self._fp8, self._device, **settings)
        except BaseException:
            self.install()  # time them after the next step instead
            raise
        times = self._as_the_first_rank([found.get(module, UNUSED) for module in self._open])
        self._decide(dict(zip(self._open, times, strict=True)))

    def _as_the_first_rank(self, found: Any) -> Any:
        """Return the first rank's value: all ranks must choose the same recipes."""
        if not self._ranks.several:
            return found
        told = [found]
        group = self._ranks.process_group
        first = 0 if group is None else dist.get_global_rank(group, 0)
        dist.broadcast_object_list(told, src=first, group=group)
        return told[0]

    def _decide(self, times: dict[Linear, TimedRecipe]) -> None:
        self._unfit_layers()
        self._times = times
        for module, found in times.items():
            name = self._name(module)
            self._choices[module] = LayerChoice(
                name=name, fp8=bool(found.recipe), why=found.why, recipe=found.recipe or ""
            )
        self._make(
            {module: self._fp8.by(found.recipe, found.matmuls) for module, found in times.items() if found.recipe}
        )
        self._changed()

    # Deciding again, with "auto"

    def _probe_if_due(self) -> None:
        """Measure the errors of all layers in the next step, if it is one after which to decide."""
        if self._is_auto and self._times and self._steps + 1 in DECIDE_AFTER:
            self._auto.start()
            self.bypass_graphs, self._samples = True, {}
            self._fit_layers()

    def _decide_again(self) -> None:
        if not self._auto.read(self._ranks) and self._auto.tries < PATIENCE:
            self.bypass_graphs = True  # a skipped step: measure in the next
            return
        self._auto.probing = False
        times = self._chosen(self._steps)
        if any(
            times[each].matmuls != now.matmuls or times[each].recipe != now.recipe for each, now in self._times.items()
        ):
            self._decide(times)

    def _chosen(self, step: int) -> dict[Linear, TimedRecipe]:
        """Choose by the current times and errors; a layer that could not be timed stays in BF16."""
        choices = self._auto.choose(step, self._samples)
        found = {}
        for module in self._open:
            choice = choices.get(self._name(module))
            if choice is None:
                found[module] = UNUSED
            else:
                recipe = "current" if choice.matmuls else None
                matmuls = choice.matmuls or MATMULS
                found[module] = TimedRecipe(recipe=recipe, why=choice.why(self._fp8.limit), matmuls=matmuls)
        return found

    def choices(self) -> Fp8Choices:
        """Return what "auto" has decided."""
        if not self._is_auto:
            raise BadInput(
                f"fp8_choices(): Fp8({self._fp8.recipe!r}) does not choose matmuls; Fp8('auto') does. "
                "engine.policy.describe(model) shows the layers."
            )
        return self._auto.choices

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
        if self._is_auto and self._times:
            found["auto"] = {"steps": self._steps, **self._auto.state()}
        elif self._times:
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
        if self._is_auto and state.get("auto") and self._auto.load(state["auto"]):
            self._steps = state["auto"]["steps"]
            if self._auto.probing or self._noting:  # for a step of another state
                self._auto.probing = self.bypass_graphs = False
                self._fit_layers()
            times = self._chosen(state["auto"]["decided_after"])
            if times != self._times:
                self._decide(times)
            self._probe_if_due()
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


class _AutoState:
    """What "auto" knows of its layers, by name: times, errors, and what follows from them."""

    def __init__(self, fp8: Fp8, names: Sequence[str], device: torch.device) -> None:
        self._limit, self._names = fp8.limit, list(names)
        self._sums = empty_sums(len(names), device)
        self.probing = False  # whether the current step measures errors again
        self.tries = 0  # steps that have tried to
        self.times: dict[str, LayerTimes] = {}
        self.errors: dict[str, list[float | None]] = {name: [None] * len(MATMULS) for name in names}
        self.choices = Fp8Choices(limit=self._limit, decided_after=None, layers=())

    def sums_of(self, name: str) -> torch.Tensor:
        return self._sums[self._names.index(name)]

    def start(self) -> None:
        self.probing, self.tries = True, 0
        self._sums.zero_()

    def read(self, ranks: Ranks) -> bool:
        """Read the errors of the step, and start anew; False if they are not finite. Syncs with the device."""
        self.tries += 1
        if ranks.several:
            dist.all_reduce(self._sums, dist.ReduceOp.SUM, ranks.process_group)
        found = relative_errors(self._sums)
        self._sums.zero_()
        if not has_errors(found):
            return False
        for name, errors in zip(self._names, found, strict=True):
            known = zip(errors, self.errors[name], strict=True)  # of a layer that was not used: as before
            self.errors[name] = [old if new is None else new for new, old in known]
        return True

    def choose(self, step: int, samples: Mapping[str, OperandCensuses]) -> dict[str, MatmulChoice]:
        found = choose_matmuls(self.times, self.errors, self._limit, samples)
        self.choices = Fp8Choices(limit=self._limit, decided_after=step, layers=tuple(found.values()))
        return found

    def state(self) -> dict[str, Any]:
        shared = list({id(each): each for each in self.times.values()}.values())  # by layers of one shape
        places = {id(each): place for place, each in enumerate(shared)}
        return {
            "decided_after": self.choices.decided_after,
            "times": [
                {"shape": each.shape, "times": dict(each.times), "failed": dict(each.failed), "trouble": each.trouble}
                for each in shared
            ],
            "layers": {name: places[id(each)] for name, each in self.times.items()},
            "errors": {name: list(errors) for name, errors in self.errors.items()},
        }

    def load(self, state: Mapping[str, Any]) -> bool:
        """Load saved times and errors, if they are those of these layers."""
        if set(self._names) != set(state["errors"]):
            return False
        shared = [LayerTimes(**each) for each in state["times"]]
        self.times = {name: shared[place] for name, place in state["layers"].items()}
        self.errors = {name: list(errors) for name, errors in state["errors"].items()}
        return True


def _refuse_none(found: Mapping[Linear, LayerChoice], fp8: Fp8) -> None:
    """Raise if no layer would run in FP8, unless the policy, ``Fp8`` or "measured" asked for that."""
    if any(choice.fp8 or choice.is_asked for choice in found.values()) or fp8.recipe in UNDECIDED:
        return
    if not found:
        raise BadInput("Engine(precision='fp8'): the model has no linear layer, and FP8 is only for those. Use 'bf16'.")
    shown = "; ".join(f"{choice.name or 'the model itself'}: {choice.why}" for choice in [*found.values()][:NAMED])
    more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
    raise BadInput(
        f"Engine(precision='fp8'): no linear layer of this model can run in FP8 ({shown}{more}). Use precision='bf16', "
        'or request layers by name: precision=ampwise.Fp8(narrow=("blocks.*",)).'
    )
