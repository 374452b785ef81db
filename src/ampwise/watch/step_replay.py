"""Replay bad steps of a watched script: the script's own code from the model's call to the loss, and backward.

Where that code cannot be run on its own, the models' forward calls are replayed alone, and backward from the gradients
that they received; if the models are finite, the result says so. The script must not notice the replay.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.finding.call_site import CallSite
from ampwise.report.formatting import format_bytes
from ampwise.trace.call_arguments import named_tensors
from ampwise.trace.call_site import code_owner, current_line, site_of, stop_stack_search
from ampwise.trace.capsule.saving import MAX_CAPSULES
from ampwise.trace.diagnosis import compiler_failure, diagnose, findings_about, swallowed_in_backward
from ampwise.trace.failure import Failure, Origin
from ampwise.trace.python_state import attributes_restored, muted_output
from ampwise.trace.ranks import CollectiveInReplay, collectives_refused, is_multi_rank
from ampwise.trace.replay import OptimizerPast, Replay, ReplaySettings, ReplayStep, is_compiled, is_finite
from ampwise.train.random_state import restore_random, to_plain_random
from ampwise.watch.batch_draws import BatchDraws
from ampwise.watch.findings import FROM_ANOTHER_RANK
from ampwise.watch.inspection import floats_in, has_fsdp1
from ampwise.watch.loss_code import LossCode, code_between, data_code
from ampwise.watch.model_calls import OUTPUTS, KeptLoss, LossStart, ModelCall, ModelCalls
from ampwise.watch.models import without_hooks
from ampwise.watch.update_replay import KeptUpdate
from ampwise.watch.watched_run import say_on_stderr

__all__ = ["BadStepReplays", "StepToReplay"]

APART = 1000  # steps after which another is replayed, however many there were
MOST_SENTENCES = 8  # they are similar
MOST_FAULTS = 100
COMPILED = "The model is compiled; the eager replay fails too."
MODEL_ALONE = "Only the model was replayed, not the code between its output and the loss."
MEAN = "Fixes were tried on the mean of the model's output, not on the loss."


@dataclass(frozen=True, slots=True)
class StepToReplay:
    """A bad step to replay."""

    number: int
    loss: float | None
    scale: float | None  # None without a scaler
    optimizers: tuple[Optimizer, ...] = ()
    pasts: tuple[OptimizerPast, ...] = ()  # of the optimizers
    raised: bool = False  # torch's anomaly detection has raised an error: a NaN may not have reached any gradient
    draws: BatchDraws | None = None  # the batches of the step

    @property
    def bad_loss(self) -> bool:
        return self.loss is not None and not math.isfinite(self.loss)

    @property
    def may_be_ordinary(self) -> bool:
        """Whether the loss scale alone may explain the step."""
        return self.loss is not None and math.isfinite(self.loss) and (self.scale or 1.0) > 1


class BadStepReplays:
    """Decide which bad steps are replayed, say why others are not, and save them.

    paused: a context in which nothing is watched. capsules: a folder to save steps in; weights: the model's, too;
    quiet: without a line on stderr.
    """

    def __init__(
        self,
        calls: ModelCalls,
        paused: Callable[[], AbstractContextManager[None]],
        failed: Callable[[Exception], None],
        *,
        capsules: Path | None = None,
        weights: bool = True,
        quiet: bool = False,
    ) -> None:
        self._calls, self._paused, self._failed = calls, paused, failed
        self._capsules, self._with_weights, self._quiet = capsules, weights, quiet
        self._saved = 0
        self._counts: Counter[bool] = Counter()
        self._last: dict[bool, int] = {}
        self.draws = BatchDraws()
        self.after_model = False  # a bad step was replayed, and its models are finite
        self.sentences: dict[str, None] = {}  # on steps that were not replayed; in order, each once

    def explain(self, step: StepToReplay) -> list[Finding]:
        """Replay a step while the weights are still those it ran with. Return the findings."""
        if not self._is_due(step):
            return []
        fresh = [call for call in self._calls if self._calls.is_fresh(call)]
        losses = [loss for loss in self._calls.losses if self._calls.is_fresh(loss)]
        if not fresh and not losses:
            if len(self._calls):
                why = "the weights had changed by the time it was known to be bad"
            elif self._calls.too_large:
                why = f"the model's input ({self._calls.too_large / 2**20:.0f} MiB) was too large to keep"
            else:
                why = (
                    "no call of a model was seen; the step is compiled as a whole, or the model is not called as a "
                    "module"
                )
            if not step.may_be_ordinary:
                self._add_sentence(f"Step {step.number} could not be replayed: {why}.")
            return []
        try:
            with self._paused():
                result = _replay(fresh, losses, replace(step, draws=self.draws))
        except Exception as error:  # perhaps the model's own
            self._failed(error)
            what = ": ".join(each for each in (type(error).__name__, str(error).rstrip(".")) if each)
            self._add_sentence(f"Step {step.number} could not be replayed: running the model again failed with {what}.")
            return []
        self.after_model |= result.after_model
        if result.why_not:
            self._add_sentence(result.why_not)
        call = result.call or (fresh[-1] if fresh else None)
        if call is not None and (result.findings or not step.may_be_ordinary):
            return self._save(call, step, result.findings)
        return result.findings

    def explain_update(
        self, update: KeptUpdate, optimizer: Optimizer, number: int, add: Callable[[Finding, int], Any]
    ) -> bool:
        """Replay an update that has spoiled the weights, and add the findings. Return whether there are any."""
        try:
            with self._paused(), muted_output():
                failure = update.diagnose(optimizer, number)
        except Exception as error:  # the optimizer's own
            self._add_sentence(f"The update of step {number} could not be replayed: {type(error).__name__}: {error}.")
            return False
        found = [] if failure is None or failure.not_reproduced else findings_about(failure)
        for finding in found:
            add(finding, number)
        return bool(found)

    def came_too_late(self, step: StepToReplay) -> None:
        """Note that a step was found to be bad only after its weights had changed."""
        if self._is_due(step):
            self._add_sentence(
                f"Step {step.number} could not be replayed: it was not skipped, and the weights had changed by the "
                "time it was known to be bad."
            )

    def _is_due(self, step: StepToReplay) -> bool:
        """Return whether to replay the step: the 1st, 2nd, 4th ... Those a loss scale may explain count separately."""
        kind = step.may_be_ordinary
        self._counts[kind] += 1
        due = self._counts[kind].bit_count() == 1 or step.number - self._last.get(kind, 0) >= APART
        if due:
            self._last[kind] = step.number
        return due

    def _add_sentence(self, sentence: str) -> None:
        if len(self.sentences) < MOST_SENTENCES:
            self.sentences[" ".join(sentence.split())] = None

    def _save(self, call: ModelCall, step: StepToReplay, findings: list[Finding]) -> list[Finding]:
        """Save the step if requested, and return the findings with the path of the capsule."""
        if self._capsules is None or self._saved >= MAX_CAPSULES:
            return findings
        self._saved += 1
        from ampwise.trace.capsule import CapsuleContents, size_of, write

        model = ReplayStep(run=lambda _: None, device=call.device, models=[call.model])
        contents = CapsuleContents(
            args=call.args,
            kwargs=call.kwargs,
            random=to_plain_random(call.random),
            weights=model.parameters(),
            buffers=model.buffers(),
            precision=call.precision,
            scale=step.scale or 1.0,
            step=step.number,
            loss=step.loss,
            findings=findings,
            device=call.device.type,
        )
        try:
            how_large = format_bytes(size_of(contents, self._with_weights))
            if not self._quiet:
                say_on_stderr("ampwise: saving step {} in {} ({})", step.number, self._capsules, how_large)
            path = write(self._capsules, contents, weights=self._with_weights)
        except BadInput as error:
            self._add_sentence(f"Step {step.number} could not be saved: {error}")
            return findings
        return [finding.but(evidence={**finding.evidence, "capsule": str(path)}) for finding in findings]


# One step


class _Result(NamedTuple):
    """Findings of a replay, or why there are none."""

    findings: list[Finding]
    why_not: str = ""
    call: ModelCall | None = None  # the call with the bad output, if known
    after_model: bool = False  # the models are finite; the bad value arises after them


def _replay(calls: Sequence[ModelCall], losses: Sequence[KeptLoss], step: StepToReplay) -> _Result:
    """Replay the code of the losses, or else the calls; the weights must still be those of the step."""
    sharded = any(map(has_fsdp1, step.optimizers))
    models = list(dict.fromkeys(each for loss in losses for each in _models_of(loss)))
    models += [each for each in dict.fromkeys(call.model for call in calls) if each not in models]
    for model in models:
        if sharded or any(hasattr(each, "placements") for each in model.parameters()):
            why_not = f"the weights of {type(model).__name__} are sharded over ranks"
            return _Result([], f"Step {step.number} could not be replayed: {why_not}.")
    for call in calls:
        call.compiled = is_compiled(call.model)
    try:
        with ExitStack() as stack:
            for context in (
                without_hooks(models),
                attributes_restored(models),
                muted_output(),
                _outside_ddp(models, losses, step.optimizers),
            ):
                stack.enter_context(context)
            _reset_bad_statistics(models)
            for module in [each for model in models for each in model.modules()]:
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                for name, part in module._modules.items() if "_orig_mod" not in module._modules else ():
                    module._modules[name] = None if part is None else _eager(part)
            for loss in losses:
                explained = _explain_loss(loss, calls, step)
                if explained is not None:
                    return explained
            return _explain_calls(calls, step)
    except CollectiveInReplay as error:
        return _Result([], f"Step {step.number} could not be replayed: {error}.")


def _models_of(loss: KeptLoss) -> list[nn.Module]:
    """Return the models that compute a loss: those that were called, or that its code names."""
    named = [] if loss.code is None else [each for each in loss.code.objects() if isinstance(each, nn.Module)]
    return list(dict.fromkeys([*loss.start.models, *named]))


@contextmanager
def _outside_ddp(
    models: Sequence[nn.Module], losses: Sequence[KeptLoss], optimizers: Sequence[Optimizer]
) -> Iterator[None]:
    """Within the context, run the modules inside of DDP wrappers, with parameters that DDP's hooks do not see.

    The same memory, but other leaves of the graph: DDP counts the gradients of its own, also in a replay.
    """
    named = [each for loss in losses if loss.code is not None for each in loss.code.objects()]
    held = [each for thing in named for each in getattr(thing, "__dict__", {}).values()]
    every = [*models, *named, *held]
    wrappers = {each for each in every if isinstance(each, DistributedDataParallel)}
    others: dict[nn.Parameter, nn.Parameter] = {}
    modules = [module for wrapper in wrappers for module in wrapper.modules()]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if modules]
    before = [(group, group["params"]) for group in groups]
    for module in modules:
        for name, each in module._parameters.items():
            if each is not None:
                module._parameters[name] = others.setdefault(each, nn.Parameter(each.detach(), each.requires_grad))
    for group, params in before:
        group["params"] = [others.get(each, each) for each in params]
    for wrapper in wrappers:
        wrapper.__dict__["forward"] = wrapper.module
    try:
        yield
    finally:
        back = {new: old for old, new in others.items()}
        for module in modules:
            for name, each in module._parameters.items():
                module._parameters[name] = back.get(each, each)  # type: ignore[arg-type]
        for group, params in before:
            group["params"] = params
        for wrapper in wrappers:
            del wrapper.__dict__["forward"]


def _reset_bad_statistics(models: Sequence[nn.Module]) -> None:
    """Reset batch-norm statistics that the bad step left NaN; in training mode they are not read."""
    for module in (each for model in models for each in model.modules()):
        if isinstance(module, _NormBase) and module.training:
            for name, value in (("running_mean", 0.0), ("running_var", 1.0)):
                buffer = module._buffers.get(name)
                if buffer is not None and not _is_finite(buffer):
                    module._buffers[name] = torch.full_like(buffer, value)


def _eager(model: nn.Module) -> nn.Module:
    """Return the eager module inside of a compiled one, which would warn about the replay's hooks."""
    parts = dict(model._modules)
    return model if parts.get("_orig_mod") is None else parts["_orig_mod"]  # type: ignore[return-value]


def _is_finite(tensor: Tensor) -> bool:
    with _disable_current_modes(), torch.no_grad():  # not an operation of the model
        return is_finite(tensor)


def _explain_calls(calls: Sequence[ModelCall], step: StepToReplay) -> _Result:
    """Explain a bad step by running the models' calls again, each by itself."""
    if not calls:
        return _Result([])
    if why_not := next(filter(None, map(_why_not, calls)), ""):
        return _Result([], f"Step {step.number} could not be replayed: {why_not}.")
    # Calls that received only non-finite gradients: the bad value arose in them or after them.
    reached = [call for call in calls if call.gradients and not _finite_gradients(call)]
    others = [call for call in calls if call not in reached]
    for some, backward in ((reached, False), (others, True)):
        if not some:
            continue
        again = CallReplay(some, step.scale or 1.0, backward=backward)
        failure = _failure(again, step, backward=backward)
        if failure is None:
            continue
        source = failure.source
        if source is not None and source.what == "batch":
            tensor = _batch(some)[source.name]
            if any(call.was_computed(tensor) for call in some):
                why_not = (
                    f"Step {step.number} was replayed: the model's input `{source.name}`, which the script has "
                    "computed, is not finite; the code that computes it is outside of the models and cannot be "
                    "replayed."
                )
                return _Result([], why_not)
        return _Result(findings_about(failure), call=again.culprit)
    if step.may_be_ordinary:
        return _Result([])
    names = " and ".join(dict.fromkeys(type(call.model).__name__ for call in calls))
    large = max(call.too_large for call in calls)
    if reached or step.bad_loss:
        found = (
            f"Step {step.number} was replayed, and {names} is finite. The bad value arises after its output, which "
            "cannot be replayed, or is not reproducible; `ampwise.trace(loss_fn, batch)` can look there"
        )
    elif large:
        found = (
            f"Step {step.number}: the backward pass of {names} could not be replayed, as the gradient of its output "
            f"({large / 2**20:.0f} MiB) was too large to keep"
        )
    else:
        reason = f"{FROM_ANOTHER_RANK}, or is" if is_multi_rank() else "it is"
        found = (
            f"Step {step.number} was replayed, and {names} is finite, forward and backward: {reason} not reproducible"
        )
    if any(call.compiled for call in calls):  # eager code may differ in the last bits
        found += "; the model is compiled, and was replayed eagerly"
    return _Result([], f"{found}.", after_model=bool(reached) or step.bad_loss)


def _explain_loss(loss: KeptLoss, calls: Sequence[ModelCall], step: StepToReplay) -> _Result | None:
    """Explain a bad step by running the script's code of a loss again, with the model's part; None if it is finite."""
    code, start, failure = loss.code, loss.start, None
    is_bad = not _is_finite(loss.value)
    own = [call for call in calls if call.model in start.models]
    if (step.bad_loss and not is_bad) or any(map(_why_not, own)):
        return None
    if code is not None and code.is_unchanged and all(map(_is_finite, code.computed())):
        failure = _run_again(code, loss, calls, step)
    if is_bad and (failure is None or (failure.source is not None and failure.source.drawn is None)):
        # Perhaps the data were bad, and the script's own code has computed them.
        code = data_code(_frame_of(loss), (loss.used_at or (None, 0))[1], loaded=bool(step.draws))
        with _numpy_faults() as faults:
            found = None if code is None else _run_again(code, loss, calls, step, from_data=True)
        if found is not None:
            failure = _from_data(failure, found, faults)
    if failure is None and not is_bad and code is not None and code.is_unchanged and step.scale is None:
        frame = _frame_of(loss)  # perhaps the script has changed the gradients since
        change = None if frame is None else code_between(frame, (loss.used_at or (None, 0))[1])
        if change is not None:
            failure = _run_again(code, loss, calls, step, afterwards=change)
    return None if failure is None else _Result(findings_about(failure), call=own[0] if own else None)


def _frame_of(loss: KeptLoss) -> FrameType | None:
    """Return the frame of the function that used the loss, if it is still running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (loss.used_at is None or frame.f_code is not loss.used_at[0]):
        frame = frame.f_back
    return frame


def _run_again(
    code: LossCode,
    loss: KeptLoss,
    calls: Sequence[ModelCall],
    step: StepToReplay,
    *,
    from_data: bool = False,
    afterwards: Callable[[], None] = lambda: None,
) -> Failure | None:
    """Run the code of a loss and its backward pass; None if they are finite, or do not run on their own.

    from_data: the code begins before the model. afterwards: what the script does with the gradients.
    """
    start = loss.start

    def run(settings: ReplaySettings) -> Any:
        if from_data and start.data_random is not None:
            torch.set_rng_state(start.data_random)
        elif start.random:
            restore_random(start.random, start.device)
        with torch.inference_mode(False), torch.enable_grad(), collectives_refused():
            found = code.run()
            if not isinstance(found, Tensor):
                raise BadInput(f"The code of the loss gave {type(found).__name__}, not a tensor.")
            if found.requires_grad and settings.goes_back_from(found):
                (found * settings.scale if settings.scale != 1 else found).sum().backward()
                afterwards()
        return found

    # Of a batch that is computed again, the old values are not its source.
    batch = {} if from_data else {**_batch(calls), **code.batch()}
    try:
        return _diagnosis(run, start, calls, step, models=_models_of(loss), batch=batch, touched=code.objects())
    except Exception:  # the statements do not run on their own
        return None


def _from_data(failure: Failure | None, found: Failure, faults: Sequence[CallSite]) -> Failure:
    """Return what explains bad data best. found: in a replay that has computed them again; faults: of numpy in it."""
    origin, source = found.origin, (failure or found).source
    if origin is not None and found.kind != "cancelled-infinities":
        return found
    if source is not None and origin is None and faults:
        return (failure or found).but(source=replace(source, made_at=faults[0]))
    return failure or found


@contextmanager
def _numpy_faults() -> Iterator[list[CallSite]]:
    """Collect the lines at which numpy computes an invalid value, such as 0/0, within the context."""
    faults: list[CallSite] = []
    numpy = sys.modules.get("numpy")
    if numpy is None:
        yield faults
        return

    def note(kind: str, flag: int) -> None:
        line = current_line().own
        if line is not None and len(faults) < MOST_FAULTS:
            faults.append(site_of(line, None))

    with numpy.errstate(divide="call", invalid="call", call=note):
        yield faults


def _why_not(call: ModelCall) -> str:
    """Return why a call cannot be replayed; "" if it can."""
    name = type(call.model).__name__
    if not call.inputs_unchanged:
        return f"the inputs of {name} have been modified since"
    if call.model.training != call.in_training_mode:
        return f"{name} has been switched between train() and eval() since"
    return ""


def _diagnosis(
    run: Callable[[ReplaySettings], Any],
    start: ModelCall | LossStart,
    calls: Sequence[ModelCall],
    step: StepToReplay,
    *,
    models: Sequence[nn.Module],
    batch: Mapping[str, Tensor],
    touched: Sequence[Any] = (),
    remarks: tuple[str, ...] = (),
) -> Failure | None:
    """Replay and diagnose a bad step; None if it is finite, or would be without the loss scale.

    run: runs it again, with the random state of each call. start: where it begins.
    """
    scale = step.scale or 1.0
    subject = ReplayStep(
        run=run,
        device=start.device,
        models=list(dict.fromkeys(map(_eager, models))),
        batch=batch,
        precision=start.precision,
        scale=scale,
        random=None,
        loss=step.loss if step.may_be_ordinary else None,
        step=step.number,
        optimizers=step.optimizers,
        pasts=step.pasts,
        touched=touched,
        remarks=(*remarks, COMPILED) if any(call.compiled for call in calls) else remarks,
    )
    with Replay(subject) as replay:
        if replay.plain(ReplaySettings(scale=scale)).finite:
            if step.raised:
                return swallowed_in_backward(replay, replay.taped(ReplaySettings()))
            compiled = not step.may_be_ordinary and any(call.compiled for call in calls)
            return compiler_failure(replay) if compiled else None
    failure = diagnose(subject)
    if failure is None or failure.not_reproduced:
        return None
    if step.draws is not None:
        failure = step.draws.explained(failure, subject.batch)
    if is_multi_rank():
        return failure.but(rank=torch.distributed.get_rank(), ranks=torch.distributed.get_world_size())
    return failure


def _finite_gradients(call: ModelCall) -> dict[int, list[Tensor]]:
    """Return the finite gradients that reached the call's outputs, by output. Syncs with the device.

    If a model returns logits and a loss computed from them, the gradients of the logits come from the model itself.
    """
    return {position: many for position, many in call.gradients.items() if all(map(_is_finite, many))}


def _batch(calls: Sequence[ModelCall]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for number, call in enumerate(calls, 1):
        for name, tensor in named_tensors(_eager(call.model).forward, call.args, call.kwargs).items():
            found.setdefault(name if number == 1 else f"{name} ({number})", tensor)
    return found


def _failure(again: CallReplay, step: StepToReplay, *, backward: bool) -> Failure | None:
    """Replay the calls. Return None if they are finite, or would be without the loss scale."""
    calls = again.calls
    models = [call.model for call in calls]
    remarks = () if backward else (MODEL_ALONE,)
    failure = _diagnosis(again, calls[0], calls, step, models=models, batch=_batch(calls), remarks=remarks)
    if failure is None:
        return None
    if not backward and any(trial.finite for trial in failure.trials):
        failure = failure.but(remarks=(*failure.remarks, MEAN))
    called_at, source = (again.culprit or calls[0]).site, failure.source
    return failure.but(
        # The replay returned the model's output, while the run saw the step's loss.
        symptom="result" if failure.symptom == "loss" and not step.bad_loss else failure.symptom,
        loss=step.loss,
        origin=_placed(failure.origin, called_at),
        nan_origin=_placed(failure.nan_origin, called_at),
        source=None if source is None else replace(source, first_use=_placed(source.first_use, called_at)),
    )


def _placed(origin: Origin | None, called_at: CallSite) -> Origin | None:
    """Place an operation of a library's module at the script's line that called the model."""
    if origin is None or (origin.site.file and code_owner(origin.site.file) == "own"):
        return origin
    through = "" if not origin.site.file else f"{'/'.join(origin.site.file.split('/')[-2:])}:{origin.site.line}"
    return replace(origin, site=replace(called_at, through=through))


class CallReplay:
    """Callable that runs the calls again and returns their non-finite outputs."""

    def __init__(self, calls: Sequence[ModelCall], scale: float, *, backward: bool) -> None:
        self.calls, self.scale, self._backward = calls, scale, backward
        self._gradients = {call: _finite_gradients(call) for call in calls if backward}
        self.culprit: ModelCall | None = None  # the first whose output was not finite

    def __call__(self, settings: ReplaySettings) -> list[Tensor]:
        bad: list[Tensor] = []
        with collectives_refused():
            for call in self.calls:
                outputs = _outputs_of(call)
                found = [each for each in outputs if not _is_finite(each)]
                if settings.backward:
                    self._go_back(call, outputs, settings.scale, sound=not found)
                if found and self.culprit is None:
                    self.culprit = call
                bad += found
        return bad

    def _go_back(self, call: ModelCall, outputs: list[Tensor], scale: float, *, sound: bool) -> None:
        roots: dict[int, Tensor] = {}
        if self._backward:
            factor = scale / self.scale
            for position, many in self._gradients[call].items():
                whole = many[0] if len(many) == 1 else torch.stack(many).sum(0)
                roots[position] = whole if factor == 1 else whole * factor
        elif sound and self.culprit is not None:  # fixed by something that is tried: is the backward pass finite, too?
            roots = {number: torch.full_like(each, scale / each.numel()) for number, each in enumerate(outputs)}
        _backward(outputs, roots)


def _outputs_of(call: ModelCall) -> list[Tensor]:
    restore_random(call.random, call.device)
    autocast: Any = nullcontext()
    if (state := call.autocast) is not None:
        torch.autocast_increment_nesting()
        nested = torch.autocast_decrement_nesting() > 0
        # Inside an autocast region of the script, cached casts of weights have graphs that are freed.
        cache = state.cache and not nested
        autocast = torch.autocast(state.device, dtype=state.dtype, enabled=state.enabled, cache_enabled=cache)

    def detached(thing: Any) -> Any:
        """Detach tensors that require gradients, so that the script's own get none."""
        if isinstance(thing, Tensor):
            return thing.detach().requires_grad_() if thing.requires_grad else thing
        if type(thing) in (list, tuple):
            return type(thing)(map(detached, thing))
        return {key: detached(each) for key, each in thing.items()} if type(thing) is dict else thing

    @stop_stack_search  # frames further out are not those that called the model
    def run_model(args: Any, kwargs: Any) -> Any:
        return _eager(call.model)(*args, **kwargs)

    with torch.inference_mode(False), torch.enable_grad(), autocast:
        return list(islice(floats_in(run_model(detached(call.args), detached(call.kwargs))), OUTPUTS))


def _backward(outputs: Sequence[Tensor], gradients: Mapping[int, Tensor]) -> None:
    wanted = {
        position: gradient
        for position, gradient in gradients.items()
        if position < len(outputs) and outputs[position].requires_grad and gradient.shape == outputs[position].shape
    }
    # Nodes that other outputs depend on: with logits and a loss, the gradient comes through the loss.
    inner: set[Any] = set()
    ends = [outputs[position].grad_fn for position in wanted if len(wanted) > 1]
    pending: list[Any] = [node for end in ends if end for node, _ in end.next_functions]
    while pending:
        node = pending.pop()
        if node is not None and node not in inner:
            inner.add(node)
            pending += [each for each, _ in node.next_functions]
    pairs = [(outputs[position], each) for position, each in wanted.items() if outputs[position].grad_fn not in inner]
    if pairs:
        with torch.autocast(pairs[0][0].device.type, enabled=False):
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
