"""Shared by all benchmarks: timing, the table on the terminal, the file in ``results/``.

A claim is a ratio of two things measured in the same run. Times are medians, and are never tested.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

import torch

__all__ = ["Contender", "Result", "Times", "alternate", "gpu_ms", "host_ms", "note", "publish_parts"]

RESULTS = Path(__file__).parent / "results"


@dataclass(kw_only=True)
class Result:
    """One benchmark's outcome; ``columns`` and ``rows`` are the table, as it is printed and published."""

    name: str
    title: str
    claim: str
    columns: list[str]
    rows: list[list[str | float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def publish(self) -> None:
        """Print the table and write ``results/<name>.json``."""
        print(f"\n{self.title}\n{self.claim}\n")
        texts = [self.columns, *([_text(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[column]) for row in texts) for column in range(len(self.columns))]
        for row in texts:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        for note in self.notes:
            print(f"- {note}")
        RESULTS.mkdir(exist_ok=True)
        record = asdict(self) | {
            "rows": [[cell if isinstance(cell, str) else float(_text(cell)) for cell in row] for row in self.rows],
            "machine": _machine(),
            "date": date.today().isoformat(),
            "versions": _versions(),
            "command": self._command(),
        }
        path = RESULTS / f"{self.name}.json"
        path.write_text(json.dumps(record, indent=2) + "\n")
        print(f"\nwritten to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")

    def _command(self) -> str:
        target = "gpu-bench" if torch.cuda.is_available() else "bench"
        package, _, module = getattr(sys.modules["__main__"].__spec__, "name", "").partition(".")
        name = module.removesuffix(".__main__") if package == "benchmarks" else self.name.split("_")[0]
        given = shlex.join(Path(each).name if each.startswith("/") else each for each in sys.argv[1:])
        return f"make {target} NAME={name}" + (f" ARGS={shlex.quote(given)}" if given else "")


def gpu_ms(work: Callable[[], object], repeats: int = 30, per_graph: int = 5) -> float:
    """Median device time of one call, from replays of a CUDA graph: launches cost nothing, gaps do not show."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(per_graph):
            work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / per_graph)
    return float(statistics.median(times))


def host_ms(work: Callable[[], object], repeats: int = 15) -> float:
    """Median wall time of one call, the device's work included."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do what is compared."""

    name: str
    work: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext  # entered before the clock starts


@dataclass(kw_only=True)
class Times:
    """Of one contender, a time for each round: ms of a call until the device is done, and until the host is."""

    name: str
    ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)

    @property
    def median_host_ms(self) -> float:
        return statistics.median(self.host_ms)

    def ratio(self, other: Times) -> float:
        """Median of the ratios within a round: what slows the machine down for a while slows down both."""
        return statistics.median(mine / its for mine, its in zip(self.ms, other.ms, strict=True))

    def host_ratio(self, other: Times) -> float:
        return statistics.median(mine / its for mine, its in zip(self.host_ms, other.host_ms, strict=True))


def alternate(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    calls: int,
    clock: Callable[[], float] = time.perf_counter,
    ready: Callable[[], object] | None = None,
) -> list[Times]:
    """Times of contenders that take turns: in each round all of them, in the other order than in the round before.

    A turn is ``calls`` calls, after one that is not timed. ``ready`` is called before the clock starts.
    """
    times = [Times(name=each.name) for each in contenders]
    turns = list(zip(contenders, times, strict=True))
    for _ in range(rounds):
        for contender, its in turns:
            with contender.around():
                contender.work()
                _wait()
                if ready is not None:
                    ready()
                start = clock()
                for _ in range(calls):
                    contender.work()
                its.host_ms.append((clock() - start) * 1e3 / calls)
                _wait()
                its.ms.append((clock() - start) * 1e3 / calls)
        turns.reverse()
    return times


def note(text: str) -> None:
    """How far a long benchmark has come, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def publish_parts(
    name: str,
    description: str,
    parts: Mapping[str, Callable[[], Result]],
    only_on_gpu: Sequence[str],
    arguments: Sequence[str] | None = None,
) -> None:
    """Run a benchmark of several parts, or those that are asked for, each with a result of its own."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--part", choices=parts, action="append", help="only this one; may be given again")
    asked = parser.parse_args(arguments).part
    possible = [part for part in parts if torch.cuda.is_available() or part not in only_on_gpu]
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        if missing := [part for part in asked or () if part not in possible]:
            parser.error(f"--part {missing[0]} needs a CUDA device")
    for part in asked or possible:
        note(f"part {part}")
        parts[part]().publish()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _text(cell: str | float) -> str:
    return cell if isinstance(cell, str) else f"{cell:.4g}"


def _machine() -> dict[str, str]:
    found = {"system": f"{platform.system()} {platform.machine()}", "threads": str(torch.get_num_threads())}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "accelerate", "lightning_fabric"):  # those that took part
        if name in sys.modules:
            versions[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return versions
