"""The precisions that are compared, each as a contender on the shared model, and why the others are left out.

One that fails drops out and does not stop the rest.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampwise.errors import AmpwiseError, BadInput, PrecisionUnavailable, UnknownName
from ampwise.hardware.torch_info import read_device
from ampwise.trace.user_code import describe_error
from ampwise.train.float8.backends import make_forward, refuse_wrong_kernels
from ampwise.train.float8.layer_choice import choose_layers
from ampwise.train.float8.layer_forward import install_forward, remove_forward
from ampwise.train.float8.recipe import Fp8
from ampwise.train.precision.names import RIGHT_NAMES
from ampwise.train.precision.policy import Policy
from ampwise.train.precision.precision import PRECISIONS, DevicePrecisions
from ampwise.tune.bench.speeds import BASE, PrecisionRow
from ampwise.tune.train_case import TrainCase, TrainingStep
from ampwise.watch.time_use import HALVES

T = TypeVar("T")
PlannedRow = tuple[str, bool]  # a precision to measure, and whether compiled
Context = Callable[[], AbstractContextManager[object]]

FP8 = "fp8"
NAMES = (*PRECISIONS, FP8)
RECIPE = Fp8()
OUT_OF_MEMORY = "out of memory"
# Torch's error, by its name now and in 2.6: importing it takes a second.
GAVE_UP = ("FailOnRecompileLimitHit", "FailOnCacheLimitHit")
# Messages of allocators that raise no OutOfMemoryError.
NO_MEMORY = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")


# --- which precisions -----------------------------------------------------------------------------------------------


def checked_names(asked: Iterable[str]) -> list[str]:
    """Return the precisions by name, each once.

    >>> checked_names(["bf16", "fp16", "bf16"])
    ['bf16', 'fp16']
    """
    if isinstance(asked, str):
        raise BadInput(f"bench: precisions={asked!r}: expected a list of names, such as ['fp32', 'bf16'].")
    names = list(dict.fromkeys(asked))
    for name in names:
        if name not in NAMES:
            right = RIGHT_NAMES.get(str(name).lower().removeprefix("torch."))
            hint = f"Did you mean {right!r}? " if right else ""
            listing = f"{hint}The precisions are {', '.join(NAMES)}."
            raise UnknownName("precision", str(name), () if right else NAMES, listing=listing)
    if not names:
        raise BadInput(f"bench: no precisions given. The precisions are {', '.join(NAMES)}.")
    return names


def make_plan(
    asked: Sequence[str] | None, facts: DevicePrecisions, device: torch.device, *, compiled: bool
) -> tuple[list[PlannedRow], list[PrecisionRow]]:
    """Return what to measure, FP32 first, as it is the baseline, and a row for each precision that cannot run."""
    wanted = [name for name in PRECISIONS if name in facts.runs] if asked is None else asked
    lacks = {**facts.lacks, FP8: why_no_float8(device) if FP8 in wanted else None}
    missing = {name: why for name in wanted if (why := lacks.get(name))}
    chosen = [BASE, *(name for name in NAMES if name in wanted and name not in missing and name != BASE)]
    if len(chosen) == 1 and missing:
        raise PrecisionUnavailable(
            f"bench: none of {', '.join(wanted)} runs here, so fp32 has no counterpart: {' '.join(missing.values())}"
        )
    entries = [(name, each) for each in ((False, True) if compiled else (False,)) for name in chosen]
    return entries, [PrecisionRow(precision=name, problem=f"not run: {why}") for name, why in missing.items()]


def why_no_float8(device: torch.device) -> str | None:
    """Return why this device has no FP8, as a sentence; None if it has."""
    if device.type != "cuda":
        return f"{device.type} has no FP8 tensor cores."
    found = read_device(torch, torch.cuda.current_device() if device.index is None else device.index)
    if not found.has_tensor_cores(FP8):
        return f"{found.name} has no FP8 tensor cores."
    return None


# --- contenders -----------------------------------------------------------------------------------------------------


class Contender:
    """Train steps in one precision, taking turns with others that share the model and optimizer."""

    def __init__(
        self, precision: str, compiled: bool, step: TrainingStep, around: Sequence[Context] = (), again: str = ""
    ) -> None:
        self.precision, self.compiled, self.step = precision, compiled, step
        self.label = PrecisionRow(precision=precision, compiled=compiled).label + again
        self.problem: str | None = None  # why it dropped out; None while it takes part
        self.found: dict[str, Any] = {}  # what was measured: fields of its PrecisionRow
        self._around = around  # contexts that set up the model for a turn
        self._counts = True
        self.forget_steps()

    @property
    def is_base(self) -> bool:
        """Whether the others are compared with this one."""
        return self.label == BASE

    @property
    def skipped(self) -> int:
        """Count the steps without an update, because the scaler found gradients that are not finite. Syncs the device.

        A fused optimizer is called even then, and reads the scaler's flag itself.
        """
        return self._calls - self._updates + sum(float(found) > 0 for found in self._found)

    def again(self) -> Contender:
        """Return a second contender that repeats this one, to measure the noise between two equal runs."""
        return Contender(self.precision, self.compiled, self.step, self._around, " again")

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Set up the model for this contender while inside."""
        with ExitStack() as stack:
            stack.callback(self.step.optimizer.register_step_post_hook(self._updated).remove)
            for context in self._around:
                stack.enter_context(context())
            if self.compiled:
                # By default, torch.compile goes on uncompiled at its recompile limit, and the row would be wrong.
                import torch._dynamo

                config: Any = torch._dynamo.config
                names = ("fail_on_recompile_limit_hit", "fail_on_cache_limit_hit")
                stack.enter_context(config.patch({next(name for name in names if hasattr(config, name)): True}))
            yield

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Return the result of the work, done in a turn; on failure, drop out and return None.

        Raise BadInput if FP32 fails for another reason than memory.
        """
        value, problem = self.run(work)
        if problem is not None:
            if self.is_base and problem != OUT_OF_MEMORY:
                raise BadInput(f"{self.step.case.name}: a step in FP32 fails: {problem}.")
            self.problem = problem if problem == OUT_OF_MEMORY else f"failed: {problem}"
        return value

    def run(self, work: Callable[[], T]) -> tuple[T | None, str | None]:
        """Return the result of the work, done in a turn, or why it failed."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the user's code would repeat its warnings for every precision
                with self.turn():
                    return work(), None
        except AmpwiseError:
            raise
        except Exception as error:
            is_full = any(text in str(error) for text in NO_MEMORY)
            if type(error).__name__ in GAVE_UP:
                problem = "torch.compile reached its recompile limit and would go on without compiling"
            elif is_full or isinstance(error, torch.OutOfMemoryError | MemoryError):
                problem = OUT_OF_MEMORY
            else:
                problem = describe_error(error)
        # Outside the handler, as the error holds tensors of the frames it went through.
        self.step.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.step.case.device.type == "cuda":
            torch.cuda.empty_cache()
        return None, problem

    def __call__(self) -> Tensor:
        self._calls += 1
        return self.step()

    def uncounted(self) -> Tensor:
        """Run a step that is neither counted nor timed."""
        self._counts = False
        try:
            return self.step()
        finally:
            self._counts = True

    def forget_steps(self) -> None:
        """Start counting from here: while the loss scale settles, skipped steps are normal."""
        self._calls = self._updates = 0
        self._found: list[Tensor] = []

    def _updated(self, optimizer: Optimizer, *_: object) -> None:
        if self._counts:
            self._updates += 1
            found = getattr(optimizer, "found_inf", None)  # torch's scaler sets it on a fused optimizer
            self._found += [] if found is None else [found.detach()]


def taking_part(contenders: Iterable[Contender]) -> list[Contender]:
    """Return the contenders that have not dropped out."""
    return [contender for contender in contenders if contender.problem is None]


def make_contenders(
    entries: Iterable[PlannedRow],
    case: TrainCase,
    optimizer: Optimizer,
    *,
    clip_norm: float | None,
    kept: Sequence[str] = (),
) -> list[Contender]:
    """Make a contender for each entry; ``kept`` are patterns of modules that 16-bit precisions run in FP32."""
    made = []
    for precision, compiled in entries:
        policy = Policy("bf16" if precision == FP8 else precision)  # with FP8, for the other layers
        if kept and precision in HALVES:
            policy = policy.keep(BASE, *kept)
            policy.modules(case.model)  # report a pattern that matches nothing now, not halfway through
        step = TrainingStep(case, policy, optimizer, clip_norm=clip_norm, compiled=compiled)
        around = [step.in_place] if precision != FP8 else [float8_layers(case.model), step.in_place]
        made.append(Contender(precision, compiled, step, around))
    return made


def float8_layers(model: nn.Module) -> Context:
    """Return a context in which linear layers run in FP8, as by ``Engine(precision="fp8")`` with its default recipe."""
    found = choose_layers(model, {}, RECIPE)
    for device in {module.weight.device for module in found}:
        refuse_wrong_kernels(RECIPE, device)
    forwards = {
        module: make_forward(module, RECIPE) for module, choice in found.items() if choice.recipe == RECIPE.recipe
    }
    if not forwards:
        why = next((f": {choice.name or 'the model itself'}: {choice.why}" for choice in found.values()), "")
        raise BadInput(f"fp8: no linear layer of this model can run in FP8{why}. Leave fp8 out of the comparison.")

    @contextmanager
    def installed() -> Iterator[None]:
        for module, forward in forwards.items():
            install_forward(module, forward)
        try:
            yield
        finally:
            for module in forwards:
                remove_forward(module)

    return installed
