"""A browser, and pages in it."""

import itertools
import os
import shutil
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Chromium would otherwise look for updates, which a closed network answers with errors.
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def missing(what):
    """Not everybody has a browser; whoever must have one says so."""
    if os.environ.get("AMPWISE_NEEDS_BROWSER"):
        pytest.fail(f"AMPWISE_NEEDS_BROWSER is set, and there is no {what}")
    pytest.skip(f"needs {what}")


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        missing("Chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def one_page(browser):
    """The page that tests show theirs in, one after the other: a new one would cost as much again as showing it."""
    context = browser.new_context(reduced_motion="reduce")
    yield context.new_page()
    context.close()


class Ears:
    """Hears what no page should do: say something on the console, raise, ask, load."""

    def __init__(self):
        self.heard, self.pages = [], []
        self.listeners = {
            "console": lambda message: self.heard.append(f"console: {message.text}"),
            "pageerror": lambda error: self.heard.append(f"error: {error}"),
            "dialog": lambda dialog: (self.heard.append(f"dialog: {dialog.message}"), dialog.dismiss()),
            "request": self.requested,
        }

    def requested(self, request):
        if not request.url.startswith("file:"):
            self.heard.append(f"request: {request.url}")

    def listen(self, page):
        if page not in self.pages:
            self.pages.append(page)
            for event, listener in self.listeners.items():
                page.on(event, listener)

    def close(self):
        for page in self.pages:
            for event, listener in self.listeners.items():
                page.remove_listener(event, listener)


@pytest.fixture
def shown(browser, one_page, tmp_path):
    """Shows a page from its text, waits until it is drawn, and lets nothing pass: errors, dialogs, requests.

    What was shown before is gone, unless one has options: that is shown in a page of its own.
    """
    ears, contexts, count = Ears(), [], itertools.count()

    def show(text, *, scheme="light", width=1100, wait=True, **options):
        path = tmp_path / f"page{next(count)}.html"
        path.write_text(text, encoding="utf-8")
        if options:
            contexts.append(browser.new_context(reduced_motion="reduce", **options))
            contexts[-1].set_default_timeout(120_000)
        page = contexts[-1].new_page() if options else one_page
        ears.listen(page)
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.goto(path.as_uri())
        if wait:
            page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield show
    for context in contexts:
        context.close()
    ears.close()
    one_page.mouse.move(0, 0)
    one_page.goto("about:blank")  # whatever it still does, it does before the next test
    assert ears.heard == []


@pytest.fixture
def looked_at():
    """Keeps a picture where AMPWISE_SCREENSHOTS says, for whoever wants to look; nowhere by default."""
    folder = os.environ.get("AMPWISE_SCREENSHOTS")

    def keep(page, name):
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=Path(folder, f"{name}.png"), full_page=True)

    return keep
