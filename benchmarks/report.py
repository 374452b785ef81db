"""Time of a report: from a record to a page, and from the page's file to a rendered page.

The longest run that is promised: a hundred thousand steps of a model of three hundred tensors, with as many samples of
its gradients as a record keeps; and a run of an afternoon. Times are medians of a few goes, in a headless Chromium.
"""

from __future__ import annotations

import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ampwise.numbers.census.algebra import Census
from ampwise.report.page import page
from ampwise.runs.reader import Run
from ampwise.runs.rows import LayerSample, StepRow
from ampwise.runs.writer import RecordWriter
from benchmarks.harness import Result, note

GOES = 5
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def main() -> None:
    from playwright.sync_api import sync_playwright

    path = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
    if path is None:
        sys.exit("benchmarks.report: no Chromium was found; install one, or put it on the PATH")
    result = Result(
        name="report",
        title="The report of a run: reading, writing, painting",
        claim="At most 1.5 MB, and at most 2 s until the first paint, for a run of 100,000 steps and 300 layers.",
        columns=["run", "read s", "page s", "page kB", "first paint ms", "all drawn ms"],
    )
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        for name, steps, layers in (
            ("1,000 steps × 40 layers", 1_000, 40),
            ("100,000 steps × 300 layers", 100_000, 300),
        ):
            note(f"writing {name}")
            record = _written(Path(folder, str(steps)), steps, layers)
            result.rows.append([name, *_measured(browser, record)])
        version = browser.version
        browser.close()
    result.notes = [
        f"Headless Chromium {version}, medians of {GOES} loads of the file; painting is from the start of navigation.",
        "Gradients that FP16 loses a part of in every layer, so that every cell of the heat maps is counted.",
    ]
    result.publish()


def _measured(browser: Any, record: Path) -> list[float]:
    run, read_s = _timed(lambda: Run.read(record))
    text, page_s = _timed(lambda: page(run))
    file = record / "page.html"
    file.write_text(text, encoding="utf-8")
    paints, draws = zip(*(_painted(browser, file) for _ in range(GOES)), strict=True)
    return [read_s, page_s, len(text.encode()) / 1000, statistics.median(paints), statistics.median(draws)]


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    done = work()
    return done, time.perf_counter() - start


def _painted(browser: Any, file: Path) -> tuple[float, float]:
    view = browser.new_page()
    view.goto(file.as_uri())
    view.wait_for_selector("html[data-ready]", state="attached")
    drawn = view.evaluate("performance.now()")
    paint = "performance.getEntriesByName('first-contentful-paint').map(entry => entry.startTime)[0]"
    view.wait_for_function(f"{paint} !== undefined")
    first = view.evaluate(paint)
    view.close()
    return first, drawn


def _written(folder: Path, steps: int, layers: int) -> Path:
    """A record as the watch writes it."""
    chance = random.Random(0)
    writer = RecordWriter.create(folder, command=["python", "train.py"], script="train.py")
    names = [f"transformer.h.{n // 6}.part{n % 6}.weight" for n in range(layers)]
    scale = 65536.0
    for step in range(1, steps + 1):
        skipped = chance.random() < 0.002
        scale = max(16.0, scale / 2) if skipped else min(2.0**24, scale * 2) if step % 2000 == 0 else scale
        loss = 8 * step**-0.12 + chance.gauss(0, 0.05)
        norm = math.inf if skipped else abs(chance.gauss(1, 0.2))
        writer.step(StepRow(step=step, seconds=step / 5, loss=loss, scale=scale, norm=norm, skipped=skipped, lr=1e-3))
        if step % max(10, steps // 512) == 0 and step % writer.sample_every(step) == 0:
            counted = {name: _gradients(-20 - 10 * n // layers, scale) for n, name in enumerate(names)}
            writer.layers(LayerSample(first=step, last=step, scale=scale, layers=counted))
    writer.fact("precision", "fp16")
    writer.findings([])
    writer.close("finished", 0)
    return folder


def _gradients(middle: int, scale: float) -> Census:
    """A bell over the powers of two, without what FP16 cannot hold at this scale."""
    bell = {at: int(4000 * math.exp(-(((at - middle) / 4.5) ** 2))) for at in range(middle - 14, middle + 6)}
    limit = -25 - round(math.log2(scale))
    kept = {at: count for at, count in bell.items() if count and at + 1 > limit}
    return Census(
        binades=kept,
        zeros=sum(bell.values()) - sum(kept.values()),
        amax=2.0 ** (max(kept) + 0.7),
        amin=2.0 ** (min(kept) + 0.3),
        sum_squares=sum(count * 4.0 ** (at + 0.5) for at, count in kept.items()),
    )


if __name__ == "__main__":
    main()
