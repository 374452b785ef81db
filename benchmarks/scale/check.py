"""The laws of ``counts`` beside what ranks have seen: the same, or one of them is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.scale import counts
from benchmarks.scale.counts import Collective
from benchmarks.scale.models import Model
from benchmarks.scale.ranks import LAYERS, model
from benchmarks.scale.recorders import Seen

__all__ = ["Held", "checked", "trained"]


class Held(NamedTuple):
    """A law, what it comes to, and what was seen; of ranks that are to see the same, the first that does not."""

    law: str  # in words
    by_law: Any
    seen: Any
    shown: str


def trained() -> Model:
    """What the ranks train, by names and shapes."""
    return Model(tuple((name, tuple(each.shape)) for name, each in model().named_parameters()))


def checked(said: Sequence[Seen]) -> Iterator[tuple[str, Held]]:
    """By what is counted; ``said`` is what each rank saw."""
    yield from _steps(said)
    yield from _guard(said)
    yield from _checkpoint(said)
    yield from _group(said)
    yield from _record(said)


def _steps(said: Sequence[Seen]) -> Iterator[tuple[str, Held]]:
    law = counts.step
    yield "a step, DDP", _exchanged("nothing", law(), said, "copied")
    yield "a step, FSDP2", _exchanged("24 bytes", law(sharded=True), said, "sharded")
    yield "a step, FSDP2, weighed", _exchanged("8 and 24 bytes", law(sharded=True, weighed=True), said, "weighed")
    yield (
        f"a step, FP8's scales of {LAYERS} layers",
        _exchanged("24 bytes a layer", law(fp8_layers=LAYERS), said, "scales"),
    )
    yield (
        "a step, FSDP2, guarded",
        _exchanged("24 and 32 bytes", law(sharded=True, guarded=True), said, "guarded", "step"),
    )
    yield (
        "a bad step, explained: collectives",
        _exchanged("22", counts.explained(), said, "explained", counted=True),
    )


def _guard(said: Sequence[Seen]) -> Iterator[tuple[str, Held]]:
    groups = [each["guarded"]["groups"] for each in said]
    yield "a guard: gloo groups", _same("3", counts.GROUPS_OF_A_GUARD, groups)
    yield (
        "a guard begins: collectives",
        _exchanged("12", counts.begin_of_guard(), said, "guarded", "begin", counted=True),
    )
    saves = counts.save()
    yield "a checkpoint: collectives", _exchanged("14", saves, said, "guarded", "save", counted=True)
    written = sum(each.group == "save" for each in saves)
    yield "of these, by gloo's own count", _same("12", written, [each["guarded"]["save_by_gloo"] for each in said])


def _checkpoint(said: Sequence[Seen]) -> Iterator[tuple[str, Held]]:
    ranks, ours = len(said), trained()
    found = [each["guarded"] for each in said]
    first, manifest = found[0], found[0]["manifest"]
    yield "a checkpoint: files", _same("2 N + 2", counts.checkpoint_files(ranks), [len(first["files"])])
    fsyncs = sum(each["save_operations"]["fsync"] for each in found)
    yield "a checkpoint: fsyncs", _same("3 N + 4", counts.checkpoint_fsyncs(ranks), [fsyncs])
    law = [counts.operations(first=rank == 0) for rank in range(ranks)]
    operations = [each["save_operations"] for each in found]
    total = sum(map(_names, operations))
    yield "a checkpoint: names made, renamed, opened", Held("7 N + 9", law, operations, f"{total:,}")
    yield "a checkpoint: bytes of tensors", _same("12 a parameter, 4 a tensor", ours.bytes(), [first["tensor_bytes"]])
    yield "the manifest: pieces of tensors", _same("one a rank that has rows", ours.pieces(ranks), [first["pieces"]])
    tensors = ours.manifest_bytes(ranks)
    yield "the manifest: bytes on tensors", _same("of each piece's entry", tensors, [manifest["tensors"]])
    sizes = {
        rank: (first["files"][f"tensors-{rank:05d}.safetensors"], first["files"][f"plain-{rank:05d}.json"])
        for rank in range(ranks)
    }
    yield "the manifest: bytes on files", _same("of 2 N entries", counts.files_bytes(sizes), [manifest["files"]])
    read = max(each["resumed"]["read"] for each in said)
    again = max(each["resumed"]["again"] for each in said)
    yield "a resume: files that a rank reads more than once", _same("0", 0, [again])
    yield "a resume: tensors' files that a rank reads, at most", _same("2", counts.files_read(ranks), [read])


def _names(operations: dict[str, int]) -> int:
    return sum(count for kind, count in operations.items() if kind != "fsync")


def _group(said: Sequence[Seen]) -> Iterator[tuple[str, Held]]:
    ranks, found = len(said), [each["group"] for each in said]
    yield (
        "a gloo group: open files of a rank",
        _same("N + 3", counts.descriptors(ranks), [each["descriptors"] for each in found]),
    )
    yield (
        "a gloo group: a rank's calls to the store",
        _same("N + 1", counts.store_calls(ranks), [sum(each["calls"].values()) for each in found]),
    )
    says = found[0]["bytes"]["set"]
    alone = says - counts.ADDRESS * ranks
    yield (
        "a gloo group: bytes a rank reads there",
        _same(
            f"N ({alone} + 8 N)",
            ranks * counts.store_bytes(ranks, alone),
            [each["bytes"]["get"] for each in found],
        ),
    )


def _record(said: Sequence[Seen]) -> Iterator[tuple[str, Held]]:
    ranks, found = len(said), [each["watched"] for each in said]
    yield "a watched step, DDP", _exchanged("nothing", [], said, "watched", "exchanges")
    files = sum(len(each["files"]) for each in found)
    yield "a record: files", _same("4 N", counts.record_files(ranks), [files])
    yield "a record: fsyncs, to begin", _same("2 a rank", 2, [each["create_operations"]["fsync"] for each in found])


def _same(law: str, by_law: Any, seen: Sequence[Any]) -> Held:
    differs = next((each for each in seen if each != by_law), by_law)
    return Held(law, by_law, differs, f"{differs:,}")


def _exchanged(law: str, by_law: Sequence[Collective], said: Sequence[Seen], *keys: str, counted: bool = False) -> Held:
    wanted = [tuple(each) for each in by_law]
    found = [_as_told(_at(each, keys), by_law) for each in said]
    differs = next((each for each in found if each != wanted), wanted)
    sizes = " and ".join(str(size) for _, size, _ in differs)
    shown = str(len(differs)) if counted else f"{sizes} bytes" if sizes else "nothing"
    return Held(law, wanted, differs, shown)


def _as_told(found: Sequence[Sequence[Any]], law: Sequence[Collective]) -> list[tuple[Any, ...]]:
    """Without the lengths of objects, of which no law tells."""
    unknown = {place for place, each in enumerate(law) if each.bytes is None}
    return [(kind, None if place in unknown else size, by) for place, (kind, size, by) in enumerate(found)]


def _at(said: Seen, keys: Sequence[str]) -> Any:
    for key in keys:
        said = said[key]
    return said
