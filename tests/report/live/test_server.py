"""The server, over real sockets: the page for who knows its address, and nothing for anybody else."""

import contextlib
import html
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import webbrowser
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from ampwise import BadInput
from ampwise.cli import main
from ampwise.report.live import server as server_module
from ampwise.report.live.server import PageCache, redirect_page, serve
from ampwise.report.page import page, update
from ampwise.runs.reader import RecordFollower
from ampwise.runs.writer import RecordWriter

from .live_toys import growing, step, stop

HOSTILE = "</script><script>alert(1)</script>\ud800\x00.py"


class Made:
    """A stand-in for the page, which counts how often it was made."""

    def __init__(self):
        self.pages = self.updates = 0

    def page(self, run):
        self.pages += 1
        return f"<p>{len(run.steps)} steps of {run.manifest.get('script')}</p>"

    def update(self, run):
        self.updates += 1
        return {"steps": len(run.steps), "loss": float("nan"), "status": run.status, "trouble": run.trouble}


@pytest.fixture
def impatient(monkeypatch):
    """The record is looked at whenever somebody asks, and nobody rests."""
    monkeypatch.setattr(server_module, "PAUSE_FACTOR", 0.0)


@pytest.fixture
def writer(tmp_path):
    with growing(tmp_path / "run", steps=3) as writer:
        yield writer


@pytest.fixture
def made():
    return Made()


@pytest.fixture
def server(writer, made, request):
    interval_s = 0.0 if "impatient" in request.fixturenames else 60.0
    running = serve(RecordFollower(writer.folder), page=made.page, update=made.update, interval_s=interval_s)
    yield running
    stop(running)


def ask(server, path="", *, method="GET", token=None, host=None, headers=()):
    """The status, the headers and the body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    try:
        connection.putrequest(method, f"/{token or server.token}/{path}", skip_host=True)
        for one in [f"127.0.0.1:{server.server_port}"] if host is None else host:
            connection.putheader("Host", one)
        for name, value in dict(headers).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def send(server, data):
    """What comes back for raw bytes."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=120) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))
        except OSError:  # it has had enough of us
            return b""


# --- what it gives -------------------------------------------------------------------------------------------------


def test_the_page_and_its_updates(server, writer, impatient):
    status, headers, body = ask(server)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert body == b"<p>3 steps of train.py</p>"
    assert headers["Content-Length"] == str(len(body))
    status, headers, body = ask(server, "update")
    assert (status, headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    assert json.loads(body) == {"steps": 3, "loss": "NaN", "status": "running or killed", "trouble": []}
    writer.step(step(4))
    writer.flush()
    assert json.loads(ask(server, "update?since=3")[2])["steps"] == 4


def test_the_address_opens_the_page(server):
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", server.address)
    with urllib.request.urlopen(server.address, timeout=120) as answer:
        assert b"3 steps" in answer.read()


def test_every_answer_has_the_headers_that_keep_it_here(server):
    answers = [ask(server), ask(server, "update"), ask(server, "nothing"), ask(server, host=["evil.example"])]
    answers.append(ask(server, "update", headers={"If-None-Match": answers[1][1]["ETag"]}))
    assert [answer[0] for answer in answers] == [200, 200, 404, 403, 304]
    for _, headers, _ in answers:
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "connect-src 'self'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Server"] == "ampwise"
        assert not [name for name in headers if name.lower().startswith("access-control")]


def test_head_is_get_without_its_body(server):
    _, wanted, text = ask(server)
    status, headers, body = ask(server, method="HEAD")
    assert (status, body) == (200, b"")
    assert (headers["ETag"], headers["Content-Length"]) == (wanted["ETag"], str(len(text)))
    assert ask(server, "nothing", method="HEAD")[0] == 404


def test_what_has_not_changed_is_not_sent_again(server, writer, impatient):
    tag = ask(server, "update")[1]["ETag"]
    status, headers, body = ask(server, "update", headers={"If-None-Match": tag})
    assert (status, headers["ETag"], body) == (304, tag, b"")
    writer.step(step(4))
    writer.flush()
    status, headers, _ = ask(server, "update", headers={"If-None-Match": tag})
    assert status == 200
    assert headers["ETag"] != tag


# --- and to whom ---------------------------------------------------------------------------------------------------


def test_it_listens_on_loopback_alone(server):
    assert server.server_address[0] == server.socket.getsockname()[0] == "127.0.0.1"
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in others - {"127.0.0.1"}:
        with pytest.raises(OSError, match=r"refused|unreachable"):
            socket.create_connection((address, server.server_port), timeout=120).close()


@pytest.mark.parametrize("token", ["wrong", "é", "%00", "x" * 5000])
def test_a_wrong_token_gets_nothing(server, made, token):
    path = f"GET /{token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode()
    assert send(server, path).startswith(b"HTTP/1.0 404 ")
    assert made.pages == 0


def test_half_a_token_or_a_longer_one_gets_nothing(server):
    for token in (server.token[:-1], server.token + "x", server.token.swapcase()):
        assert ask(server, token=token)[0] == 404


@pytest.mark.parametrize(
    "path",
    ["", "{token}/../{token}/x", "{token}/manifest.json", "{token}/..%2f..%2fetc/passwd", "{token}//update"],
)
def test_there_is_nothing_else(server, path):
    line = f"GET /{path.format(token=server.token)} HTTP/1.1\r\nHost: localhost:{server.server_port}\r\n\r\n"
    answer = send(server, line.encode())
    assert answer.startswith(b"HTTP/1.0 404 ")
    assert answer.endswith(b"404 not found: copy the whole address that `ampwise watch` printed\n")


def test_the_last_sign_of_the_address_may_be_missing(server):
    """A browser asks again, under the name and the port that it came by."""
    line = f"GET /{server.token} HTTP/1.1\r\nHost: localhost:9000\r\n\r\n"
    answer = send(server, line.encode()).decode()
    assert answer.startswith("HTTP/1.0 308 ")
    assert f"\r\nLocation: /{server.token}/\r\n" in answer
    with urllib.request.urlopen(server.address.removesuffix("/"), timeout=120) as opened:
        assert b"3 steps" in opened.read()
    wrong = f"GET /{server.token[:-1]} HTTP/1.1\r\nHost: localhost:9000\r\n\r\n"
    assert server.token not in send(server, wrong.encode()).decode()


@pytest.mark.half_by_day
@pytest.mark.parametrize(
    "hosts",
    [
        [],
        ["evil.example"],
        ["evil.example:{port}"],
        ["127.0.0.1.evil.example"],
        ["127.0.0.1:{port}.evil.example"],
        ["evil.example:127.0.0.1"],
        ["localhost.evil.example:{port}"],
        ["127.0.0.1:"],
        ["127.0.0.1:{port}:{port}"],
        ["127.0.0.1@evil.example"],
        ["::1"],
        ["[::1].evil.example"],
        ["0.0.0.0:{port}"],
        ["127.0.0.1:{port}", "evil.example"],
        ["127.0.0.1:{port}", "127.0.0.1:{port}"],
    ],
)
def test_a_name_that_only_points_here_is_refused(server, made, hosts):
    status, _, body = ask(server, host=[host.format(port=server.server_port) for host in hosts])
    assert status == 403
    assert body == b"403 use 127.0.0.1 or localhost as the host\n"
    assert server.token not in body.decode()
    assert made.pages == 0


@pytest.mark.half_by_day
@pytest.mark.parametrize(
    "host", ["LocalHost:{port}", "localhost", "127.0.0.1:9000", "[::1]:9000", "[::1]", "127.0.0.1"]
)
def test_names_that_only_this_machine_has_are_ours_at_any_port(server, host):
    """`ssh -L 9000:127.0.0.1:PORT` brings another port; and a page from elsewhere cannot have such a name."""
    assert ask(server, host=[host.format(port=server.server_port)])[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_is_only_read(server, method):
    status, headers, body = ask(server, method=method)
    assert (status, headers["Allow"], body) == (405, "GET, HEAD", b"405 this address is read-only\n")
    assert ask(server, method=method, token="wrong")[0] == 404
    assert ask(server, method=method, host=["evil.example"])[0] == 403
    assert ask(server, method="BREW")[0] == 501


# --- whatever comes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,  # a browser that was told https
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    ],
    ids=["nothing", "blank", "nonsense", "half", "tls", "version", "header", "headers", "path"],
)
def test_bad_requests_harm_nobody(server, capfd, data):
    answer = send(server, data)
    assert b" 200 " not in answer[:20]
    assert ask(server)[0] == 200
    assert capfd.readouterr() == ("", "")


def test_clients_that_leave_harm_nobody(server, made, capfd):
    made.page = None
    server.present._renderers[""] = lambda run: "x" * 5_000_000
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=120) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            line = f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n"
            connection.sendall(line.encode())
    assert len(ask(server)[2]) == 5_000_000
    assert capfd.readouterr() == ("", "")


def test_strangers_are_cut_off_though_never_silent(server, monkeypatch):
    """Whoever holds connections without the token gets little time, and the owner is answered meanwhile."""
    monkeypatch.setattr(server_module, "CLIENT_S", 0.3)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=120) as stranger:
        stranger.settimeout(0.05)
        with contextlib.suppress(ConnectionError):
            while True:  # a byte at a time, without end
                stranger.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if not stranger.recv(1):
                        break
    monkeypatch.setattr(server_module, "CLIENT_S", 120.0)  # who has the token is to show it at leisure
    assert ask(server)[0] == 200


def test_many_strangers_do_not_keep_the_owner_out(server, monkeypatch):
    monkeypatch.setattr(server_module, "MOST_STRANGERS", 5)
    held = [socket.create_connection(("127.0.0.1", server.server_port), timeout=120) for _ in range(30)]
    try:
        assert ask(server)[0] == 200
        for each in held[:25]:
            assert each.recv(1) == b""
        until(lambda: threading.active_count() < 30)
    finally:
        for each in held:
            each.close()


def test_a_slow_reader_with_the_token_may_take_its_time(server, monkeypatch):
    server.present._renderers[""] = lambda run: "x" * 5_000_000
    monkeypatch.setattr(server_module, "MOST_STRANGERS", 1)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=120) as owner:
        line = f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n"
        owner.sendall(line.encode())
        read = len(owner.recv(100))
        for _ in range(5):
            assert ask(server, token="wrong")[0] == 404
        while part := owner.recv(65536):
            read += len(part)
    assert read > 5_000_000


def test_a_page_that_cannot_be_made_is_reported_and_tried_again(server, writer, made, impatient):
    def broken(run):
        raise KeyError(HOSTILE)

    works, server.present._renderers[""] = server.present._renderers[""], broken
    status, _, body = ask(server)
    assert (status, body) == (500, b"500 this record cannot be shown: KeyError\n")
    server.present._renderers[""] = works
    assert ask(server)[0] == 200


def test_hostile_names_travel_whole(tmp_path, made):
    """What they may do is for the page to see to; here they must break neither a header nor the encoding."""
    writer = RecordWriter.create(tmp_path / "run\r\nX-Evil: 1", script="train.py")
    writer.close("finished", 0)
    follower = RecordFollower(writer.folder)
    running = serve(follower, page=lambda run: HOSTILE, update=lambda run: {"script": HOSTILE, "at": str(run.folder)})
    try:
        status, headers, body = ask(running)
        assert (status, headers["X-Evil"]) == (200, None)
        assert body == HOSTILE.encode("utf-8", "backslashreplace")
        assert json.loads(ask(running, "update")[2])["script"] == HOSTILE.replace("\ud800", "\\ud800")
    finally:
        stop(running)


# --- cheaply -------------------------------------------------------------------------------------------------------


class Counting(RecordFollower):
    looks = 0

    def look(self):
        self.looks += 1
        return super().look()


def test_many_who_ask_make_it_once(writer, made):
    follower = Counting(writer.folder)
    running = serve(follower, page=made.page, update=made.update, interval_s=3600.0)
    try:
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda _: ask(running, "update"), range(200)))
        assert {answer[0] for answer in answers} == {200}
        assert len({answer[2] for answer in answers}) == 1
        assert made.updates == 1
        assert made.pages == 0
        assert follower.looks == 1
    finally:
        stop(running)


class Clock:
    """Stands for the time module: it moves when it is told to."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(server_module, "time", found)
    return found


def test_the_interval_is_kept_however_many_ask(writer, made, clock):
    follower = Counting(writer.folder)
    present = PageCache(follower, {"": made.page}, interval_s=0.5)
    looks = []
    for clock.now in (0.0, 0.1, 0.4, 0.6, 0.7, 1.0, 1.2, 1.3):
        assert present.run.alive
        looks.append(follower.looks)
    assert looks == [1, 1, 1, 2, 2, 2, 3, 3]  # the first, and those after each half second


class Slow(Made):
    """A page that takes as long as a test likes."""

    def __init__(self):
        super().__init__()
        self.may_go = threading.Event()
        self.may_go.set()

    def update(self, run):
        assert self.may_go.wait(120)
        return super().update(run)


@pytest.fixture
def slow_server(writer):
    slow = Slow()
    running = serve(RecordFollower(writer.folder), page=slow.page, update=slow.update, interval_s=0.01)
    running.slow = slow
    yield running
    slow.may_go.set()
    stop(running)


def test_while_a_new_one_is_made_all_get_the_old_one(slow_server, writer, monkeypatch):
    monkeypatch.setattr(server_module, "PAUSE_FACTOR", 0.0)
    monkeypatch.setattr(server_module, "PATIENCE_S", 0.1)
    tag = ask(slow_server, "update")[1]["ETag"]
    slow_server.slow.may_go.clear()
    writer.step(step(4))
    writer.flush()
    time.sleep(0.05)  # several intervals
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(slow_server, "update"), range(16)))
    assert {(status, headers["ETag"]) for status, headers, _ in answers} == {(200, tag)}
    assert {json.loads(body)["steps"] for _, _, body in answers} == {3}
    assert ask(slow_server, "update", headers={"If-None-Match": tag})[0] == 304
    slow_server.slow.may_go.set()
    until(lambda: json.loads(ask(slow_server, "update")[2])["steps"] == 4)
    assert slow_server.slow.updates == 2


def test_it_rests_nine_times_as_long_as_making_took(writer, made, clock, monkeypatch):
    """Somebody always asks, there is always something new, and yet nine tenths of the time are the run's."""
    monkeypatch.setattr(server_module, "PATIENCE_S", 120.0)  # until it is made, if it is

    def making(run):
        clock.now += 0.05
        return str(made.update(run))

    present = PageCache(RecordFollower(writer.folder), {"update": making}, interval_s=0.0)
    made_at = []
    for number in range(4, 64):
        before = made.updates
        writer.step(step(number))
        writer.flush()
        present.made("update")
        if made.updates > before:
            made_at.append(clock.now)
        clock.now += 0.05
    assert len(made_at) > 3
    assert min(after - before for before, after in itertools.pairwise(made_at)) == pytest.approx(0.5)
    clock.now += 1.0
    assert present.made("update")[0] == present.version  # and at last it has all


def test_a_failure_beside_is_reported_and_fixed(slow_server, writer, monkeypatch, capfd):
    monkeypatch.setattr(server_module, "PAUSE_FACTOR", 0.0)
    assert ask(slow_server, "update")[0] == 200
    makers = slow_server.present._renderers
    makers["update"] = lambda run: 1 / 0
    writer.step(step(4))
    writer.flush()
    until(lambda: ask(slow_server, "update")[0] == 500)
    assert ask(slow_server, "update")[2] == b"500 this record cannot be shown: ZeroDivisionError\n"
    assert capfd.readouterr() == ("", "")
    makers["update"] = lambda run: f"{len(run.steps)}"
    until(lambda: ask(slow_server, "update")[2] == b"4")


def until(holds, seconds=120.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_killed_run_and_a_lost_record_are_news(tmp_path, impatient, made):
    with growing(tmp_path / "run", steps=3) as writer:
        manifest = json.loads((writer.folder / "manifest.json").read_text())
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        (writer.folder / "manifest.json").write_text(json.dumps(manifest | {"pid": child.pid}))
        present = PageCache(RecordFollower(writer.folder), {"": made.page}, interval_s=0.0)
        assert present.run.alive
        version = present.version
        assert present.version == version
        child.communicate(b"\n")
        assert present.version == version + 1
        assert present.run.alive is False
        saved = tmp_path / "saved"
        shutil.copytree(writer.folder, saved)
        shutil.rmtree(writer.folder)
        assert re.match(
            r"The record has been unreadable since \d\d:\d\d:\d\d: .* does not exist", present.run.trouble[0]
        )
        assert len(present.run.steps) == 3  # what was seen is still shown
        assert present.version == version + 2
        saved.rename(writer.folder)
        assert present.run.trouble == []


def test_a_port_that_is_taken(writer, made, server):
    with pytest.raises(BadInput, match=r"--serve \d+: cannot use this port of 127.0.0.1: .* in use. --serve without"):
        serve(RecordFollower(writer.folder), page=made.page, update=made.update, port=server.server_port)


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_command_serves_until_ctrl_c(tmp_path):
    with growing(tmp_path / "run", steps=3) as writer:
        process = subprocess.Popen(
            [sys.executable, "-m", "ampwise", "watch", str(tmp_path / "run"), "--serve", "--interval", "0.2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            address = process.stdout.readline().strip()
            port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]+)/", address).groups()
            here = type("Here", (), {"server_port": int(port), "token": token})
            status, _, body = ask(here)
            assert (status, b"train.py" in body) == (200, True)
            assert "connect-src 'self'" in html.unescape(body.decode())  # the page may ask for its updates,
            assert 'data-live="0.2"' in body.decode()  # as often as was said
            assert json.loads(ask(here, "update")[2])["data"]
            writer.close("finished", 0)
            assert process.stderr.readline().startswith("ampwise: the run has ended: 1 error in 3 steps of train.py")
            assert ask(here)[0] == 200  # and goes on
        finally:
            os.kill(process.pid, signal.SIGINT)
            output, errors = process.communicate(timeout=120)
        assert (process.returncode, output, errors) == (130, "", "ampwise: interrupted\n")


@pytest.fixture(scope="module")
def chromium():
    """A real browser."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as play:
        try:
            browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        except playwright.Error:
            pytest.skip("no Chromium here")
        context = browser.new_context()
        context.set_default_timeout(120_000)
        yield context
        browser.close()


def test_a_browser_follows_the_run(tmp_path, impatient, chromium):
    """The real page, in a real browser, under the headers that it is sent with."""
    with growing(tmp_path / "run", steps=3) as writer:
        live_page = partial(page, live=True, every=0.2)
        running = serve(RecordFollower(writer.folder), page=live_page, update=update, interval_s=0.0)
        try:
            shown, said = chromium.new_page(), []
            shown.on("console", lambda message: said.append(message.text))
            shown.on("pageerror", lambda error: said.append(str(error)))
            shown.goto(running.address)
            assert "3 steps" in shown.inner_text(".about")
            writer.step(step(4))
            writer.flush()
            shown.locator(".about >> text=4 steps").wait_for(timeout=120_000)
            assert shown.inner_text("#mark") == "live"
            assert said == []
            shown.close()
        finally:
            stop(running)


RECORDS_WHAT_IS_SEEN = """#!/bin/sh
cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' > "$HOME/seen"
ls -ld "$HOME"/ampwise-open-*/ "$HOME"/ampwise-open-*/* > "$HOME/modes"
printf '%s' "$*" > "$HOME/given"
"""


def opened_by(tmp_path, then):
    """`watch --serve --open` with a browser that notes what every user can see; ``then`` gets both addresses."""
    home, browser = tmp_path / "home", tmp_path / "browser"
    home.mkdir()
    browser.write_text(RECORDS_WHAT_IS_SEEN)
    browser.chmod(0o755)
    with growing(tmp_path / "run", steps=3):
        process = subprocess.Popen(
            [sys.executable, "-m", "ampwise", "watch", str(tmp_path / "run"), "--serve", "--open"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"HOME": str(home), "BROWSER": str(browser)},
        )
        try:
            address = process.stdout.readline().strip()
            until((home / "given").exists)
            until(lambda: (home / "given").read_text())
            then(address, (home / "given").read_text())
        finally:
            os.kill(process.pid, signal.SIGINT)
            errors = process.communicate(timeout=120)[1]
    assert errors == "ampwise: interrupted\n"
    assert not list(home.glob("ampwise-open-*"))
    return home


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_open_shows_no_command_line_the_token(tmp_path):
    """Every user of the machine can list command lines: a browser's has only a file that nobody else can read."""

    def look(address, given):
        page = Path(given.removeprefix("file://"))
        assert f'content="0; url={address}"' in page.read_text()
        with urllib.request.urlopen(address, timeout=120) as answer:
            assert b"train.py" in answer.read()
        assert not page.parent.exists()  # it was needed once
        found.append(address.rstrip("/").rpartition("/")[2])

    found = []
    home = opened_by(tmp_path, look)
    seen = (home / "seen").read_text()
    assert "--serve" in seen.splitlines()
    assert found[0] not in seen
    assert found[0] not in (home / "given").read_text()
    modes = [line[:10] for line in (home / "modes").read_text().splitlines()]
    assert sorted(modes) == ["-rw-------", "drwx------"]


def test_a_browser_is_led_from_the_file_to_the_page(server, chromium):
    shown, asked = chromium.new_page(), []
    shown.on("request", lambda request: asked.append((request.url, request.headers.get("referer"))))
    with redirect_page(server.address) as opened:
        shown.goto(opened)
        shown.wait_for_url(server.address)
    assert "3 steps" in shown.inner_text("p")
    assert {referer for _, referer in asked} == {None}
    shown.reload()
    assert "3 steps" in shown.inner_text("p")


def test_a_page_from_elsewhere_reads_nothing_though_it_knew_the_address(server, chromium, monkeypatch):
    """Another port of this machine is another origin; and no cookie says who asks."""
    tries = f"""<!doctype html><title>elsewhere</title><script>
    const address = {json.dumps(server.address)};
    async function look(mode) {{
      try {{ return await (await fetch(address, {{mode, credentials: "include"}})).text(); }}
      catch {{ return "refused"; }}
    }}
    function load(tag) {{
      return new Promise((done) => {{
        const made = document.createElement(tag);
        [made.onload, made.onerror, made.src] = [() => done("loaded"), () => done("refused"), address];
        document.body.append(made);
      }});
    }}
    function frame() {{
      const made = document.createElement("iframe");
      return new Promise((done) => {{
        [made.onload, made.src] = [() => done(made.contentDocument ? "read" : "refused"), address];
        document.body.append(made);
      }});
    }}
    </script><body>"""
    elsewhere = serve(RecordFollower(server.present.run.folder), page=lambda _: tries, update=lambda _: {})
    try:
        shown = chromium.new_page()
        with monkeypatch.context() as patched:  # the page from elsewhere is not held by ours
            patched.delitem(server_module.HEADERS, "Content-Security-Policy")
            shown.goto(elsewhere.address)
        found = [shown.evaluate(f"look('{mode}')") for mode in ("cors", "no-cors")]
        found += [shown.evaluate(f"load('{tag}')") for tag in ("img", "script")] + [shown.evaluate("frame()")]
        assert found == ["refused"] * 5
        assert shown.evaluate("document.cookie") == ""
    finally:
        stop(elsewhere)


def test_open_without_a_browser(tmp_path, monkeypatch, capsys):
    opened = []

    def gives_up(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(webbrowser, "open", lambda address: bool(opened.append(address)))
    monkeypatch.setattr(time, "sleep", gives_up)  # once there is nothing to do but wait
    monkeypatch.setenv("HOME", str(tmp_path))
    with growing(tmp_path / "run", steps=3):
        assert main(["watch", str(tmp_path / "run"), "--serve", "--open"]) == 130
    said = capsys.readouterr()
    assert said.out.startswith("http://127.0.0.1:")
    assert opened[0].startswith(f"file://{tmp_path}/ampwise-open-")
    assert not list(tmp_path.glob("ampwise-open-*"))
    assert "no browser found. Open the address yourself" in said.err
