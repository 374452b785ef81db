"""Memory of other people's models, predicted without a GPU and then measured on one.

``python -m benchmarks.memory_families --predict FILE`` predicts, on any machine; ``--measure FILE`` on a Hopper GPU
measures the same rows, each family in a process of its own, and publishes; without options it does both. The families
of the ``unseen`` half were drawn by lot (``memory_models.py``), and measured once, when the prediction was finished.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ampwise.train.precision.precision import precision_named
from ampwise.tune.memory.decoder import decoder_factory, decoder_shape
from ampwise.tune.memory.result import COMPILED_LEAST, LASTING
from ampwise.tune.memory.setup import TrainingSetup
from ampwise.tune.train_case import CaseFactory, make_factory
from benchmarks.harness import Result, note
from benchmarks.memory import MIB, WORKSPACES, Measured
from benchmarks.memory_models import SEEN, UNSEEN

CLOSE = 0.05
LONGEST = 240  # seconds for a family
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a family is trained: which of its two batch sizes, the precision, and with what."""

    size: int = 1
    precision: str
    optimizer: str = "adamw"
    checkpointing: bool = False
    compiled: bool = False
    fsdp: int = 1

    def __str__(self) -> str:
        parts = (
            self.precision,
            "8-bit states" * (self.optimizer == "adamw8bit"),
            "recomputed" * self.checkpointing,
            "compiled" * self.compiled,
            f"a rank of {self.fsdp}" * (self.fsdp > 1),
        )
        return ", ".join(filter(None, parts))


USUAL = (
    Way(precision="fp32", size=0),
    Way(precision="fp32"),
    Way(precision="fp16"),
    Way(precision="bf16", size=0),
    Way(precision="bf16"),
    Way(precision="bf16-pure", size=0),
    Way(precision="bf16", checkpointing=True),
)
EIGHT_BITS = Way(precision="bf16-pure", optimizer="adamw8bit", size=0)
COMPILED, FP8 = Way(precision="bf16", compiled=True), Way(precision="fp8")
MORE = {
    "GPT-2 (transformers)": (EIGHT_BITS,),
    "Llama with GQA (transformers)": (EIGHT_BITS, FP8),
    "Qwen3 (transformers)": (EIGHT_BITS, FP8, COMPILED),
    "BLOOM (transformers)": (EIGHT_BITS, COMPILED),
    "BEiT-B (timm)": (COMPILED,),
    "Mixer-B (timm)": (COMPILED,),
}
NO_BLOCKS = ("LSTM", "GRU", "RegNet", "VAE", "Recommender", "VGG", "T5", "Whisper")  # that can be recomputed like this
LLAMA_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128_256, "seq": 2048}
DECODERS: dict[str, tuple[dict[str, int], tuple[int, int]]] = {
    "decoder, 8.0 B": (LLAMA_8B, (1, 4)),
    "decoder, 0.27 B": ({"layers": 16, "hidden": 1024, "heads": 16, "seq": 1024}, (1, 4)),
    "decoder, 1.2 B": ({"layers": 20, "hidden": 2048, "heads": 16, "seq": 1024}, (1, 4)),
}
SHARDED = tuple(
    Way(precision=precision, fsdp=8, checkpointing=again, size=size)
    for precision, again, size in (("bf16", False, 1), ("bf16", True, 0), ("fp32", True, 1), ("bf16", False, 0))
)
LARGE = tuple(Way(precision="bf16-pure", optimizer="adamw8bit", checkpointing=True, size=size) for size in (0, 1))


def maker_of(family: str) -> tuple[CaseFactory, tuple[int, int]]:
    if family in DECODERS:
        sizes, batches = DECODERS[family]
        return decoder_factory(decoder_shape(None, sizes)), batches
    function, batches = (SEEN | UNSEEN)[family]
    return make_factory(function, family), batches


def ways(family: str) -> tuple[Way, ...]:
    if family in DECODERS:
        return LARGE if "8.0" in family else SHARDED
    usual = (way for way in USUAL if not (way.checkpointing and any(part in family for part in NO_BLOCKS)))
    return (*usual, *MORE.get(family, ()))


def halves() -> dict[str, tuple[str, ...]]:
    return {"seen": (*SEEN,), "unseen": (*UNSEEN,), "large": (*DECODERS,)}


def predicted(half: str, family: str, way: Way) -> Row:
    """One row from fake tensors; what fails is in it."""
    maker, batches = maker_of(family)
    found: Row = {"half": half, "family": family, "batch": batches[way.size], "way": asdict(way)}
    try:
        setup = TrainingSetup(
            maker, optimizer=way.optimizer, checkpointing=way.checkpointing, workspaces=WORKSPACES, fsdp=way.fsdp
        )
        usage = setup.step(precision_named(way.precision), batches[way.size]).usage
        found |= {"predicted": usage.peak, "phases": dict(usage.phases), "split": dict(usage.split)}
        if way.compiled:
            lasting = sum(usage.most.get(kind, 0) for kind in LASTING)
            found["from"] = lasting + round(COMPILED_LEAST * (usage.least - lasting))
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
    return found


def measured(row: Row) -> Row:
    """The same row with what the device says."""
    way = Way(**row["way"])
    try:
        options = {name: value for name, value in row["way"].items() if name not in ("size", "precision")}
        seen = Measured(maker_of(row["family"])[0], row["batch"], way.precision, **options).run()
        return row | {"measured": seen["peak"], "device_phases": seen["phases"], "reserved": seen["reserved"]}
    except Exception as error:
        return row | {"failed_there": f"{type(error).__name__}: {str(error)[:300]}"}


def told(row: Row) -> str:
    guess, seen = row.get("predicted"), row.get("measured")
    ratio = f", ratio {guess / seen:.4f}" if guess and seen else ""
    sizes = " against ".join(f"{size / MIB:.0f} MiB" for size in (guess, seen) if size)
    failed = "; ".join(row[name] for name in ("failed", "failed_there") if name in row)
    return f"{row['family']}, {row['batch']}, {Way(**row['way'])}: {sizes}{ratio} {failed}"


def measure_all(rows: Sequence[Row], jobs: int, limit: float) -> list[Row]:
    """Measure each family in a process of its own, several at a time: a process counts only what it allocates itself.

    Ways that leave something behind in a process have one for themselves.
    """
    groups: dict[str, list[Row]] = {}
    for index, row in enumerate(rows):
        alone = row["way"]["compiled"] or row["way"]["fsdp"] > 1 or row["family"].startswith("decoder")
        groups.setdefault(f"{row['family']} {index if alone else ''}", []).append(row)
    ends = time.monotonic() + limit

    def one(folder: Path, number: int, group: list[Row]) -> list[Row]:
        file = folder / f"{number}.json"
        file.write_text(json.dumps(group))
        try:
            left = max(1.0, min(LONGEST, ends - time.monotonic()))
            subprocess.run([sys.executable, "-m", __spec__.name, "--child", str(file)], timeout=left, check=False)
        except subprocess.TimeoutExpired:
            note(f"{group[0]['family']}: stopped")
        return json.loads(file.read_text())  # type: ignore[no-any-return]

    slow_first = sorted(
        groups.values(),
        key=lambda group: not any(row["way"]["optimizer"] != "adamw" or row["way"]["compiled"] for row in group),
    )
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        found = pool.map(partial(one, Path(folder)), range(len(slow_first)), slow_first)
        return [row for group in found for row in group]


def child(file: Path) -> None:
    rows = json.loads(file.read_text())
    for index, row in enumerate(rows):
        rows[index] = measured(row)
        print(told(rows[index]), flush=True)
        file.write_text(json.dumps(rows))  # after each: what is there stays, whatever comes


class FamiliesResult(Result):
    def _command(self) -> str:
        return "make gpu-bench NAME=memory_families"


def tables(rows: Sequence[Row]) -> Iterator[Result]:
    """Yield tables of the families, of large and sharded models, and of compiled ones."""
    columns = ["family", "batch", "training", "predicted, GB", "measured, GB", "ratio"]
    families = FamiliesResult(
        name="memory_families_gpu",
        title="Memory of other people's models",
        claim="The peak of a whole step with random weights, predicted on a CPU, against "
        "torch.cuda.max_memory_allocated(). The seen half was looked at during development; the unseen half was drawn "
        "by lot before, and measured once, when the prediction was finished. GB are 10⁹ bytes.",
        columns=["half", *columns],
    )
    plain = [row for row in rows if not row["way"]["compiled"] and row["half"] != "large"]
    families.rows += [[row["half"], *_cells(row)] for row in plain]
    for half in ("seen", "unseen"):
        of_half = [row for row in plain if row["half"] == half]
        names = {row["family"] for row in of_half}
        close = sum(map(_is_close, of_half))
        whole = sum(all(_is_close(row) for row in of_half if row["family"] == each) for each in names)
        families.notes.append(
            f"{half}: {close} of {len(of_half)} rows within 5 %; {whole} of {len(names)} families in every row."
        )
    yield families
    yield FamiliesResult(
        name="memory_scale_gpu",
        title="Memory of large and of sharded models",
        claim="The same for decoders: full fine-tuning of 8.0 B parameters with BF16 weights and 8-bit states on one "
        "GPU; and a rank of 8 with FSDP2, on one GPU with a process group that communicates nothing.",
        columns=columns,
        rows=[_cells(row) for row in rows if row["half"] == "large"],
    )
    yield FamiliesResult(
        name="memory_compiled_gpu",
        title="Memory of compiled models",
        claim="torch.compile decides anew what to save. From and to: the range of `ampwise memory --compiled`.",
        columns=["family", "batch", "training", "from, GB", "to, GB", "measured, GB", "inside"],
        rows=[_compiled_cells(row) for row in rows if row["way"]["compiled"]],
    )


def _compiled_cells(row: Row) -> list[str | float]:
    least, most, seen = row.get("from", 0), row.get("predicted", 0), row.get("measured", 0)
    family, batch, training, *_ = _cells(row)
    inside = "yes" if least <= seen <= most else "no"
    return [family, batch, training, least / 1e9, most / 1e9, seen / 1e9, inside]


def _cells(row: Mapping[str, Any]) -> list[str | float]:
    sizes = [row[each] / 1e9 if each in row else "failed" for each in ("predicted", "measured")]
    ratio = row["predicted"] / row["measured"] if "predicted" in row and "measured" in row else ""
    return [row["family"], float(row["batch"]), str(Way(**row["way"])), *sizes, ratio]


def _is_close(row: Mapping[str, Any]) -> bool:
    return "predicted" in row and "measured" in row and abs(row["predicted"] / row["measured"] - 1) <= CLOSE


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_families", description=__doc__)
    parser.add_argument("--half", action="append", choices=(*halves(),), help="only this one; may be given again")
    parser.add_argument("--family", action="append", default=[], help="only families with this in their name")
    parser.add_argument("--predict", type=Path, metavar="FILE")
    parser.add_argument("--measure", type=Path, metavar="FILE")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all measurements")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        child(args.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        both = args.predict is args.measure is None
        file = Path(folder, "rows.json")
        predict, measure = (file, file) if both else (args.predict, args.measure)
        if predict:
            rows = []
            for half in args.half or halves():
                for family in halves()[half]:
                    if args.family and not any(part.lower() in family.lower() for part in args.family):
                        continue
                    for way in ways(family):
                        rows.append(predicted(half, family, way))
                        note(told(rows[-1]))
                        predict.write_text(json.dumps(rows))
        if measure:
            rows = measure_all(json.loads(measure.read_text()), args.jobs, args.limit)
            measure.write_text(json.dumps(rows))
            for table in tables(rows):
                table.publish()


if __name__ == "__main__":
    main()
