"""Cost of watching nanoGPT's own train.py, unmodified: each step under `ampwise run`, over the same step without.

``python -m benchmarks.watch_nanogpt FOLDER``, with a checkout of github.com/karpathy/nanoGPT, on a GPU. Both take
turns, each in a process of its own; times of iterations are those that the script prints, which waits for the device
in each. The tokens are random, as frequent as words are.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Result, note

SOURCE = Path(__file__).parent.parent / "src"
FILES = ("train.py", "model.py", "configurator.py")
WAYS = {
    "BF16, compiled": ("--compile=True", "--dtype=bfloat16"),
    "FP16, eager": ("--compile=False", "--dtype=float16"),
}
WANTED = {"BF16, compiled": 1.015, "FP16, eager": 1.02}
TASK = ("--dataset=zipf", "--batch_size=12", "--gradient_accumulation_steps=4", "--decay_lr=False")
PRINTED = ("--eval_interval=100000", "--eval_iters=1", "--log_interval=1", "--always_save_checkpoint=False")
ROUNDS, ITERATIONS, SETTLED = 2, 70, 25  # the first iterations compile, and settle
TIME = re.compile(r"^iter \d+: .*, time ([\d.]+)ms", re.MULTILINE)
LETTERS, HELD_BACK, WORDS = 8_000_000, 400_000, 50257


def measured(folder: Path) -> Result:
    result = Result(
        name="watch_nanogpt_gpu",
        title="nanoGPT's own train.py, unmodified, under ampwise run",
        claim="GPT-2 124M, 4 micro-batches of 12×1024 tokens: median milliseconds of an iteration in each round, with "
        "and without watching, in turns.",
        columns=["way", "plain ms", "ampwise run ms", "ratio", "wanted"],
        notes=[f"{ROUNDS} rounds of {ITERATIONS} iterations, without the first {SETTLED}; ratio: of the medians."],
    )
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        for each in FILES:
            shutil.copy(folder / each, here)
        _write_tokens(here / "data" / "zipf")
        for way, options in WAYS.items():
            plain, watched = [], []
            for _ in range(ROUNDS):
                plain.append(_median(here, (), options))
                watched.append(_median(here, ("-m", "ampwise", "run"), options))
                note(f"{way}: {plain[-1]:.1f} and {watched[-1]:.1f} ms")
            ratio = statistics.median(watched) / statistics.median(plain)
            cells = (", ".join(f"{each:.1f}" for each in times) for times in (plain, watched))
            result.rows.append([way, *cells, f"{ratio:.3f}", f"{WANTED[way]} at most"])
    return result


def _write_tokens(folder: Path) -> None:
    folder.mkdir(parents=True)
    chance = np.random.default_rng(0)
    for name, size in (("train", LETTERS), ("val", HELD_BACK)):
        np.minimum(chance.zipf(1.3, size), WORDS - 1).astype(np.uint16).tofile(folder / f"{name}.bin")


def _median(here: Path, prefix: Sequence[str], options: Sequence[str]) -> float:
    command = [sys.executable, *prefix, "train.py", *TASK, *PRINTED, f"--max_iters={ITERATIONS}", *options]
    run = subprocess.run(
        command, cwd=here, env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True
    )
    return statistics.median(float(each) for each in TIME.findall(run.stdout)[SETTLED:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a checkout of nanoGPT")
    folder = parser.parse_args(arguments).folder
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        parser.error(f"{folder} has no {missing[0]}: give a checkout of github.com/karpathy/nanoGPT")
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    measured(folder).publish()


if __name__ == "__main__":
    main()
