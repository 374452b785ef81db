"""What ampwise's own Python takes on one core of this machine, a piece, an answer, a row: by ampwise's own functions.

Without ranks: the first rank of hundreds is played with the pieces that they would send it.
"""

from __future__ import annotations

import hashlib
import pickle
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.distributed_c10d import _object_to_tensor, _tensor_to_object

from ampwise import Engine, Guard
from ampwise.guard.disk.catalog import SavedCheckpoint
from ampwise.guard.disk.manifest import CheckpointManifest, StoredFile, plain_file, tensors_file
from ampwise.guard.disk.writing import LocalPiece, plan_pieces
from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.measure import census
from ampwise.runs.reader import Run
from ampwise.runs.rows import LayerSample, StepRow
from ampwise.runs.writer import RecordWriter
from benchmarks.scale.models import Model, piece_rows

__all__ = ["be_the_first", "every", "pieces"]

ROWS = 2000  # of a record
SAMPLES = 20
TENSORS = 100


def every(model: Model) -> dict[str, float]:
    """All of it, by the names that ``machine`` has for it."""
    return {
        "piece_s": piece_s(model, 64),
        "piece": piece(model, 32),
        "answer_s": answer_s(),
        "own_s": own_s(),
        "sha256": sha256_rate(),
        **sent_bytes(model, 64),
        **reading(),
    }


def sent_bytes(model: Model, ranks: int) -> dict[str, float]:
    """Of a piece, in what ranks send each other; and of what they say at the end."""
    sent = [pickle.dumps(each) for each in pieces(model, ranks)]
    planned = plan_pieces([pickle.loads(each) for each in sent])
    mine = {
        piece.key: name for name, tensor in planned.items() for piece in tensor.pieces if piece.file == tensors_file(0)
    }
    saved = SavedCheckpoint(
        Path("checkpoints/step-00000001"), 1, 1, 0.0, 1, ranks, {"command": ["train.py"]}, False, ""
    )
    return {
        "planned": len(sent[0]) / len(pickle.loads(sent[0])),
        "shared": len(pickle.dumps(mine)) / len(mine),
        "told": len(pickle.dumps(saved)),
    }


def piece_s(model: Model, ranks: int) -> float:
    """Seconds that the first rank takes for a piece: unpickled, planned, merged and told."""
    sent = [pickle.dumps(each) for each in pieces(model, ranks)]
    return _seconds(lambda: be_the_first(sent), repeats=1) / model.items(ranks, ranks)


def piece(model: Model, ranks: int) -> float:
    """Bytes of its memory for a piece, at the most."""
    sent = [pickle.dumps(each) for each in pieces(model, ranks)]
    tracemalloc.start()
    be_the_first(sent)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / model.items(ranks, ranks)


def be_the_first(sent: list[bytes]) -> CheckpointManifest:
    """From what ranks sent to what they are told, and the manifest as it would be on disk."""
    planned = plan_pieces([pickle.loads(each) for each in sent])
    keys: dict[str, dict[str, str]] = {}
    for name, tensor in planned.items():
        for piece in tensor.pieces:
            keys.setdefault(piece.file, {})[piece.key] = name
    pickle.dumps(list(keys.values()))
    digest = StoredFile(1, "0" * 64)
    files = {name: digest for rank in range(len(sent)) for name in (tensors_file(rank), plain_file(rank))}
    manifest = CheckpointManifest(1, 1, time.time(), len(sent), {}, files, planned)
    return CheckpointManifest.parse(manifest.text().encode())


def pieces(model: Model, ranks: int) -> list[list[LocalPiece]]:
    """What each rank would have, had FSDP2 cut the model."""
    found: list[list[LocalPiece]] = [[] for _ in range(ranks)]
    for name, shape in model.state():
        if not shape:
            for each in found:
                each.append(LocalPiece(name, "F32", shape, (), (), True))
            continue
        for each, (first, rows) in zip(found, piece_rows(shape[0], ranks), strict=False):
            offsets, sizes = (first, *(0 for _ in shape[1:])), (rows, *shape[1:])
            each.append(LocalPiece(name, "F32", tuple(shape), offsets, sizes, True))
    return found


def own_s() -> float:
    """Seconds of the processor for a checkpoint of a small model, on one rank."""
    model = torch.nn.Linear(8, 12)
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "fp32")
    found = []
    with TemporaryDirectory() as folder, Guard(engine, folder, every="1000 steps") as guard:
        for _ in range(4):
            guard.step(lambda x: model(x).square().mean(), torch.ones(4, 8))
            found.append(_seconds(guard.save, repeats=1))
    return min(found)


def answer_s(ranks: int = 2048) -> float:
    """Seconds for a rank's word in ``all_gather_object``, besides what the exchange itself takes."""
    device = torch.device("cpu")
    word, size = _object_to_tensor(True, device, None)
    words = torch.cat([word] * ranks)

    def heard() -> list[Any]:
        sizes = list(size.repeat(ranks).unsqueeze(1))
        longest = int(max(sizes).item())
        parts = [words[longest * rank : longest * (rank + 1)] for rank in range(ranks)]
        return [_tensor_to_object(part, size, None) for part, size in zip(parts, sizes, strict=True)]

    return _seconds(heard) / ranks


def sha256_rate() -> float:
    """Bytes a second."""
    data = bytes(32_000_000)
    return len(data) / _seconds(lambda: hashlib.sha256(data).digest())


def reading() -> dict[str, float]:
    """A record of one rank, read: seconds and bytes of memory of a step, and of a tensor in a sample."""
    torch.manual_seed(0)
    found = census(torch.randn(100_000) * 1e-4)
    with TemporaryDirectory() as folder:
        steps, layers = Path(folder, "steps"), Path(folder, "layers")
        _record(steps, rows=ROWS, samples=0, found=found)
        _record(layers, rows=1, samples=SAMPLES, found=found)
        (row_s, row), (census_s, of_census) = (_read(steps, ROWS), _read(layers, SAMPLES * TENSORS))
        on_disk = (layers / "layers.jsonl").stat().st_size / (SAMPLES * TENSORS)
        line = (steps / "steps.jsonl").stat().st_size / ROWS
    return {
        "row_s": row_s,
        "row": row,
        "census_s": census_s,
        "census": of_census,
        "row_on_disk": line,
        "census_on_disk": on_disk,
    }


def _record(folder: Path, *, rows: int, samples: int, found: Census) -> None:
    writer = RecordWriter.create(folder)
    for step in range(1, rows + 1):
        writer.step(StepRow(step=step, seconds=step / 3, loss=2.345678, norm=0.98765, scale=65536.0, lr=3e-4))
    layers = {f"blocks.{place}.down.weight": found for place in range(TENSORS)}
    for step in range(1, samples + 1):
        writer.layers(LayerSample(first=step, last=step, layers=layers))
    writer.close("finished", 0)


def _read(folder: Path, count: int) -> tuple[float, float]:
    seconds = _seconds(lambda: Run.read(folder))
    tracemalloc.start()
    run = Run.read(folder)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert run.steps
    return seconds / count, held / count


def _seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Of the processor, at the best of a few: others share this machine."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)
