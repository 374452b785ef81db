"""docs/concepts/autocast.md: autocast's lists of operations, as the pinned torch has them."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from tools.markdown import NOTICE, Pages, page, table

from ampwise.errors import BadInput

__all__ = ["PAGE", "autocast_page"]

PAGE = "docs/concepts/autocast.md"
REPOSITORY = Path(__file__).resolve().parent.parent
DEVICES = {"cuda": "CUDA", "cpu": "CPU"}
DONE = {
    "lower": "16 bits",
    "fp32": "FP32",
    "widest": "the widest",
    "refused": "refused",
}
MEANING = {
    "lower": "**16 bits.** Floating-point arguments are cast to the type of the region, BF16 or FP16:",
    "fp32": "**FP32.** Arguments are cast to FP32, or the result is requested in FP32:",
    "widest": "**The widest.** Arguments of several types are cast to the widest of them:",
    "refused": "**Refused.** An error says what to use instead:",
}

INTRO = """
Within `torch.autocast`, each operation is looked up by name in lists for the device. The lists below are those of
torch {version}. They are read from torch itself: each operation was called under autocast on tensors without memory,
and its casts were recorded. `make docs` reads them again.
"""

READING = """
- **Operations on no list** run in the dtypes of their inputs: `relu` of BF16 is BF16. If these differ, torch promotes
  as it does without autocast: BF16 plus FP32 is FP32.
- **On a CPU far less is in FP32.** `layer_norm`, `softmax`, `sum`, `exp`, `log` and `pow` are on CUDA's list and not on
  the CPU's, where they take and return BF16. A model that works on a GPU may therefore fail on a CPU, and the other way
  round.
- **In-place and `out=` variants** (`a.addmm_(b, c)`, `torch.mm(a, b, out=c)`) are on no list.
- **Integers and FP64** are not cast.
- **A backward pass** runs in the dtypes of its forward pass, and needs no autocast:
  [AMP111](../rules/AMP111-backward-in-autocast.md).
- **`F.cross_entropy`** is `log_softmax` and `nll_loss` on CUDA, and so in FP32.
- **`binary_cross_entropy`** on probabilities is refused on CUDA; `binary_cross_entropy_with_logits` is the same loss
  without the overflow: [AMP402](../rules/AMP402-bceloss-autocast.md).
- **`torch.autocast(enabled=False)`** casts nothing: BF16 inputs stay BF16. Cast the inputs, or use
  `@ampwise.keep("fp32")`: [AMP406](../rules/AMP406-autocast-disabled-without-cast.md).

To see the precision of each module of your model: `ampwise run train.py`, then the modules in
[the report](../report.md). To keep a module in FP32: [policies](../engine.md#modules-that-differ).
"""

Lists = Mapping[str, Mapping[str, str]]


def autocast_page(root: Path) -> Pages:
    """Return the page; nothing if the installed torch is not the pinned one, as its lists may differ."""
    pinned = _pinned(root / "constraints.txt")
    if pinned is None or pinned != _installed():
        return {}
    return {PAGE: page([NOTICE, *_parts(pinned, _by_function(_asked()))])}


def _pinned(constraints: Path) -> str | None:
    text = constraints.read_text(encoding="utf-8") if constraints.is_file() else ""
    found = re.search(r"^torch==(\S+)", text, re.MULTILINE)
    return found[1] if found else None


def _installed() -> str | None:
    try:
        return importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _asked() -> Lists:
    command = [sys.executable, "-m", "tools.autocast_lists"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadInput(f"{' '.join(command[1:])}: exit code {done.returncode}: {done.stderr[-500:]}")
    lists: Lists = json.loads(done.stdout)
    return lists


def _by_function(asked: Lists) -> dict[str, dict[str, str]]:
    """Merge the overloads of each function; they are all on the same list."""
    merged: dict[str, dict[str, str]] = {}
    for device, lists in asked.items():
        merged[device] = {}
        for name, done in lists.items():
            function = name.partition(".")[0]
            if merged[device].setdefault(function, done) != done:
                raise BadInput(f"autocast on {device} treats overloads of {function} differently; show them apart")
    return merged


def _parts(version: str, lists: Lists) -> Iterator[str]:
    yield "# Autocast's lists"
    yield INTRO.strip().format(version=version)
    yield "## How to read them"
    yield READING.strip()
    for device, title in DEVICES.items():
        yield f"## On {title}"
        for done, meaning in MEANING.items():
            names = [name for name, answer in lists[device].items() if answer == done]
            if names:
                yield meaning
                yield _listed(names)
    yield "## Operation by operation"
    yield "Names are those of torch's operators. A dash: on no list of that device."
    yield table(["operation", *DEVICES.values()], list(_rows(lists)))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names, key=_order))


def _rows(lists: Lists) -> Iterator[list[str | None]]:
    for name in sorted({name for names in lists.values() for name in names}, key=_order):
        answers = (lists[device].get(name) for device in DEVICES)
        yield [f"`{name}`", *(None if answer is None else DONE[answer] for answer in answers)]


def _order(name: str) -> tuple[bool, str]:
    """Sort torch's internal operators last."""
    return name.startswith("_"), name
