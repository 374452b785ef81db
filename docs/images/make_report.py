"""The README's pictures of a report: `make demo`, then `python docs/images/make_report.py`. Needs a Chromium."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from ampwise.report.page import page
from ampwise.runs.reader import Run

HERE = Path(__file__).parent
RECORD = HERE.parent.parent / "build" / "demo"


def main() -> None:
    browser_path = shutil.which("chromium") or sys.exit("no Chromium was found")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder, "page.html")
        file.write_text(page(Run.read(RECORD)), encoding="utf-8")
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox"]
        )
        view = browser.new_page(viewport={"width": 1000, "height": 900})
        view.goto(file.as_uri())
        view.wait_for_selector("html[data-ready]", state="attached")
        card = view.locator("#finding-1").bounding_box()
        assert card is not None
        top = {"x": 0, "y": 0, "width": 1000, "height": card["y"] + card["height"] + 12}
        view.screenshot(path=HERE / "report.png", clip=top, full_page=True)  # type: ignore[arg-type]
        view.locator("#gradients").screenshot(path=HERE / "report-gradients.png")
        browser.close()


if __name__ == "__main__":
    main()
