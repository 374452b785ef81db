"""The tables of what is simulated, and of the numbers that it goes by."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.harness import Result
from benchmarks.scale import measured
from benchmarks.scale.here import heard
from benchmarks.scale.machine import CLUSTER
from benchmarks.scale.models import MODELS, Model
from benchmarks.scale.simulation import Breaks, Setting, fewest, limits
from benchmarks.scale.words import byte_words, number_words, time_words

__all__ = ["RANKS", "checkpoint", "limit", "machine", "step"]

RANKS = (1, 8, 64, 512, 4096, 16_384)
SHOWN = ("124M", "7B", "70B", "1T")  # of which there are rows of times
COPY = 64  # ranks that have a model among them, where not all have


def settings() -> Iterator[tuple[str, Setting]]:
    """Models on all numbers of ranks that have the memory."""
    for name in SHOWN:
        for ranks in RANKS:
            if CLUSTER.fits(MODELS[name].parameters, ranks):
                yield name, Setting(model=MODELS[name], ranks=ranks)


def step() -> Result:
    result = Result(
        name="scale_step",
        title="Scale: what a step costs",
        claim="Simulated, for a model in FSDP2 over all ranks. The guard's exchange goes through hosts, which are a "
        "step ahead of the devices: it is waited for only as far as it is longer than a step.",
        columns=["parameters", "ranks", "a step", "the engine's", "of a step", "FP8's, delayed", "the guard's"],
    )
    for name, each in settings():
        engine, fp8 = each.device_s(), each.device_s(fp8=True) - each.device_s()
        share = f"{100 * engine / each.step_s:.2g} %" if engine else "–"
        times = map(time_words, (fp8, each.agree_s))
        result.rows.append([name, f"{each.ranks:,}", time_words(each.step_s), time_words(engine), share, *times])
    result.notes.append("Models without a row at few ranks do not fit: 16 bytes a parameter, in 0.8 of the memory.")
    return result


def checkpoint() -> Result:
    result = Result(
        name="scale_checkpoint",
        title="Scale: what a checkpoint costs",
        claim="Simulated, for a model in FSDP2 over all ranks with AdamW: 12 bytes a parameter. It is written beside "
        "the training. Data is written with its checksum and read back; the first rank plans and merges in Python, for "
        "which its own training has to wait at times.",
        columns=[
            *("parameters", "ranks", "a rank writes", "files", "pieces", "manifest"),
            *("data", "first rank", "the rest", "together"),
        ],
    )
    for name, each in settings():
        took = each.checkpoint()
        manifest = f"{byte_words(each.manifest_bytes)}{', refused' if each.refused else ''}"
        row = [name, f"{each.ranks:,}", byte_words(each.rank_bytes), f"{each.files:,}", f"{each.pieces:,}", manifest]
        seconds = (took.data, took.first_rank, took.exchanges + took.names + took.own, took.total)
        result.rows.append([*row, *map(time_words, seconds)])
    result.notes.append(
        "The rest: collectives, what all ranks ask of the file system by name, and fsyncs, which ranks do together."
    )
    return result


def limit() -> Result:
    result = Result(
        name="scale_limits",
        title="Scale: where it ends",
        claim="The fewest ranks at which it is so, of those on which the model fits, up to 16,384; a dash: not so far. "
        f"FSDP2 over all ranks, or in copies of {COPY} ranks each (HSDP), under a guard. Simulated where times decide.",
        columns=["what", "where", "cut among", *MODELS],
    )
    result.rows.append(["the model fits", "", "all", *(f"{_least(model):,}" for model in MODELS.values())])
    for each in limits():
        for shards in (None, COPY) if each.by_pieces else (None,):
            told = [_from(model, shards, each) for model in MODELS.values()]
            result.rows.append([each.what, each.where, "all" if shards is None else str(shards), *told])
    return result


def _from(model: Model, shards: int | None, limit: Breaks) -> str:
    if shards is not None and not CLUSTER.fits(model.parameters, shards):
        return "does not fit"
    found = fewest(partial(_on, model, shards), limit.breaks, shards or _least(model))
    return "–" if found is None else f"{found:,}"


def _least(model: Model) -> int:
    """Ranks on which it fits."""
    return next(ranks for ranks in range(1, RANKS[-1]) if CLUSTER.fits(model.parameters, ranks))


def _on(model: Model, shards: int | None, ranks: int) -> Setting:
    return Setting(model=model, ranks=ranks, shards=shards)


def machine() -> Result:
    """With what was measured in this run beside what the simulation goes by."""
    found = {**measured.every(MODELS["124M"]), **heard()}
    result = Result(
        name="scale_machine",
        title="Scale: the machine that is simulated",
        claim="Every number that the simulation has, and where it is from. Those that were measured here are of "
        "ampwise's own code on one core.",
        columns=["name", "what", "number", "basis", "measured in this run"],
    )
    for name, known in CLUSTER.every().items():
        again = number_words(found[name], known.unit) if name in found else "–"
        result.rows.append([name, known.what, number_words(known, known.unit), known.basis, again])
    return result
