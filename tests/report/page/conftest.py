"""A browser, and pages in it."""

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


@pytest.fixture
def shown(browser, tmp_path):
    """Opens a page from its text, waits until it is drawn, and lets nothing pass: errors, dialogs, requests."""
    heard = []
    contexts = []

    def show(text, *, scheme="light", width=1100, wait=True, **options):
        path = tmp_path / f"page{len(contexts)}.html"
        path.write_text(text, encoding="utf-8")
        size = {"width": width, "height": 900}
        context = browser.new_context(color_scheme=scheme, viewport=size, reduced_motion="reduce", **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: heard.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: heard.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (heard.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith("file:") or heard.append(f"request: {request.url}"))
        page.goto(path.as_uri())
        if wait:
            page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield show
    for context in contexts:
        context.close()
    assert heard == []


@pytest.fixture
def looked_at():
    """Keeps a picture where AMPWISE_SCREENSHOTS says, for whoever wants to look; nowhere by default."""
    folder = os.environ.get("AMPWISE_SCREENSHOTS")

    def keep(page, name):
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=Path(folder, f"{name}.png"), full_page=True)

    return keep
