"""What costs what: each part of ampwise with what it exchanges and writes, and where in the code."""

from __future__ import annotations

from ampwise.runs.writer import RecordLimits
from benchmarks.harness import Result
from benchmarks.scale.counts import record_files
from benchmarks.scale.machine import CLUSTER
from benchmarks.scale.models import MODELS
from benchmarks.scale.simulation import Setting
from benchmarks.scale.words import byte_words, time_words

__all__ = ["costs"]

LARGEST = Setting(model=MODELS["1T"], ranks=16_384)
ROWS, LAYER_BYTES = RecordLimits().rows, RecordLimits().layer_bytes


def costs() -> Result:
    """Without times: those follow."""
    result = Result(
        name="scale_costs",
        title="Scale: what costs what",
        claim="Of N ranks, from the code. Counts are tested; the times are simulated, as in the next tables.",
        columns=["what", "when", "of each rank", "16,384 ranks, 1 T", "where"],
    )
    result.rows += [[*row] for row in (*_steps(), *_watching(), *_guarding(), *_seldom())]
    return result


def _steps() -> list[list[str]]:
    return [
        [
            "Engine or GradScaler, DDP",
            "step",
            "nothing: gradients are the same on all ranks",
            "nothing",
            "train/scaler/grad_stats.py, make_reduction",
        ],
        [
            "Engine or GradScaler, FSDP2: norm, skip, clipping",
            "step, each optimizer",
            "1 all-reduce of 24 bytes, device",
            time_words(LARGEST.device_s()),
            "train/scaler/grad_stats.py, reach",
        ],
        [
            "Engine, windows with weights",
            "step",
            "1 all-reduce of 8 bytes, device",
            time_words(CLUSTER.device_all_reduce_s(LARGEST.ranks, 8)),
            "train/ranks.py, mean",
        ],
        [
            "FP8, delayed scales; none for other recipes",
            "step",
            "1 all-reduce of 24 bytes a layer, device",
            f"{time_words(LARGEST.device_s(fp8=True) - LARGEST.device_s())}",
            "train/float8/delayed_scaling.py, update",
        ],
        [
            "Guard",
            "step",
            "1 all-reduce of 32 bytes, host",
            time_words(LARGEST.agree_s),
            "guard/rank_agreement.py, agree",
        ],
    ]


def _watching() -> list[list[str]]:
    return [
        [
            "watch, census",
            "step",
            "nothing exchanged; its own gradients read, in 3 % of the time at most",
            "the same",
            "watch/gradients.py, READING_SHARE",
        ],
        [
            "record of ampwise run",
            "step, sample",
            f"4 files; {CLUSTER.row_on_disk:.0f} bytes a step, up to {ROWS:,} lines; {CLUSTER.census_on_disk:.0f} a "
            f"tensor and sample, up to {byte_words(LAYER_BYTES)}",
            f"{record_files(LARGEST.ranks):,} files, {byte_words(LARGEST.record_bytes)}",
            "runs/writer.py, RecordWriter",
        ],
        ["sinks", "step", "the first rank's rows; nothing of others", "the same", "watch/watched_run.py, WatchedRun"],
        [
            "summary, report, live view",
            "end, or asked for",
            "one process reads the steps and findings of all, and the layers of the first",
            f"{time_words(LARGEST.report_s)}, {byte_words(LARGEST.report_bytes)} of memory",
            "runs/reader.py, Run.read",
        ],
    ]


def _guarding() -> list[list[str]]:
    return [
        [
            "Guard: its groups",
            "start",
            "3 gloo groups: N + 3 open files each, N + 1 calls to the store",
            f"{LARGEST.descriptors:,} open files",
            "guard/rank_agreement.py, RankAgreement",
        ],
        ["Guard begins", "start", "12 collectives", "the same", "guard/guard.py, begin"],
        [
            "snapshots",
            "every 100 steps",
            "its share copied to the host's memory, up to 5 times: 12 bytes a parameter / N",
            byte_words(5 * LARGEST.rank_bytes),
            "guard/snapshots.py, MemorySnapshots",
        ],
        [
            "checkpoint",
            "every 10 min",
            "12 collectives; 2 files, 3 fsyncs; its share written and read back",
            f"{LARGEST.files:,} files, {LARGEST.fsyncs:,} fsyncs",
            "guard/disk/writing.py, write_checkpoint",
        ],
        [
            "checkpoint, first rank",
            "every 10 min",
            "plans and merges a piece for each tensor and rank; looks up 2 N files of each that is kept, twice",
            f"{LARGEST.pieces / 1e6:.0f} M pieces",
            "guard/disk/writing.py, finish; guard/disk/catalog.py",
        ],
        [
            "resume: tensors",
            "start",
            "reads its own file, and the first rank's, which has the step counters of the optimizer",
            f"{byte_words(LARGEST.read_bytes)}, {time_words(LARGEST.read_s)}",
            "guard/disk/reading.py, CheckpointReader",
        ],
        [
            "resume: manifest",
            "start",
            "reads it once; the first rank twice",
            byte_words(2 * LARGEST.manifest_bytes),
            "guard/disk/reading.py",
        ],
    ]


def _seldom() -> list[list[str]]:
    return [
        [
            "a bad step, explained",
            "1st, 2nd, 4th, 8th …",
            "22 collectives, and the step 2 to 5 times more; a finding of 1 kB from each rank to all",
            f"{time_words(11 * LARGEST.ranks * CLUSTER.answer_s)} to hear them",
            "trace/bad_steps.py; trace/diagnosis.py",
        ],
        [
            "a capsule",
            "with it, if asked for",
            "written by the rank where it arose",
            "the same",
            "trace/bad_steps.py, _look_into",
        ],
    ]
