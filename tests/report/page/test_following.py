"""A page that follows a run: news come by themselves, and take nothing away from who is reading."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ampwise.finding.strict_json import dumps
from ampwise.report.page import page, update


class Desk:
    """What the server has to say; ``run`` may change."""

    def __init__(self, run):
        self.run, self.version, self.status, self.asked = run, 1, 200, 0

    def tell(self, run):
        self.run, self.version = run, self.version + 1


@pytest.fixture
def desk(make_run):
    desk = Desk(make_run())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            tag = f'"{desk.version}"'
            is_update = self.path.endswith("update")
            desk.asked += is_update
            unchanged = is_update and self.headers["If-None-Match"] == tag
            body = dumps(update(desk.run)) if is_update else page(desk.run, live=True, every=0.1)
            self.send_response(304 if unchanged and desk.status == 200 else desk.status)
            self.send_header("ETag", tag)
            self.send_header("Content-Type", "application/json" if is_update else "text/html; charset=utf-8")
            self.end_headers()
            if not unchanged:
                self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    desk.address = f"http://127.0.0.1:{server.server_address[1]}/t/"
    desk.server = server
    yield desk
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def view(browser, desk):
    context = browser.new_context(reduced_motion="reduce")
    context.set_default_timeout(120_000)
    page = context.new_page()
    heard = []
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.goto(desk.address)
    page.wait_for_selector("html[data-ready]", state="attached")
    yield page
    context.close()
    assert heard == []


def told(view, words):
    view.wait_for_function("words => document.body.innerText.includes(words)", arg=words)


def test_news_come_by_themselves(view, desk, make_run, make_steps):
    told(view, "120 steps")
    desk.tell(make_run({"steps": 150}, steps=make_steps(150), findings=[]))
    told(view, "150 steps")
    assert view.title() == "No findings · train.py"
    assert view.locator("nav >> text=Findings").count() == 0
    assert view.inner_text("#range") == "steps 1 to 150"
    assert view.locator("article.card").count() == 0


def test_the_reader_is_left_in_peace(view, desk, make_run, make_steps):
    view.focus("figure.chart[data-metric=norm]")
    view.keyboard.press("+")
    view.evaluate("document.querySelector('#finding-2-example').open = true")
    view.locator("#scale").evaluate("box => { box.value = 20; box.dispatchEvent(new Event('input')); }")
    desk.tell(make_run({"steps": 150}, steps=make_steps(150)))
    told(view, "150 steps")
    assert view.evaluate("document.activeElement.dataset.metric") == "norm"
    assert view.inner_text("#range") == "steps 31 to 90"
    assert view.evaluate("[...document.querySelectorAll('article details[open]')].map(each => each.id)") == [
        "finding-2-example"
    ]
    assert view.inner_text("#scale-value").startswith("2²⁰")


def test_a_marked_text_is_not_taken_away(view, desk, make_run, make_steps):
    view.evaluate("getSelection().selectAllChildren(document.querySelector('.about'))")
    desk.tell(make_run({"steps": 150}, steps=make_steps(150)))
    before = desk.asked
    view.wait_for_timeout(500)
    assert desk.asked <= before + 1
    assert "120 steps" in view.evaluate("String(getSelection())")
    view.evaluate("getSelection().removeAllRanges()")
    told(view, "150 steps")


def test_it_says_whether_it_is_live_and_how_old_it_is(view, desk, make_run):
    assert view.inner_text("#live") == "ended: finished"
    desk.tell(make_run(manifest={"status": "running", "finished": None}))
    told(view, "updated 0 s ago")
    told(view, "updated 1 s ago")
    assert view.get_attribute("#mark", "class") == "live"
    desk.status = 404
    told(view, "The server was restarted")
    desk.status = 200
    told(view, "updated")
    desk.tell(make_run(manifest={"status": "failed"}))
    told(view, "ended: failed")
    assert view.inner_text("#ago") == ""
    desk.server.shutdown()
    desk.server.server_close()
    told(view, "The server no longer responds")


def test_news_are_plain_json(make_run):
    assert json.loads(dumps(update(make_run())))["parts"]["header"]
