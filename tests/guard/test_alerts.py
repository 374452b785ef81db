"""Findings reach people while a run goes on; the run neither waits for that nor learns of its troubles."""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ampwise.errors import BadInput
from ampwise.finding import Place
from ampwise.guard import alert_kinds
from ampwise.guard.alerts import MOST_WAITING, Alerts, RateLimiter, command, stderr, webhook
from ampwise.rules import find_rule

STOPPED, SKIPPED = find_rule("training-stopped"), find_rule("step-skipped")


def until(holds, seconds=120.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def finding(rule=STOPPED, step=60, message="the loss is NaN", **evidence):
    return rule.at(Place(step=step), message, evidence=evidence)


@pytest.fixture
def alerting():
    """Alerts that are closed, whatever the test does."""
    opened = []

    def make(*functions, **options):
        opened.append(Alerts(functions, **options))
        return opened[-1]

    yield make
    for alerts in opened:
        alerts.close(timeout=5)


@pytest.fixture
def server():
    """A web server that answers as told, and keeps what it got."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.got.append((self.path, dict(self.headers), json.loads(body)))
            status, headers = self.server.answers.pop(0) if self.server.answers else (200, {})
            self.send_response(status)
            for name, value in {**headers, "Content-Length": "0"}.items():
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self):
            self.server.got.append((self.path, dict(self.headers), None))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.got, running.answers = [], []
        running.address = f"http://127.0.0.1:{running.server_port}/hook/s3cret"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(alert_kinds, "BACKOFF_S", 0.01)


# Sending


def test_each_alert_gets_each_finding_in_order(alerting):
    one, other = [], []
    alerts = alerting(one.append, other.append)
    found = [finding(STOPPED, 1), finding(SKIPPED, 2), finding(find_rule("AMP101"), 3)]
    for each in found:
        alerts.send(each)
    alerts.close()
    assert one == other == found


def test_sending_does_not_wait_for_a_slow_alert_and_it_holds_up_no_other(alerting, capsys):
    release, seen = threading.Event(), threading.Event()

    def stuck(_):
        assert release.wait(120)

    alerts = alerting(stuck, lambda _: seen.set())
    alerts.send(finding())
    assert seen.wait(120)
    alerts.close(timeout=0.1)
    assert "stuck was still busy at the end; it was not waited for" in capsys.readouterr().err
    release.set()


@pytest.mark.parametrize("error", [OSError("no\nluck\x1b[2J"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_an_alert_that_fails_is_said_once_and_tried_again(alerting, capsys, error):
    tried = []

    def broken(given):
        tried.append(given)
        raise error

    alerts = alerting(broken)
    alerts.send(finding(STOPPED))
    alerts.send(finding(SKIPPED))
    alerts.close()
    assert len(tried) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ampwise: warning: the alert ")
    assert "broken failed; the next finding will be tried again: " + type(error).__name__ in line
    assert "\x1b" not in line


def test_after_closing_and_without_alerts_nothing_is_sent(alerting):
    got = []
    alerts = alerting(got.append)
    alerts.close()
    alerts.send(finding())
    alerts.close()
    assert got == []
    before = threading.active_count()
    alerting().send(finding())
    assert threading.active_count() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_sends_nothing(alerting, tmp_path):
    def leave_a_file(given):
        (tmp_path / f"{os.getpid()}-{given.place.step}").touch()

    alerts = alerting(leave_a_file)
    child = os.fork()
    if not child:
        alerts.send(finding(SKIPPED, step=2))
        alerts.close()
        time.sleep(0.2)  # enough for a thread that should not be there
        os._exit(0)
    os.waitpid(child, 0)
    alerts.send(finding(step=1))
    alerts.close()
    assert [path.name for path in tmp_path.iterdir()] == [f"{os.getpid()}-1"]


def test_of_a_slow_alert_the_latest_findings_wait_and_memory_is_flat(alerting):
    release, got = threading.Event(), []

    def slow(given):
        assert release.wait(120)
        got.append(given.place.step)

    alerts = alerting(slow, same_rule_s=0.0)
    for step in range(1, 1001):
        alerts.send(finding(step=step))
    until(alerts._inlet.empty)
    release.set()
    alerts.close(timeout=120)
    assert len(got) <= MOST_WAITING + 1
    assert got[-MOST_WAITING:] == list(range(1001 - MOST_WAITING, 1001))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (print, r"alerts: expected a list of functions that take a finding: alerts=\[stderr\(\)\]\."),
        ("stderr", "alerts: expected a list of functions"),
        (["stderr"], r"alerts: 'stderr' is not callable; give webhook\(url\), command\(\[\.\.\.\]\) or a function\."),
    ],
)
def test_what_is_no_list_of_functions_is_refused(given, message):
    with pytest.raises(BadInput, match=message):
        Alerts(given)


# Floods


def test_of_one_rule_a_finding_a_minute_and_the_next_counts_those_between():
    flood = RateLimiter(60.0)
    assert flood.take(finding(SKIPPED, 1), now=0.0) == finding(SKIPPED, 1)
    assert [flood.take(finding(SKIPPED, step), now=step) for step in range(2, 12)] == [None] * 10
    assert flood.take(finding(STOPPED, 12), now=12.0) == finding(STOPPED, 12), "another rule is not held back"
    assert flood.take(finding(SKIPPED, 70), now=70.0).evidence == {"held_back": 10}
    assert flood.take(finding(SKIPPED, 140), now=140.0).evidence == {}


def test_what_was_held_back_is_told_when_its_minute_is_over():
    flood = RateLimiter(60.0)
    for step in range(4):
        flood.take(finding(SKIPPED, step), now=float(step))
    assert flood.next_due() == 60.0
    assert flood.due(now=59.0) == []
    (latest,) = flood.due(now=60.0)
    assert (latest.place.step, latest.evidence) == (3, {"held_back": 2})
    assert flood.next_due() is None
    assert flood.take(finding(SKIPPED, 5), now=61.0) is None, "that one counts too"
    assert flood.drain() == [finding(SKIPPED, 5)]
    assert flood.drain() == []


@pytest.mark.parametrize("rate", [0.3, 1.0, 7.0])
def test_no_finding_is_lost_or_counted_twice(rate):
    flood, sent = RateLimiter(10.0), []
    for number in range(500):
        now = number * rate
        sent += flood.due(now)
        taken = flood.take(finding(SKIPPED, number), now)
        sent += [taken] if taken is not None else []
    sent += flood.drain()
    assert sum(1 + each.evidence.get("held_back", 0) for each in sent) == 500
    assert len(sent) <= 500 * rate / 10.0 + 2 or rate > 5


def test_the_thread_tells_what_was_held_back(alerting):
    got = []
    alerts = alerting(got.append, same_rule_s=0.5)
    for step in range(300):
        alerts.send(finding(SKIPPED, step))
    until(lambda: sum(1 + each.evidence.get("held_back", 0) for each in got) == 300)
    assert (got[0].place.step, got[0].evidence) == (0, {})
    assert got[-1].place.step == 299


def test_closing_tells_what_was_held_back(alerting):
    got = []
    alerts = alerting(got.append)
    for step in range(4):
        alerts.send(finding(SKIPPED, step))
    alerts.close()
    assert [(each.place.step, each.evidence) for each in got] == [(0, {}), (3, {"held_back": 2})]


# Web hooks


def test_a_webhook_posts_the_finding_as_json(server):
    found = finding(loss=float("nan"))
    webhook(server.address)(found)
    ((path, headers, body),) = server.got
    assert path == "/hook/s3cret"
    assert headers["Content-Type"] == "application/json"
    assert (body["code"], body["message"], body["place"]) == ("AMP807", "the loss is NaN", {"step": 60})
    assert body["evidence"] == {"loss": "NaN"}


def test_for_slack_it_is_text_in_which_nothing_is_a_command(server):
    webhook(server.address, format="slack")(finding(message="<!channel> a & b", held_back=3))
    text = server.got[0][2]["text"]
    head, message, fix = text.split("\n")
    assert head == "*error: AMP807 training-stopped* at step 60"
    assert message == "&lt;!channel&gt; a &amp; b (3 more of this rule since the last one sent)"
    assert fix == STOPPED.fix


@pytest.mark.parametrize(
    ("answers", "tries", "fails"),
    [
        ([500, 503, 200], 3, None),
        ([429, 200], 2, None),
        ([500] * 4, 4, "HTTP Error 500"),
        ([404, 200], 1, "HTTP Error 404"),
        ([400, 200], 1, "HTTP Error 400"),
    ],
)
def test_what_may_pass_is_tried_again(server, answers, tries, fails):
    server.answers = [(status, {}) for status in answers]
    post = webhook(server.address, retries=3)
    if fails is None:
        post(finding())
    else:
        with pytest.raises(OSError, match=fails):
            post(finding())
    assert len(server.got) == tries


def test_a_server_may_say_when_to_come_again_but_not_next_year(server, monkeypatch):
    waits = []
    monkeypatch.setattr(alert_kinds.time, "sleep", waits.append)
    monkeypatch.setattr(alert_kinds, "BACKOFF_S", 1.0)
    server.answers = [(429, {"Retry-After": "7"}), (503, {"Retry-After": "31536000"}), (503, {"Retry-After": "soon"})]
    webhook(server.address, retries=3)(finding())
    assert waits == [7.0, 60.0, 4.0]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("to", ["ftp://127.0.0.1/x", "file:///etc/passwd", "http://127.0.0.1:{port}/elsewhere"])
def test_it_is_not_sent_on(server, status, to):
    server.answers = [(status, {"Location": to.format(port=server.server_port)})]
    with pytest.raises(OSError, match=r"redirects are not followed|not allowed"):
        webhook(server.address, retries=2)(finding())
    assert len(server.got) == 1


def test_a_server_that_is_away_is_tried_again_and_then_given_up(server, alerting, capsys, monkeypatch):
    waits = []
    monkeypatch.setattr(alert_kinds.time, "sleep", waits.append)
    port = server.server_port
    server.shutdown()
    server.server_close()
    alerts = alerting(webhook(f"http://127.0.0.1:{port}/hook/s3cret", retries=2))
    alerts.send(finding())
    alerts.close()
    said = capsys.readouterr().err
    assert f"the alert webhook(http://127.0.0.1:{port}) failed" in said
    assert "s3cret" not in said, "whoever has the address may post there"
    assert waits == [0.01, 0.02]


def test_a_server_that_never_answers_runs_out_of_time():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(OSError, match="timed out"):
        webhook(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout=0.1, retries=1)(finding())


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://example.org/x", "file:///etc/passwd", "example.org/hook", "", "https://", "http://host:port/", None),
        *("http://user:word@example.org/", "http://example.org/a b", "http://example.org/\r\nX: y"),
    ],
)
def test_what_is_no_web_address_is_refused_and_not_shown(url):
    with pytest.raises(BadInput, match=r"^webhook\(url\): expected an ") as caught:
        webhook(url)
    assert not any(secret in str(caught.value) for secret in ("word", "passwd", "X: y"))


@pytest.mark.parametrize("options", [{"format": "xml"}, {"timeout": 0}, {"retries": -1}, {"timeout": float("nan")}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(BadInput, match=rf"^webhook\({next(iter(options))}|^webhook\(timeout="):
        webhook("https://example.org/", **options)


# Commands


def python(code):
    return [sys.executable, "-c", code]


def test_a_command_gets_the_finding_on_its_standard_input(tmp_path):
    copy = tmp_path / "a file; touch b"
    command([*python("import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())"), str(copy)])(finding())
    assert json.loads(copy.read_bytes())["code"] == "AMP807"
    assert [path.name for path in tmp_path.iterdir()] == [copy.name], "no shell has read the name"


def test_a_command_is_no_program_of_the_current_folder_by_an_empty_part_of_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notify").write_text("#!/bin/sh\ntouch was-run\n")
    (tmp_path / "notify").chmod(0o755)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:")
    with pytest.raises(BadInput, match="program 'notify' not found"):
        command(["notify"])
    command(["./notify"])(finding())
    assert (tmp_path / "was-run").exists()


def test_a_command_that_fails_says_why():
    with pytest.raises(OSError, match=r"^exit code 3: no such room$"):
        command(python("import sys; print('trying'); print('no such room', file=sys.stderr); sys.exit(3)"))(finding())


def test_a_command_that_takes_too_long_is_ended_and_its_arguments_are_not_shown(alerting, capsys):
    alerts = alerting(command(python("import time; time.sleep(600)  # s3cret"), timeout=0.5))
    alerts.send(finding())
    alerts.close(timeout=120)
    said = capsys.readouterr().err
    assert "TimeoutError: it took longer than 0.5 s and was killed" in said
    assert "s3cret" not in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("notify -u", r"command\('notify -u'\): expected a list of the program and its arguments"),
        ([], r"command\(\[\]\): expected a list"),
        ([3], r"command\(\[3\]\): expected a list"),
        (["no-such-program-here"], "program 'no-such-program-here' not found"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(given, message):
    with pytest.raises(BadInput, match=message):
        command(given)


# Standard error


def test_stderr_shows_the_finding_with_its_fix_and_nothing_that_moves_the_cursor(capsys):
    stderr()(finding(message="bad\x1b[2J", held_back=1200))
    assert capsys.readouterr().err == (
        "ampwise: error: at step 60: AMP807 training-stopped: bad\\x1b[2J (1,200 more of this rule since the last "
        f"one sent)\n    {STOPPED.fix}\n"
    )
