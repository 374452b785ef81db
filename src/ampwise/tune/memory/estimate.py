"""``ampwise.memory``: predict how much memory a training step takes, in every precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ampwise.errors import BadInput, UnknownName
from ampwise.numbers.number_text import count_text
from ampwise.train.low_bit.pure_bf16 import OPTIONS, PURE
from ampwise.train.precision.precision import EMULATE, PRECISIONS, TrainPrecision, precision_named
from ampwise.tune.advise.model import parse_count
from ampwise.tune.memory.allocation_log import AllocationLog
from ampwise.tune.memory.allocator import Fit
from ampwise.tune.memory.decoder import DecoderShape, decoder_factory, decoder_shape
from ampwise.tune.memory.device_memory import (
    DeviceMemory,
    catalog_memory,
    catalog_memory_sizes,
    cublas_workspaces,
    local_memory,
)
from ampwise.tune.memory.optimizers import MODELLED, checked_optimizer
from ampwise.tune.memory.result import Estimate, MemoryEstimate
from ampwise.tune.memory.setup import Progress, SetupFacts, TrainingSetup
from ampwise.tune.memory.tracker import FP8
from ampwise.tune.train_case import CaseFactory, make_factory

CUDNN = (
    "cuDNN chooses its workspaces for convolutions at run time: counted is what it usually took on an H200; in FP32 it "
    "may take none, or more."
)
RECURRENT = (
    "Recurrent layers are counted as cuDNN runs them on an H200: what they keep is exact, their workspaces are "
    "approximate."
)
COMPILED = (
    "compiled: torch.compile decides anew what to save, and what that is cannot be known before. Of what a step adds "
    "to weights and state, seven models needed 49 to 100 % on an H200."
)
NOT_COUNTED = "its memory cannot be predicted yet. Use fp32, which it computes in; rounded copies add to that."
FSDP = (
    "FSDP is derived, assuming FSDP2 with a group for each repeated block, weights gathered in the compute dtype, and "
    "the next block prefetched while one computes."
)


def memory(
    what: str | Callable[..., Any] | None = None,
    *,
    params: str | float | None = None,
    precisions: Sequence[str] | None = None,
    batch: int | Sequence[int] | None = None,
    optimizer: str | None = None,
    checkpointing: bool = False,
    fsdp: int | None = None,
    ddp: bool = False,
    compiled: bool = False,
    gpu: str | None = None,
    largest: bool = True,
    progress: Progress | None = None,
    **sizes: int,
) -> MemoryEstimate:
    """Predict the memory of a whole CUDA training step. Nothing is allocated, and no GPU is needed.

    Args:
        what: returns a model, a batch and the loss, as for ``ampwise.bench``: a function, or ``"train:make"``. Without
            it, the model is a decoder transformer, by its sizes.
        params: number of its parameters, ``"7B"``.
        precisions: names, including "bf16-pure" and its options; by default FP32, TF32, FP16 and BF16.
        batch: rows of the batch, or several such numbers.
        optimizer: a name; by default the function's own, or AdamW.
        checkpointing: recompute the repeated blocks of the model in the backward pass.
        fsdp: number of ranks that share the state.
        ddp: add DDP's buckets.
        compiled: also show between which peaks the model would be with ``torch.compile``.
        gpu: a device of the catalog, by default this machine's: the result says whether the step fits, and on how many
            ranks it would.
        largest: also find the largest batch that fits.
        progress: called with the current activity.
        **sizes: ``layers``, ``hidden``, ``heads``, ``kv_heads``, ``ffn``, ``vocab`` and ``seq``; those not given get
            typical values.

    Returns:
        the bytes of each kind, by precision and batch; ``print`` shows a table.

    Raises:
        BadInput: an argument does not fit; the message says what to pass.

    >>> import ampwise
    >>> estimate = ampwise.memory(layers=2, hidden=256, vocab=512, seq=64, precisions=["bf16"])
    >>> estimate.at("bf16").most["optimizer state"] // estimate.parameters  # AdamW's two moments, in FP32
    8
    """
    if fsdp is not None and ddp:
        raise BadInput("--fsdp and --ddp exclude each other: give one of them.")
    factory, shape = _model_source(what, params, sizes)
    chosen = [_precision(name) for name in precisions or PRECISIONS]
    batches: list[int | None] = [*dict.fromkeys(batch)] if isinstance(batch, Sequence) else [batch]
    if not batches or any(size is not None and size < 1 for size in batches):
        raise BadInput(f"--batch {','.join(map(str, batches))}: expected at least 1 row.")
    device = catalog_memory(gpu) if gpu is not None else local_memory()
    setup = TrainingSetup(
        factory,
        optimizer=None if optimizer is None else checked_optimizer(optimizer),
        checkpointing=checkpointing,
        fsdp=fsdp,
        ddp=ddp,
        workspaces=cublas_workspaces(device.capability if device else None),
        capability=device.capability if device else None,
        progress=progress,
    )
    estimates = tuple(_estimate(setup, precision, size, device) for size in batches for precision in chosen)
    facts = setup.run(chosen[0], batches[0])[1]
    largest_batch = None
    if largest and facts.rows is not None and device is not None:
        found: dict[AllocationLog, int] = {}  # TF32 is FP32 in memory, and BF16 nearly always equals FP16
        logs = {precision: setup.run(precision, facts.rows)[0] for precision in chosen}
        for precision, log in logs.items():
            if log not in found:
                found[log] = setup.largest_batch(precision, facts.rows, device.usable)
        largest_batch = {precision.name: found[log] for precision, log in logs.items()}
    return MemoryEstimate(
        name=factory.name,
        parameters=facts.parameters,
        trained=facts.trained,
        shape=shape,
        optimizer=facts.optimizer,
        checkpointing=checkpointing,
        fsdp=fsdp,
        ddp=ddp,
        compiled=compiled,
        gpu=device,
        estimates=estimates,
        largest_batch=largest_batch,
        notes=(*_notes(shape, params, fsdp, facts, chosen, device), *([COMPILED] if compiled else [])),
    )


def _model_source(
    what: str | Callable[..., Any] | None, params: str | float | None, sizes: Mapping[str, int]
) -> tuple[CaseFactory, DecoderShape | None]:
    if what is None:
        if params is None and not sizes:
            raise BadInput("no model given: name your function, train.py:make, or give sizes such as --params 7B.")
        shape = decoder_shape(None if params is None else parse_count(params), sizes)
        return decoder_factory(shape), shape
    given = [name for name, size in ({"params": params} | dict(sizes)).items() if size is not None]
    if given:
        raise BadInput(
            f"{what if isinstance(what, str) else getattr(what, '__name__', 'the function')}: a model from a function "
            f"has its own sizes; leave out {', '.join(f'--{name}'.replace('_', '-') for name in given)}."
        )
    return make_factory(what), None


def _precision(name: str) -> TrainPrecision:
    if name in (*PRECISIONS, FP8):
        return precision_named(name)
    if name.startswith((PURE, EMULATE)):
        found = precision_named(name)  # raises if the options are wrong
        if found.pure is not None:
            return found
    if name.startswith(EMULATE):
        raise BadInput(f"precision {name!r}: {NOT_COUNTED}")
    if name in OPTIONS:
        raise BadInput(f"{name!r} is an option of {PURE}: {PURE},{name}.")
    *others, last = OPTIONS
    listing = (
        f"The precisions are {', '.join((*PRECISIONS, FP8, PURE))}; after {PURE} and a comma, "
        f"{', '.join(others)} or {last}."
    )
    raise UnknownName("precision", name, (*PRECISIONS, FP8, PURE, *OPTIONS), listing=listing)


def _estimate(
    setup: TrainingSetup, precision: TrainPrecision, batch: int | None, device: DeviceMemory | None
) -> Estimate:
    step = setup.step(precision, batch)
    usage = step.usage
    fits = None if device is None else step.fit(device.usable)
    return Estimate(
        **asdict(usage),
        precision=precision.name,
        batch=setup.run(precision, batch)[1].rows,
        fits=fits,
        ranks=setup.fewest_ranks(precision, batch, device.usable) if device is not None and fits is Fit.NO else None,
        smallest=next((size for size in catalog_memory_sizes() if usage.reserved <= size.usable), None),
    )


def _notes(
    shape: DecoderShape | None,
    params: str | float | None,
    fsdp: int | None,
    facts: SetupFacts,
    precisions: Sequence[TrainPrecision],
    device: DeviceMemory | None,
) -> Iterator[str]:
    """Yield what was assumed, and what the numbers leave out."""
    if shape is not None:
        requested = "" if params is None else f" Requested: {count_text(parse_count(params))}."
        yield (
            f"Assumed model: a decoder with RMSNorm, rotary positions and gated MLPs; {shape}: "
            f"{count_text(shape.parameters)} parameters.{requested}"
        )
    if facts.optimizer in MODELLED:
        yield f"{facts.optimizer} is modelled by the state it keeps: {MODELLED[facts.optimizer]}."
    if facts.convolutions:
        yield CUDNN
    if facts.recurrent:
        yield RECURRENT
    if fsdp is not None:
        yield FSDP
    missing = [each.name for each in precisions if device is not None and each.units in device.lacks]
    if device is not None and missing:
        yield f"{device.name} has no tensor cores for {', '.join(missing)}: no faster than FP32 there, or slower."
    if device is not None and device.capability is None:
        yield f"{device.name} is not a CUDA device: the numbers assume CUDA kernels."
