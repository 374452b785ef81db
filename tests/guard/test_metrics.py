"""A run's numbers as Prometheus reads them, on loopback only."""

import http.client
import math
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from ampwise.errors import BadInput, UnknownName
from ampwise.guard import metrics as module
from ampwise.guard.metrics import COUNTS, NUMBERS, Metrics

parser = pytest.importorskip("prometheus_client.parser")


@pytest.fixture
def metrics():
    opened = Metrics(port=0)
    yield opened
    opened.close()


def scraped(metrics):
    """As Prometheus's own parser understands it: values by name."""
    with urllib.request.urlopen(metrics.address, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        families = list(parser.text_string_to_metric_families(answer.read().decode()))
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_at_first_all_is_there_and_unknown(metrics):
    found = scraped(metrics)
    assert all(math.isnan(found[f"ampwise_{name}"]) for name, _ in NUMBERS.values())
    assert all(found[f"ampwise_{name}_total"] == 0 for name, _ in COUNTS.values())
    assert math.isnan(found["ampwise_seconds_since_checkpoint"])
    assert all(name.startswith("ampwise_") for name in found), "nothing of the process or the script"


def test_numbers_are_set_and_counts_grow(metrics):
    metrics.update(step=400, loss=2.5, scale=65536.0, grad_norm=math.inf, applied=398, skipped=1)
    metrics.update(loss=None, applied=None)
    metrics.count("skipped")
    metrics.count("checkpoints_failed")
    found = scraped(metrics)
    assert (found["ampwise_step"], found["ampwise_loss_scale"]) == (400, 65536)
    assert math.isnan(found["ampwise_loss"])
    assert found["ampwise_grad_norm"] == math.inf
    assert (found["ampwise_steps_skipped_total"], found["ampwise_steps_applied_total"]) == (2, 398)
    assert found["ampwise_checkpoints_failed_total"] == 1


def test_steps_that_are_taken_again_count_again(metrics):
    for total in (5, 10, 4, 6):  # put back to 4 after 10
        metrics.update(applied=total)
    assert scraped(metrics)["ampwise_steps_applied_total"] == 12


def test_the_age_of_the_last_checkpoint_grows_whatever_the_clock_says(metrics, monkeypatch):
    metrics.count("checkpoints_failed")
    metrics.update(checkpoints=0)
    assert math.isnan(scraped(metrics)["ampwise_seconds_since_checkpoint"])
    metrics.update(checkpoints=1)
    written = time.monotonic()
    monkeypatch.setattr(module.time, "time", lambda: 0.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: written + 90.0)
    metrics.update(checkpoints=1)
    assert scraped(metrics)["ampwise_seconds_since_checkpoint"] == pytest.approx(90.0, abs=1.0)
    metrics.count("checkpoints")
    assert scraped(metrics)["ampwise_seconds_since_checkpoint"] == 0.0


def test_names_that_are_not_there_are_refused(metrics):
    with pytest.raises(UnknownName, match=r"unknown metric 'los'\. Did you mean loss"):
        metrics.update(los=3.0)
    with pytest.raises(UnknownName, match=r"unknown count 'rollback'\. Did you mean rollbacks\?"):
        metrics.count("rollback")


def test_several_in_one_process_are_apart(metrics):
    other = Metrics()
    other.update(step=7)
    try:
        assert other.port != metrics.port
        assert math.isnan(scraped(metrics)["ampwise_step"])
    finally:
        other.close()


def test_it_listens_on_loopback_alone(metrics):
    assert metrics._server.socket.getsockname() == ("127.0.0.1", metrics.port)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((name, 200) for name in ("127.0.0.1", "localhost:9", "LOCALHOST", "[::1]:80")),
        *((name, 403) for name in ("evil.example", "127.0.0.1.evil.example", "", "localhost.evil.example:80")),
    ],
)
def test_only_names_of_this_machine_are_answered(metrics, host, status):
    connection = http.client.HTTPConnection("127.0.0.1", metrics.port, timeout=10)
    connection.request("GET", "/metrics", headers={"Host": host})
    with connection.getresponse() as answer:
        assert answer.status == status
        assert (b"ampwise_step" in answer.read()) == (status == 200)
    connection.close()


def test_nonsense_from_a_client_is_not_written_to_the_terminal(metrics, capsys):
    for sent in (b"\x00\xff\r\n\r\n", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", metrics.port), timeout=10) as client:
            client.sendall(sent)
    scraped(metrics)
    assert capsys.readouterr().err == ""


def test_a_port_that_is_taken_is_refused(metrics):
    with pytest.raises(
        BadInput, match=rf"^Metrics\(port={metrics.port}\): that port of 127\.0\.0\.1 cannot be had: .* 0"
    ):
        Metrics(port=metrics.port)


@pytest.mark.parametrize("port", [-1, 65536, "9090", True, 1.5])
def test_what_is_no_port_is_refused(port):
    with pytest.raises(BadInput, match=r"^Metrics\(port="):
        Metrics(port=port)


def test_closing_frees_the_port_and_may_be_done_twice():
    metrics = Metrics()
    metrics.close()
    metrics.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", metrics.port), timeout=1)
    again = Metrics(port=metrics.port)
    again.close()


def test_without_the_client_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from ampwise.errors import MissingDependency\n"
        "from ampwise.guard.metrics import Metrics\n"
        "try: Metrics()\n"
        "except MissingDependency as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "metrics for Prometheus need prometheus_client: pip install 'ampwise[prometheus]'\n"
