"""Hostile clients of the live page, over real sockets of this machine: they get nothing, and the owner is answered."""

import contextlib
import http.client
import random
import socket
import threading
import time
from pathlib import Path

import pytest

from ampwise.report.live import server as server_module
from ampwise.report.live.server import serve
from ampwise.runs.reader import RecordFollower
from ampwise.runs.writer import RecordWriter

from .effort import rounds

SECRET = "hunter2"


@pytest.fixture
def server(tmp_path):
    writer = RecordWriter.create(tmp_path / "run", script="train.py")
    running = serve(RecordFollower(writer.folder), page=lambda _: SECRET, update=lambda _: {"data": SECRET})
    yield running
    running.shutdown()
    running.server_close()
    writer.close("finished", 0)


def owner_is_answered(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    try:
        connection.request("GET", f"/{server.token}/")
        return connection.getresponse().read() == SECRET.encode()
    finally:
        connection.close()


def sent(server, data):
    """What comes back for raw bytes."""
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=120)
    with connection, contextlib.suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))
    return b""


def request(chance, token):
    """A request that is nearly one of the owner's; in one thing it is not."""
    wrong = chance.choice(
        ["", token[:-1], token.upper() + "x", f"..{token}", f"%2e/{token}x", f"{token}\x00", "x" * 9000]
    )
    method = chance.choice(["GET", "get", "HEAD", "POST", "PUT", "TRACE", "CONNECT", "PROPFIND", "\x00", "G" * 300])
    path = chance.choice(
        [f"/{wrong}/", f"/{wrong}/update", f"//{wrong}//", f"http://127.0.0.1/{wrong}/", "*", f"/{wrong}?{wrong}"]
    )
    version = chance.choice(["HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.1.1", "", "\xff"])
    host = chance.choice(["127.0.0.1", "localhost", "evil.example", "127.0.0.1\r\n x", ""])
    header = chance.choice(
        ["", "Content-Length: -1\r\n", "Transfer-Encoding: chunked\r\n", "X: " + "y" * 70_000 + "\r\n"]
    )
    many = chance.choice(["", "A: b\r\n" * 200, "\x00\xff: \xff\r\n"])
    tail = chance.choice(["", "5\r\nhello\r\n0\r\n\r\n", f"GET /{wrong}/ HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3])
    lines = f"{method} {path} {version}\r\nHost: {host}\r\n{header}{many}\r\n{tail}"
    return lines.encode("latin-1", "replace")


def test_whoever_has_no_token_gets_nothing(server, capfd):
    chance = random.Random(9)
    for _ in range(rounds(40, 1500)):
        data = request(chance, server.token)
        cut = chance.choice([len(data), chance.randrange(len(data))])
        answer = sent(server, data[:cut])
        assert SECRET.encode() not in answer
        assert server.token.encode() not in answer.replace(data[:cut], b"")
        assert b" 200 " not in answer[:20]
    assert owner_is_answered(server)
    assert capfd.readouterr() == ("", "")


def test_with_the_token_but_under_another_name_nothing_is_given(server):
    chance = random.Random(10)
    names = [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "127.1",
        "0x7f000001",
        "[::]",
        "LOCALHOST.",
        "",
    ]
    for _ in range(rounds(10, 200)):
        host = chance.choice(names) + chance.choice(["", f":{server.server_port}", ":x"])
        line = f"GET /{server.token}/ HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\n\r\n"
        assert SECRET.encode() not in sent(server, line.encode())


def test_one_request_of_a_connection_is_answered(server):
    """Others that come with it are not read: nothing of one client's is mixed into another's."""
    line = f"GET /{server.token}/ HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n".encode()
    assert sent(server, line * 5).count(SECRET.encode()) <= 1


def test_clients_that_hold_on_do_not_keep_the_owner_out(server, monkeypatch):
    """Half requests, bytes one at a time, and connections that say nothing, more than there is room for."""
    monkeypatch.setattr(server_module, "CLIENT_S", 120.0)
    before, held, done = threading.active_count(), [], threading.Event()

    def drip():
        while not done.wait(0.1):
            for each in held[:]:
                with contextlib.suppress(OSError):
                    each.send(b"G")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        for _ in range(rounds(1, 6)):
            for number in range(server_module.MOST_STRANGERS + 20):
                held.append(socket.create_connection(("127.0.0.1", server.server_port), timeout=120))
                held[-1].sendall([b"", b"GET /", b"GET / HTTP/1.1\r\nHost: "][number % 3])
            assert owner_is_answered(server)
            assert len(server._strangers) <= server_module.MOST_STRANGERS
        monkeypatch.setattr(server_module, "CLIENT_S", 0.5)
        end = time.monotonic() + 120
        while server._strangers and time.monotonic() < end:  # each has its time, and no more
            time.sleep(0.05)
        assert not server._strangers
        while threading.active_count() > before + 1 and time.monotonic() < end:
            time.sleep(0.05)
        assert threading.active_count() <= before + 1
    finally:
        done.set()
        dripping.join()
        for each in held:
            each.close()
    monkeypatch.setattr(server_module, "CLIENT_S", 120.0)
    assert owner_is_answered(server)


def test_a_request_without_end_takes_no_memory(server):
    """The rest of it is not read: the client is cut off instead."""
    written = 0
    with (
        socket.create_connection(("127.0.0.1", server.server_port), timeout=120) as connection,
        contextlib.suppress(OSError),
    ):
        connection.sendall(b"GET / HTTP/1.1\r\n")
        while written < 50_000_000:
            connection.sendall(b"X: " + b"y" * 60_000 + b"\r\n")
            written += 60_000
    assert written < 50_000_000
    assert owner_is_answered(server)


def test_descriptors_are_given_back(server):
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("no /proc here")
    owner_is_answered(server)
    before = len(list(descriptors.iterdir()))
    for _ in range(rounds(30, 500)):
        sent(server, b"GET /x HTTP/1.1\r\n")
    end = time.monotonic() + 120
    while len(list(descriptors.iterdir())) > before + 5 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(list(descriptors.iterdir())) <= before + 5
