"""Pythons that begin with torch loaded: each is a fork of one process, which does nothing but import.

How a process ends, what it says last, what a signal leaves: such tests need a process each, and torch with its compiler
takes four seconds of a processor to import. A fork has it at once. Whoever tests how Python starts, or what is imported
when, starts a real one.

    warm = Warm(folder)
    warm.run("-m", "ampwise", "run", "train.py", cwd=folder)  # as subprocess.run([sys.executable, ...], text=True)
    warm.on_terminal("-m", "ampwise", "explain", cwd=folder)  # the bytes that a terminal gets
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOADED = (
    *("torch", "torch._dynamo", "torch.distributed.run", "torch.testing"),
    *("ampwise.cli.run", "ampwise.report.run_text", "ampwise.watch.watch"),
)
RANK = f"""#!{sys.executable} -S
# Stands for Python where torchrun starts its ranks.
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from warm import stand_for
stand_for(%r, sys.argv[1:])
"""


def force_nothing_to_disk():
    """Leave to the system when files reach the disk: no test loses its power, and some disks take long for each.

    At night all is as it is for users.
    """
    if "AMPWISE_NIGHTLY" not in os.environ:
        os.fsync = os.fstat  # which refuses what is no file, too


class Warm:
    """The parent of the forks, and how to ask it for one.

    Whoever has the same folder has the same parent. It ends when the last of them has gone, whichever way.
    """

    def __init__(self, folder):
        self.rank, self.parent = folder / "python", None
        self.users = (folder / "users").open("w")
        fcntl.flock(self.users, fcntl.LOCK_SH)
        with (folder / "address").open("a+") as address:
            fcntl.flock(address, fcntl.LOCK_EX)
            address.seek(0)
            self.address = address.read()
            if not self.address:
                self.start()
                address.write(self.address)

    def start(self):
        self.folder = tempfile.TemporaryDirectory()  # the name of a socket is a short one
        self.address = str(Path(self.folder.name, "socket"))
        self.rank.write_text(RANK % self.address)
        self.rank.chmod(0o700)
        # One thread each: the tests around these use the other cores, and a fork has no threads but its own.
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        self.parent = subprocess.Popen(
            [sys.executable, __file__, self.address, self.users.name],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.parent.stdout.readline() == "ready\n"

    def run(self, *words, cwd, env=None, input="", timeout=120, loaded=()):
        """Run Python with these words, to its end. What is ``loaded`` is there from now on, for all that follow."""
        environment = {
            "PYTHON_EXEC": str(self.rank),
            "PYTHONPATH": str(ROOT / "src"),
            **(os.environ if env is None else env),
        }
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            stdin.write(input.encode())
            stdin.seek(0)
            files = [each.fileno() for each in (stdin, out, err)]
            with Fork(self.address, words, files, cwd, environment, loaded) as fork:
                code = fork.wait(timeout)
            said = [each.read().decode() for each in (out, err) if each.seek(0) == 0]
        return subprocess.CompletedProcess([sys.executable, *words], code, *said)

    def on_terminal(self, *words, cwd, env, timeout=120):
        """What a terminal gets of Python with these words: every byte of its stdout and stderr, which are the same."""
        environment = {"PYTHON_EXEC": str(self.rank), "PYTHONPATH": str(ROOT / "src"), **env}
        with terminal(timeout) as (shown, files), Fork(self.address, words, files, cwd, environment) as fork:
            for each in files:
                os.close(each)
            try:
                return b"".join(shown)
            finally:
                fork.kill()

    @contextlib.contextmanager
    def asked_by_lines(self, *words, said, loaded=()):
        """A function that writes a line to Python with these words and returns the line it answers; ``said`` is a file
        for its stderr."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        (asked, asks), (answers, answered) = os.pipe(), os.pipe()
        files = [asked, answered, said.fileno()]
        with (
            os.fdopen(asks, "w", buffering=1) as asks,
            os.fdopen(answers) as answers,
            Fork(self.address, words, files, ROOT, environment, loaded) as fork,
        ):
            os.close(asked)
            os.close(answered)
            yield lambda line: (asks.write(f"{line}\n"), answers.readline())[1]
            asks.close()
            fork.wait(timeout=120)

    def close(self):
        fcntl.flock(self.users, fcntl.LOCK_UN)
        self.users.close()
        if self.parent is not None:
            self.parent.wait(timeout=600)  # others may be using it
            self.parent.stdout.close()
            self.folder.cleanup()


class Cold:
    """The same with real ones, for who doubts the forks: AMPWISE_COLD=1."""

    def run(self, *words, cwd, env=None, input="", timeout=120, loaded=()):
        command = [sys.executable, *map(str, words)]
        environment = {"PYTHONPATH": str(ROOT / "src"), **(os.environ if env is None else env)}
        return subprocess.run(
            command, cwd=cwd, env=environment, input=input, timeout=timeout, check=False, capture_output=True, text=True
        )

    def on_terminal(self, *words, cwd, env, timeout=120):
        with terminal(timeout) as (shown, files):
            stdin, stdout, stderr = files
            command = [sys.executable, *map(str, words)]
            environment = {"PYTHONPATH": str(ROOT / "src"), **env}
            started = subprocess.Popen(command, cwd=cwd, env=environment, stdin=stdin, stdout=stdout, stderr=stderr)
            for each in files:
                os.close(each)
            try:
                return b"".join(shown)
            finally:
                started.kill()
                started.wait()

    @contextlib.contextmanager
    def asked_by_lines(self, *words, said, loaded=()):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said, "text": True, "bufsize": 1}
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        with subprocess.Popen([sys.executable, *map(str, words)], env=environment, **pipes) as started:
            yield lambda line: (started.stdin.write(f"{line}\n"), started.stdout.readline())[1]

    def close(self):
        pass


@contextlib.contextmanager
def terminal(timeout, rows=24, columns=100):
    """What is shown on a terminal until all who write there have gone; and files: nothing to read, and twice its other
    end, which are to be closed by who has handed them on."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def shown():
        with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
            while select.select([ours], [], [], timeout)[0]:
                yield os.read(ours, 65536)
            raise subprocess.TimeoutExpired("a command that writes nothing", timeout)

    try:
        yield shown(), [os.open(os.devnull, os.O_RDONLY), theirs, os.dup(theirs)]
    finally:
        os.close(ours)


class Fork:
    """A fork with these words, and these files as its stdin, stdout and stderr."""

    def __init__(self, address, words, files, cwd, env, loaded=()):
        request = {"words": [str(word) for word in words], "cwd": str(cwd), "env": env, "loaded": list(loaded)}
        data = json.dumps(request).encode() + b"\n"
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(address)
        sent = socket.send_fds(self.connection, [data], files)
        self.connection.sendall(data[sent:])
        self.answers = self.connection.makefile()
        self.pid = int(self.answers.readline())

    def wait(self, timeout=None):
        """Its exit code, or the signal it died of as a negative number; killed when it takes too long."""
        self.connection.settimeout(timeout)
        try:
            return int(self.answers.readline())
        except TimeoutError:
            self.kill()
            raise subprocess.TimeoutExpired(str(self.pid), timeout) from None

    def kill(self):
        """End it, if it has not ended by itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.answers.close()
        self.connection.close()


def stand_for(address, words):
    """Be the process of a fork to whoever has started this one: signals go on to it, and its end is ours."""
    with Fork(address, words, [0, 1, 2], os.getcwd(), dict(os.environ)) as fork:  # noqa: PTH109
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda number, _: os.kill(fork.pid, number))
        code = fork.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


# The parent


def serve(address, users):
    """Import, then fork for whoever asks. Returns in the forks only, with the words they are to run."""
    force_nothing_to_disk()
    load(LOADED)
    fixes = importlib.import_module("ampwise.watch.fix_diffs")
    fixes.SECONDS = 600.0  # no clock decides what is found
    gc.freeze()  # collections in the forks leave these pages alone, which are then shared to the end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        listening.settimeout(0.5)
        print("ready", flush=True)
        while True:
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                if not in_use(users):
                    os._exit(0)
                continue
            request, files = received(connection)
            load(request["loaded"])
            if os.fork() == 0:
                return fork_again(connection, request, files)
            connection.close()
            for each in files:
                os.close(each)


def in_use(users):
    """Whether somebody holds the lock; it goes with its holder, even with one that is killed."""
    with Path(users).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def load(names):
    for name in names:
        importlib.import_module(name)


def received(connection):
    data, files, _, _ = socket.recv_fds(connection, 65536, 3)
    while not data.endswith(b"\n"):
        data += connection.recv(65536)
    return json.loads(data), files


def fork_again(connection, request, files):
    """In a child: fork once more, tell its number and its end. Returns in the fork, which is as it was asked for.

    So the parent need not wait: ranks run at the same time.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        connection.sendall(b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    connection.close()
    for number, each in enumerate(files):
        os.dup2(each, number)
        os.close(each)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[1:1] = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
    return request["words"]


# The forks


def run(words):
    """Be a Python that was started with these words."""
    words = words[1:] if words[0] == "-u" else words
    sys.orig_argv = [sys.executable, *words]
    first, *rest = words
    if first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()  # noqa: PTH109
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = words, str(Path(first).resolve().parent)
        runpy.run_path(str(Path(first).absolute()), run_name="__main__")


def leave(words):
    """Run them to the end that Python would come to: its threads, what is registered for the end, unwritten words.

    Only the modules are not taken apart, which takes a second with torch among them.
    """
    code = 0
    try:
        run(words)
    except SystemExit as leaving:
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code or 0) & 0xFF)


if __name__ == "__main__":
    leave(serve(*sys.argv[1:]))
