"""Count what 2, 4 and 8 gloo ranks of this machine exchange and write, hold the laws against it, simulate the rest.

Seven tables, which docs/scale.md has from benchmarks/results, and its picture, docs/images/scale.svg.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness import Result, publish_parts
from benchmarks.scale.costs import costs
from benchmarks.scale.here import counted, timed
from benchmarks.scale.picture import picture
from benchmarks.scale.tables import checkpoint, limit, machine, step

__all__ = ["FIGURE", "PARTS", "main"]

FIGURE = Path(__file__).parents[2] / "docs" / "images" / "scale.svg"
PARTS: dict[str, Callable[[], Result]] = {
    "costs": costs,
    "step": step,
    "checkpoint": checkpoint,
    "limits": limit,
    "counts": counted,
    "times": timed,
    "machine": machine,
}


def main(arguments: Sequence[str] | None = None) -> None:
    publish_parts("scale", __doc__ or "", PARTS, only_on_gpu=(), arguments=arguments)
    FIGURE.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
