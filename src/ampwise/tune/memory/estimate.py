"""How much memory a training step takes, in every precision, without taking it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ampwise.engine.precision.precision import EMULATE, PRECISIONS, Precision, precision_named
from ampwise.errors import BadInput, UnknownName
from ampwise.low_bit.pure import OPTIONS, PURE
from ampwise.tune.memory.case import Case, Facts, Tell
from ampwise.tune.memory.decoder import decoder_maker
from ampwise.tune.memory.fitting import fewest_ranks, largest_batch
from ampwise.tune.memory.log import Log
from ampwise.tune.memory.optimizers import MODELLED, checked_optimizer
from ampwise.tune.memory.peak import Fit
from ampwise.tune.memory.ranks import Fsdp
from ampwise.tune.memory.result import Estimate, MemoryEstimate
from ampwise.tune.memory.room import Room, cublas_workspaces, room_here, room_of, room_sizes
from ampwise.tune.memory.shapes import Shape, count_text, parse_count, shape_for
from ampwise.tune.subject import Maker, maker_named, maker_of

__all__ = ["memory"]

CUDNN = (
    "cuDNN takes a workspace for convolutions, which it chooses as it runs and which is not in these numbers: for "
    "ResNet-50 on an H200 it was below 1 % of the peak in TF32, FP16 and BF16, and up to 5 % in FP32."
)
RECURRENT = (
    "Recurrent layers run in cuDNN on a GPU, which keeps for itself what it needs: here they are counted as the CPU "
    "runs them, which may be far from it."
)
NOT_COUNTED = {
    "fp8": "Take bf16: weights, gradients and optimizer state are the same, and the peak of FP8 was 8 to 22 % below "
    "BF16's in two GPTs on an H200.",
    EMULATE: "Take fp32, which is what it computes in; rounded copies come on top.",
}
FSDP = (
    "FSDP is derived: FSDP2 with a group for each repeated block, weights gathered in the type that is computed in, "
    "and the next block's while one computes."
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
    gpu: str | None = None,
    largest: bool = True,
    tell: Tell | None = None,
    **sizes: int,
) -> MemoryEstimate:
    """Predict the memory of a whole CUDA training step. Nothing is allocated, and no GPU is needed.

    ``what`` makes a model, a batch and the loss, as ``ampwise.compare`` takes it: a function, or ``"train:make"``.
    Without it, a decoder transformer is asked about by its sizes: ``params="7B"``, or ``layers``, ``hidden``,
    ``heads``, ``kv_heads``, ``ffn``, ``vocab`` and ``seq``; what is not given is as it usually is.

    ``precisions`` are by name, "bf16-pure" and its options among them; without any, FP32, TF32, FP16 and BF16.
    ``optimizer`` is a name; without one, it is what the function returns, or AdamW. With ``checkpointing`` the repeated
    blocks of the model are computed again in the backward pass. ``fsdp`` is a number of ranks; ``ddp`` counts DDP's
    buckets. ``gpu`` is a device of the catalog, else this machine's: whether the step fits it, on how many ranks it
    would, and, unless ``largest`` is false, with which largest batch. ``tell`` is called with what is being done.

    >>> import ampwise
    >>> estimate = ampwise.memory(layers=2, hidden=256, vocab=512, seq=64, precisions=["bf16"])
    >>> estimate.at("bf16").most["optimizer state"] // estimate.parameters  # AdamW's two moments, in FP32
    8
    """
    if fsdp is not None and ddp:
        raise BadInput("--fsdp and --ddp: gradients are exchanged by one or by the other.")
    maker, shape = _asked(what, params, sizes)
    chosen = [_precision(name) for name in precisions or PRECISIONS]
    batches = _batches(batch)
    room = room_of(gpu) if gpu is not None else room_here()
    case = Case(
        maker,
        optimizer=None if optimizer is None else checked_optimizer(optimizer),
        checkpointing=checkpointing,
        fsdp=None if fsdp is None else Fsdp(ranks=fsdp),
        ddp=ddp,
        workspaces=cublas_workspaces(room.capability if room else None),
        tell=tell,
    )
    estimates = tuple(_estimate(case, precision, size, room) for size in batches for precision in chosen)
    facts = case.facts(chosen[0], batches[0])
    return MemoryEstimate(
        name=maker.name,
        parameters=facts.parameters,
        trained=facts.trained,
        shape=shape,
        optimizer=facts.optimizer,
        checkpointing=checkpointing,
        fsdp=fsdp,
        ddp=ddp,
        gpu=room,
        estimates=estimates,
        largest_batch=_largest(case, chosen, facts.rows, room) if largest else None,
        notes=tuple(_notes(shape, params, case, facts, chosen, room)),
    )


def _asked(
    what: str | Callable[..., Any] | None, params: str | float | None, sizes: Mapping[str, int]
) -> tuple[Maker, Shape | None]:
    if what is None:
        if params is None and not sizes:
            raise BadInput("nothing is asked about: give a function such as train:make, or sizes such as --params 7B.")
        shape = shape_for(None if params is None else parse_count(params), sizes)
        return decoder_maker(shape), shape
    given = [name for name, size in ({"params": params} | dict(sizes)).items() if size is not None]
    if given:
        raise BadInput(
            f"{what if isinstance(what, str) else getattr(what, '__name__', 'the function')}: a model that a function "
            f"makes has its own sizes; leave out {', '.join(f'--{name}'.replace('_', '-') for name in given)}."
        )
    return (maker_named(what) if isinstance(what, str) else maker_of(what)), None


def _precision(name: str) -> Precision:
    if name in PRECISIONS:
        return PRECISIONS[name]
    if name.startswith((PURE, EMULATE)):
        found = precision_named(name)  # or what is wrong with what follows
        if found.pure is not None:
            return found
    raise _refused(name)


def _refused(name: str) -> BadInput | UnknownName:
    instead = NOT_COUNTED.get(EMULATE if name.startswith(EMULATE) else name)
    if instead is not None:
        return BadInput(f"precision {name!r}: there is such a precision, and its memory is not counted. {instead}")
    if name in OPTIONS:
        return BadInput(f"{name!r} is an option of {PURE}: {PURE},{name}.")
    *others, last = OPTIONS
    listing = (
        f"The precisions are {', '.join((*PRECISIONS, PURE))}; after {PURE} and a comma, {', '.join(others)} or {last}."
    )
    return UnknownName("precision", name, (*PRECISIONS, PURE, *OPTIONS), listing=listing)


def _batches(batch: int | Sequence[int] | None) -> list[int | None]:
    sizes: list[int | None] = [*batch] if isinstance(batch, Sequence) else [batch]
    if not sizes or any(size is not None and size < 1 for size in sizes):
        shown = ",".join(map(str, sizes))
        raise BadInput(f"--batch {shown}: a batch has at least 1 row.")
    return list(dict.fromkeys(sizes))


def _estimate(case: Case, precision: Precision, batch: int | None, room: Room | None) -> Estimate:
    step = case.step(precision, batch)
    peak = step.peak
    fits = None if room is None else step.fit(room.usable)
    return Estimate(
        precision=precision.name,
        batch=case.facts(precision, batch).rows,
        peak=peak.allocated,
        reserved=peak.reserved,
        phase=peak.phase,
        split=peak.split,
        most=peak.most,
        phases=peak.phases,
        fits=fits,
        ranks=fewest_ranks(case, precision, batch, room.usable) if room is not None and fits is Fit.NO else None,
        smallest=next((size for size in room_sizes() if peak.reserved <= size.usable), None),
    )


def _largest(case: Case, chosen: Sequence[Precision], rows: int | None, room: Room | None) -> dict[str, int] | None:
    if rows is None or room is None:
        return None
    found: dict[Log, int] = {}  # TF32 is FP32 in memory, and BF16 is as good as always FP16
    for precision in chosen:
        log = case.whole(precision, rows)
        if log not in found:
            found[log] = largest_batch(case, precision, rows, room.usable)
    return {precision.name: found[case.whole(precision, rows)] for precision in chosen}


def _notes(
    shape: Shape | None,
    params: str | float | None,
    case: Case,
    facts: Facts,
    precisions: Sequence[Precision],
    room: Room | None,
) -> Iterator[str]:
    """What was assumed, and what is not in the numbers."""
    if shape is not None:
        asked = "" if params is None else f" Asked for were {count_text(parse_count(params))}."
        yield (
            f"The model is assumed: a decoder with RMSNorm, rotary positions and gated MLPs, of {shape}: "
            f"{count_text(shape.parameters)} parameters.{asked}"
        )
    if facts.optimizer in MODELLED:
        yield f"{facts.optimizer} is modelled by what it keeps: {MODELLED[facts.optimizer]}."
    if facts.convolutions:
        yield CUDNN
    if facts.recurrent:
        yield RECURRENT
    if case.fsdp is not None:
        yield FSDP
    missing = [each.name for each in precisions if room is not None and each.units in room.lacks]
    if room is not None and missing:
        yield f"{room.name} has no matrix units for {', '.join(missing)}: there that is no faster than FP32, or slower."
    if room is not None and room.capability is None:
        yield f"{room.name} is no CUDA device: the numbers are those of CUDA's kernels."
