"""Draw demo.svg again: the demo's own run and table, as it looks on a terminal.

    python docs/images/make_demo.py

It trains for as long as the demo does. The picture refers to nothing outside itself: rich would have it load
a font from the network.
"""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from pathlib import Path

from rich.console import Console

HERE = Path(__file__).parent
DEMO = HERE.parents[1] / "examples" / "char_gpt.py"


def main() -> int:
    spec = importlib.util.spec_from_file_location("char_gpt", DEMO)
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    screen = Console(
        record=True,
        width=demo.COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        highlight=False,
    )
    demo.console = lambda file=None: (
        screen if file is None else Console(file=file, highlight=False)
    )
    status = demo.main(sys.argv[1:])
    svg = screen.export_svg(title="make demo", unique_id="demo")
    svg = re.sub(r"@font-face\s*{.*?}\s*", "", svg, flags=re.DOTALL).replace(
        "Fira Code", "ui-monospace, Menlo, Consolas"
    )
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    (HERE / "demo.svg").write_text(svg, encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
