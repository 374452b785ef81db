"""`ampwise bench` on popular models: every precision, eager and compiled, and what guides promise.

    python -m benchmarks.precisions
    python -m benchmarks.precisions --part gpt2

On a CUDA device: GPT-2, ResNet-50, a GPT of 1.3 B parameters (each in two parts, as torch.compile takes its time for
every precision), and the scorer with two opposed heads in its three ways. Elsewhere a small GPT.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ampwise.tune.bench.bench import bench
from ampwise.tune.bench.result import BenchResult
from ampwise.tune.bench.speeds import PrecisionRow, SpeedComparison
from benchmarks.harness import Result, note, publish_parts

__all__ = ["main"]

COLUMNS = [
    "row", "step ms", "×FP32", "low", "high", "per second", "% of peak", "GiB", "idle %", "loss", "verdict",
]  # fmt: skip
CLAIM = (
    "Whole training steps (forward, backward, clip to 1.0, fused AdamW) in turns on one model; ×FP32 is the median of "
    "ratios within a round, low and high its 10% and 90% quantiles; peak is the datasheet's dense one."
)
GUIDES = "Guides promise 2.8× for FP16 and 2.7× for BF16 on an A100, for GPT-2 124M: 15 k, 42 k and 40 k tokens/s."


def _row(row: PrecisionRow, speeds: SpeedComparison) -> list[str | float]:
    if row.step_s is None:
        return [row.label, *["-"] * 9, row.problem or "-"]
    ratio = row.ratio_to_eager
    share, rate = row.peak_share(speeds.flops), row.per_second(speeds.tokens or speeds.batch)
    return [
        row.label,
        1e3 * row.step_s.median,
        *(["-"] * 3 if ratio is None else [ratio.median, ratio.low, ratio.high]),
        rate if rate is not None else "-",
        "-" if share is None else 100 * share,
        "-" if row.memory is None else row.memory.peak / 2**30,
        "-" if row.idle_share is None else 100 * row.idle_share,
        "-" if row.loss is None else row.loss.loss,
        str(speeds.verdict(row) or "-"),
    ]


def _notes(result: BenchResult) -> list[str]:
    speeds = result.speeds
    noise = "not measured" if speeds.noise is None else f"±{speeds.noise:.2%}, in {speeds.rounds} rounds"
    flops = "not counted" if speeds.flops is None else f"{speeds.flops / 1e12:.4g} TFLOP a step, as torch counts them"
    notes = [f"{result.verdict}.", f"Noise: {noise}, FP32 against itself. Work: {flops}."]
    if speeds.clocks is not None:
        held = " and ".join(speeds.clocks.held_back_by) or "nothing"
        notes.append(f"Clock: {speeds.clocks.lowest} to {speeds.clocks.top} MHz, held back by {held}.")
    notes += [f"{finding.rule.code} {finding.rule.name}: {finding.message}" for finding in result.findings]
    gains = [_gain(layer.name, layer.ratio("bf16")) for layer in speeds.layers[:8] if layer.ratio("bf16")]
    return [*notes, f"Layers in BF16, ×FP32: {', '.join(gains)}."] if gains else notes


def _gain(name: str, ratio: float | None) -> str:
    return f"{name} {ratio:.2f}"


def _measured(title: str, name: str, subject: str, **options: Any) -> Result:
    result = bench(f"benchmarks.subjects:{subject}", progress=_told, **options)
    print(result)
    speeds = result.speeds
    per = "tokens" if speeds.tokens is not None else "samples"
    sized = f"{title}, {speeds.batch} rows" + (f", {speeds.tokens:,} tokens" if speeds.tokens else "")
    return Result(
        name=f"precisions_{name}_{'gpu' if speeds.device == 'cuda' else 'cpu'}",
        title=f"Precisions compared: {sized} a step, {per} a second",
        claim=CLAIM,
        columns=COLUMNS,
        rows=[_row(row, speeds) for row in speeds.rows],
        notes=_notes(result),
    )


def _told(done: int, total: int, doing: str) -> None:
    note(f"{done}/{total} {doing}")


def gpt2() -> Result:
    result = _measured("GPT-2 124M", "gpt2", "gpt2")
    result.notes.append(GUIDES)
    return result


def gpt2_compiled() -> Result:
    return _measured("GPT-2 124M", "gpt2_compiled", "gpt2", compiled=True, rounds=5)


def resnet50() -> Result:
    return _measured("ResNet-50", "resnet50", "resnet50")


def resnet50_compiled() -> Result:
    return _measured("ResNet-50", "resnet50_compiled", "resnet50", compiled=True, rounds=5)


def gpt_1_3b() -> Result:
    return _measured("GPT 1.3 B", "gpt1300m", "gpt_1_3b", rounds=5, steps=1)


def gpt_1_3b_compiled() -> Result:
    """FP32 and BF16 alone: each precision takes torch.compile half a minute."""
    return _measured(
        "GPT 1.3 B", "gpt1300m_compiled", "gpt_1_3b", precisions=["bf16"], compiled=True, rounds=3, steps=1
    )


def relevance() -> Result:
    """BF16; TF32; and FP16 with the two heads, whose scores are subtracted, in FP32."""
    heads = ("compress", "particularize")
    result = _measured(
        "Relevance scorer", "relevance", "relevance", precisions=["tf32", "bf16"], compiled=True, rounds=9
    )
    kept = bench("benchmarks.subjects:relevance", ["fp16"], keep_fp32=heads, compiled=True, rounds=9, progress=_told)
    rows = [_row(row, kept.speeds) for row in kept.speeds.rows if row.precision == "fp16"]
    result.rows += [[f"{row[0]}, heads in FP32", *row[1:]] for row in rows]
    result.notes += _notes(kept)[:1]
    return result


def small_gpt(rounds: int | None = 5, precisions: Sequence[str] = ("fp32", "bf16")) -> Result:
    """On a CPU."""
    return _measured("GPT 4M", "gpt4m", "small_gpt", precisions=precisions, rounds=rounds, device="cpu")


ON_GPU = {
    "gpt2": gpt2,
    "gpt2_compiled": gpt2_compiled,
    "resnet50": resnet50,
    "resnet50_compiled": resnet50_compiled,
    "gpt_1_3b": gpt_1_3b,
    "gpt_1_3b_compiled": gpt_1_3b_compiled,
    "relevance": relevance,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parts = ON_GPU if torch.cuda.is_available() else {**ON_GPU, "small_gpt": small_gpt}
    publish_parts("precisions", __doc__ or "", parts, tuple(ON_GPU), arguments)


if __name__ == "__main__":
    main()
