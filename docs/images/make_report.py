"""The pictures of reports in the docs: `python docs/images/make_report.py RUN`. Needs a Chromium and Pillow.

RUN is the record of `ampwise run -o RUN examples/broken_gpt.py --steps 60`.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from ampwise.report.page import page
from ampwise.runs.reader import Run

HERE = Path(__file__).parent
COLOURS = 256  # of a palette: a page has few, and the file is a third as large
MARGIN = 16


def main() -> None:
    browser_path = shutil.which("chromium") or sys.exit("no Chromium was found")
    text = page(
        Run.read(
            sys.argv[1] if len(sys.argv) > 1 else HERE.parent.parent / "build" / "demo"
        )
    )
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder, "page.html")
        file.write_text(text, encoding="utf-8")
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox"]
        )

        def shown(width: int, height: int, scheme: str = "light") -> Page:
            view = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme=scheme,  # type: ignore[arg-type]
                device_scale_factor=1.5,
                reduced_motion="reduce",
            )
            view.goto(file.as_uri())
            view.wait_for_selector("html[data-ready]", state="attached")
            return view

        save(shown(1240, 860).screenshot(), "report.png")
        save(shown(1240, 860, "dark").screenshot(), "report-dark.png")
        save(part(shown(1240, 860), "#curves"), "report-curves.png")
        view = shown(1000, 860)
        view.evaluate("document.querySelector('#histogram-fold').open = true")
        view.wait_for_timeout(300)
        save(part(view, "#gradients"), "report-gradients.png")
        browser.close()


def part(view: Page, section: str) -> bytes:
    """Return the picture of a section, with a margin."""
    box = view.locator(section).bounding_box()
    assert box is not None
    clip = {
        "x": box["x"] - MARGIN,
        "y": box["y"] - MARGIN / 2,
        "width": box["width"] + 2 * MARGIN,
        "height": box["height"] + MARGIN,
    }
    return view.screenshot(clip=clip, full_page=True)  # type: ignore[arg-type]


def save(picture: bytes, name: str) -> None:
    image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS)
    image.save(HERE / name, optimize=True)


if __name__ == "__main__":
    main()
