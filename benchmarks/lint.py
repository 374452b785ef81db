"""Speed of ``ampwise check``, compared with TorchFix and ruff, and from a cold start.

Each pair reads the same files on the same core in the same run; a figure is CPU time, starting Python included.
The sources and TorchFix are fetched once, with pip, into ``.cache/lint``.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Result

CACHE = Path(__file__).parent.parent / ".cache" / "lint"
ACCELERATE, TORCHFIX = "accelerate==1.15.0", "torchfix==0.7.0"
# Mostly models, of which little is analysed, and mostly training, of which nearly all is.
BESIDE_RUFF = ("transformers==5.22.2", "timm==1.0.31", "open-clip-torch==3.3.0")
BIN = Path(sys.executable).parent

SMALL_SCRIPT = """\
import torch

model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=1000)
scaler = torch.amp.GradScaler("cuda")

for step in range(1000):
    x = torch.randn(64, 512, device="cuda")
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    if step % 100 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    result = Result(
        name="lint",
        title="Checking source: ampwise check, all rules",
        claim="Lines per second over another tool's, and the time a check of one small file adds to starting Python.",
        columns=["what", "lines", "ampwise s", "other s", "ratio"],
    )
    result.rows = [_beside_torchfix(), *map(_beside_ruff, BESIDE_RUFF), *_cold_starts()]
    result.notes = [
        "CPU seconds, user and system, on one core, starting Python included. ratio: other over ampwise.",
        f"{ACCELERATE} with {TORCHFIX} (all its rules, once); {', '.join(BESIDE_RUFF)} with {_ruff_version()} "
        "(--select ALL --no-cache --isolated, best of 3); ampwise --select ALL --isolated --jobs 1, best of 3.",
        "Cold start, best of 20: other is `python -c pass`; the last column is the difference in milliseconds.",
    ]
    result.publish()


def _beside_torchfix() -> list[str | float]:
    folder = _sources(ACCELERATE)
    tools = CACHE / TORCHFIX
    if not tools.is_dir():
        _pip("install", "--target", str(tools), TORCHFIX)
    other = _cpu_s([sys.executable, "-m", "torchfix", "--select", "ALL", str(folder)], {"PYTHONPATH": str(tools)})
    return _row("accelerate, beside TorchFix", folder, other)


def _beside_ruff(requirement: str) -> list[str | float]:
    folder = _sources(requirement)
    command = [str(BIN / "ruff"), "check", "--select", "ALL", "--no-cache", "--isolated", "--exit-zero", str(folder)]
    return _row(f"{requirement.partition('==')[0]}, beside ruff", folder, min(_cpu_s(command) for _ in range(3)))


def _row(what: str, folder: Path, other_s: float) -> list[str | float]:
    command = [sys.executable, "-m", "ampwise", "check", "--select", "ALL", "--isolated", "--jobs", "1", str(folder)]
    own_s = min(_cpu_s(command) for _ in range(3))
    lines = sum(path.read_bytes().count(b"\n") for path in folder.rglob("*.py"))
    return [what, str(lines), own_s, other_s, other_s / own_s]


def _cold_starts() -> list[list[str | float]]:
    CACHE.mkdir(parents=True, exist_ok=True)
    script = CACHE / "small.py"
    script.write_text(SMALL_SCRIPT)
    nothing = min(_cpu_s([sys.executable, "-c", "pass"]) for _ in range(20))
    command = [sys.executable, "-m", "ampwise", "check", "--isolated", str(script)]
    own = min(_cpu_s(command) for _ in range(20))
    return [
        ["cold start, a small script", str(SMALL_SCRIPT.count("\n")), own, nothing, f"+{(own - nothing) * 1e3:.0f} ms"]
    ]


def _cpu_s(command: Sequence[str], environment: dict[str, str] | None = None) -> float:
    """CPU time of a command and its children; the exit code, 1 for findings, does not matter."""
    settings = os.environ | (environment or {})
    settings.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program starts from its bytecode
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def _sources(requirement: str) -> Path:
    """The folder of a package's source, fetched once."""
    folder = CACHE / requirement
    if not folder.is_dir():
        started = time.monotonic()
        _pip("download", "--no-deps", "--dest", str(folder), requirement)
        for wheel in folder.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder / "source")
            wheel.unlink()
        print(f"fetched {requirement} in {time.monotonic() - started:.0f} s")
    return folder / "source"


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def _ruff_version() -> str:
    return subprocess.run([BIN / "ruff", "--version"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
