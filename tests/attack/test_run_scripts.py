"""Scripts that do what scripts may do, under ``ampwise run``: output, exit code and signal are those of plain Python.

Each is run both ways. ``SHORT`` names those that ``make test`` runs, some of each class.
"""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .effort import FULL, rounds

SOURCE = Path(__file__).parents[2] / "src"

TRAIN = """\
import os, sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return model.weight.sum().item().hex()

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def leave(code):  # as Python does last of all: the destructors of its libraries run, too
    import ctypes
    sys.stdout.flush()
    ctypes.CDLL(None).exit(code)

print(train(5), flush=True)
"""

# Step 6 is profiled: forks come before it, within it, after it.
FORKS = {
    "fork and train": """\
for _ in range(4):
    pid = os.fork()
    if not pid:
        print("child", train(10), flush=True)
        leave(3)
    print(ended(pid), train(1), flush=True)
""",
    "fork and _exit": """\
for _ in range(3):
    pid = os.fork()
    if not pid:
        os._exit(4)
    print(ended(pid), train(1))
""",
    "fork and fall through": """\
pid = os.fork()
print("parent" if pid else "child", ended(pid) if pid else train(3), flush=True)
train(2)
""",
    "fork and raise": """\
train(2)
pid = os.fork()
if not pid:
    raise ValueError("of the child")
print(ended(pid))
""",
    "fork and exit": """\
train(2)
pid = os.fork()
if not pid:
    sys.exit("of the child")
print(ended(pid))
""",
    "fork within a step": """\
def hook(gradient):
    if os.fork() == 0:
        print("child", train(1), flush=True)
        leave(5)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
handle = model.weight.register_hook(hook)
print(train(2))
""",
    "fork within hooks, and the child goes on": """\
pids = []
def hook(*_):
    pids.append(os.fork())
    if not pids[-1]:
        for each in handles:
            each.remove()
handles = [
    model.register_forward_hook(hook), model.weight.register_hook(hook), optimizer.register_step_pre_hook(hook)
]
optimizer.zero_grad()
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
codes = [ended(pid) if pid else "child" for pid in pids]
print(codes, train(0), flush=True)
""",
    "fork in a thread": """\
import threading
def work():
    pid = os.fork()
    if not pid:
        print("child", train(3), flush=True)
        leave(6)
    print(ended(pid), flush=True)
for _ in range(3):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    print(train(1), flush=True)
""",
    "two forks, and the first child leaves": """\
train(2)
there, here = os.pipe()
pid = os.fork()
if not pid:
    os.setsid()
    if os.fork():
        leave(0)
    os.write(here, train(3).encode())
    leave(0)
os.close(here)
print(ended(pid), os.read(there, 100))
""",
    "processes": """\
import multiprocessing
def work(queue, steps):
    queue.put(train(steps))
    sys.exit(7)
context = multiprocessing.get_context("fork")
for steps in (1, 2, 3):
    queue = context.SimpleQueue()
    process = context.Process(target=work, args=(queue, steps))
    process.start()
    print(queue.get(), process.join(), process.exitcode, train(1))
""",
    "a pool": """\
import multiprocessing
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(train(2), pool.map(len, ["a", "bc"]))
    print(pool.apply(train, (10,)))
""",
    "loaders": """\
from torch.utils.data import DataLoader
def loader():
    return DataLoader(range(4), batch_size=2, num_workers=1, multiprocessing_context="fork")
before = iter(loader())
for number in range(3):
    print([each.tolist() for each in loader()], train(1))
print([each.tolist() for each in before])
""",
    "a child that is killed": """\
train(2)
pid = os.fork()
if not pid:
    os.kill(os.getpid(), 9)
print(ended(pid), train(1))
""",
    "a child that becomes another program": """\
train(2)
pid = os.fork()
if not pid:
    os.execv(sys.executable, [sys.executable, "-S", "-c", "print('program')"])
print(ended(pid), train(1))
""",
    "subprocesses": """\
import subprocess
command = [sys.executable, "-S", "-c", "import sys; print('sub', flush=True); sys.exit(2)"]
for _ in range(2):
    print(train(1), flush=True)
    print(subprocess.run(command).returncode, flush=True)
    print(subprocess.run(command, preexec_fn=lambda: os.write(1, b"before\\n")).returncode, flush=True)
""",
    "a child that handles its end": """\
import atexit
train(2)
atexit.register(print, "at exit")
pid = os.fork()
if not pid:
    atexit.register(print, "at the child's exit")
    sys.exit(2)
print(ended(pid))
""",
}

OBJECTS = {
    "modules that are compared by value": """\
class Equal(torch.nn.Linear):
    def __eq__(self, other):
        return self.weight == other.weight
    def __hash__(self):
        return 1
model = Equal(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
alone = Equal(4, 1)
other = torch.optim.SGD(alone.parameters(), lr=0.1)
for _ in range(9):
    alone(torch.ones(2, 4)).sum().backward()
    other.step()
    print(train(1))
torch.save(alone, "saved")
""",
    "a dataclass that is a module": """\
from dataclasses import dataclass
@dataclass(unsafe_hash=True)
class Model(torch.nn.Module):
    width: int
    scale: torch.Tensor = None
    def __new__(cls, *args, **kwargs):
        return super().__new__(cls)
    def __setattr__(self, name, value):
        if "_parameters" not in vars(self):
            vars(self)[name] = value
        else:
            super().__setattr__(name, value)
    def __hash__(self):
        return hash(self.width)
    def __post_init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, self.width)
    def forward(self, x):
        return self.inner(x)
models = [Model(1, torch.ones(2)), Model(1, torch.ones(2))]
for model in models:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(9):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    print(model.inner.weight.sum().item())
""",
    "modules that cannot be asked": """\
class Shy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)
    def __bool__(self):
        raise RuntimeError("bool")
    def __len__(self):
        raise RuntimeError("len")
    def __eq__(self, other):
        raise RuntimeError("eq")
    def __hash__(self):
        return 1
    def __repr__(self):
        raise RuntimeError("repr")
    def forward(self, x):
        return self.inner(x)
model = Shy()
optimizer = torch.optim.SGD([*model.parameters()], lr=0.1)
for _ in range(9):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print(model.inner.weight.sum().item())
""",
    "an empty list of layers that is a model": """\
class Layers(torch.nn.ModuleList):
    def __init__(self):
        super().__init__()
        self.register_parameter("weight", torch.nn.Parameter(torch.ones(4)))
    def forward(self, x):
        return x * self.weight
    @property
    def __class__(self):
        return dict
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return None if name.startswith("__") else 1
model = Layers()
optimizer = torch.optim.SGD(torch.nn.Module.parameters(model), lr=0.1)
for _ in range(9):
    optimizer.zero_grad()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
print(len(model), bool(model), model.weight)
""",
    "optimizers and scalers that are compared by value": """\
class Equal(torch.optim.SGD):
    __hash__ = None
    def __eq__(self, other):
        raise RuntimeError("eq")
    def __bool__(self):
        raise RuntimeError("bool")
class Scaler(torch.amp.GradScaler):
    def __eq__(self, other):
        raise RuntimeError("eq")
    def __bool__(self):
        raise RuntimeError("bool")
optimizer = Equal(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)
scaler = Scaler("cpu", init_scale=4.0)
for _ in range(9):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
print(model.weight.sum().item())
""",
    "a batch of the script's own kind": """\
class Batch:
    __slots__ = ("x",)
    def __init__(self, x):
        self.x = x
    def __eq__(self, other):
        raise RuntimeError("eq")
    def __bool__(self):
        raise RuntimeError("bool")
    def __repr__(self):
        raise RuntimeError("repr")
    def __getattr__(self, name):
        return 7
class Model(torch.nn.Linear):
    def forward(self, batch):
        out = super().forward(batch.x)
        return Batch(out)
model = Model(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    optimizer.zero_grad()
    model(Batch(torch.ones(2, 4))).x.sum().backward()
    optimizer.step()
print(model.weight.sum().item())
""",
}

STREAMS = {
    "stdout closed": "print('said'); sys.stdout.close()\n",
    "stderr closed": "print('said', file=sys.stderr); sys.stderr.close()\n",
    "both closed, and an exception": "sys.stdout.close(); sys.stderr.close(); 1 / 0\n",
    "descriptors closed": "os.close(1); os.close(2)\n",
    "descriptor 1 closed with something to say": "print('said'); os.close(1)\n",
    "stderr's descriptor closed, and an exception": "os.close(2); 1 / 0\n",
    "streams that are None": "sys.stdout = sys.stderr = None\n",
    "streams that can only write": """\
class Out:
    def __init__(self, number):
        self.number = number
    def write(self, text):
        os.write(self.number, text.encode())
sys.stdout.flush()
sys.stdout, sys.stderr = Out(1), Out(2)
print("said")
""",
    "streams that fail": """\
class Out:
    def write(self, text):
        raise RuntimeError("no")
    def flush(self):
        raise RuntimeError("no")
sys.stdout.flush()
sys.stdout = sys.stderr = Out()
sys.exit(3)
""",
    "streams that are gone": "del sys.stdout, sys.stderr; sys.exit(4)\n",
}

ENDS = {
    "exit with words": "sys.exit('words')\n",
    "exit with None": "sys.exit(None)\n",
    "exit with a large number": "sys.exit(2**40 + 3)\n",
    "exit with a negative number": "sys.exit(-1)\n",
    "exit with what cannot be shown": """\
class Odd:
    def __str__(self):
        raise RuntimeError("no")
sys.exit(Odd())
""",
    "exit with True": "sys.exit(True)\n",
    "exit within exit": """\
try:
    sys.exit(3)
finally:
    sys.exit(5)
""",
    "handlers at exit": """\
import atexit
atexit.register(lambda: print("last"))
atexit.register(lambda: print("first", os.getpid() > 0))
""",
    "a handler at exit that fails": "import atexit\natexit.register(lambda: 1 / 0)\n",
    "killed": "os.kill(os.getpid(), 9)\n",
    "terminated": "os.kill(os.getpid(), 15)\n",
    "terminated, and handled": """\
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
os.kill(os.getpid(), 15)
print('not reached')
""",
    "interrupted": "import signal\nsignal.raise_signal(signal.SIGINT)\n",
    "interrupted, and handled": """\
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("handled")
""",
    "_exit": "sys.stdout.flush(); os._exit(6)\n",
    "another program": """\
sys.stdout.flush()
os.execv(sys.executable, [sys.executable, "-S", "-c", "import sys; print('program'); sys.exit(8)"])
""",
    "an exception whose text cannot be had": """\
class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no")
raise Odd
""",
    "an exception group": "raise ExceptionGroup('several', [ValueError(1), KeyError(2)])\n",
    "a hook for exceptions": """\
sys.excepthook = lambda kind, error, trace: print("hook", kind.__name__, trace.tb_lineno)
raise KeyError
""",
}

SURROUNDINGS = {
    "too deep": """\
def deeper():
    deeper()
sys.setrecursionlimit(150)
train(4)
try:
    deeper()
except RecursionError as error:
    print(error, sys.getrecursionlimit())
""",
    "stderr's descriptor closed while it is profiled": "os.close(2); print(train(4))\n",
    "another folder": "os.mkdir('there'); os.chdir('there'); print(train(4), os.getcwd())\n",
    "a folder that is gone": "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); print(train(4))\n",
    "threads that outlive the script": """\
import threading, time
def late():
    time.sleep(0.1)
    print(train(5))
threading.Thread(target=late).start()
""",
    "a daemon that trains on": """\
import threading
def endless():
    while True:
        train(1)
threading.Thread(target=endless, daemon=True).start()
print("end")
""",
    "a trace of its own": """\
seen = set()
def trace(frame, event, arg):
    seen.add(frame.f_code.co_name)
sys.settrace(trace)
sys.setprofile(lambda *_: None)
train(4)
print(sys.gettrace() is trace, sys.getprofile() is not None, "train" in seen)
sys.settrace(None)
sys.setprofile(None)
""",
    "no garbage collector": "import gc\ngc.disable(); print(train(4), gc.isenabled(), gc.get_threshold())\n",
    "few files": """\
import resource
train(2)
resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))
print(train(5))
""",
    "no room for files": """\
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
print(train(5))
""",
    "the record is removed": """\
import shutil
shutil.rmtree("run", ignore_errors=True)
print(train(300))
""",
    "warnings are errors": """\
import warnings
warnings.simplefilter("error")
print(train(5))
""",
    "torch is taken out of sys.modules": "del sys.modules['torch']; print(train(5))\n",
    "torch is changed by the script": """\
plain = torch.optim.SGD.step
calls = []
def step(self, *args, **kwargs):
    calls.append(1)
    return plain(self, *args, **kwargs)
torch.optim.SGD.step = step
backward = torch.autograd.backward
torch.autograd.backward = lambda *args, **kwargs: (calls.append(2), backward(*args, **kwargs))[1]
print(train(5), calls)
def fails(*_, **__):
    raise RuntimeError("mine")
torch.save = torch.compile = fails
""",
    "what a script looks at": """\
import inspect, __main__
print(__name__, __file__, __spec__, __main__.model is model, sys.path[0] == os.path.dirname(__file__))
print([each.function for each in inspect.stack()][:1], list(inspect.signature(torch.autograd.backward).parameters))
print(inspect.signature(torch.nn.Module.parameters), torch.nn.Module.parameters.__name__)
""",
    "spawned processes": """\
import multiprocessing
def work(number):
    print("spawned", number, __name__, flush=True)
    sys.exit(number)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work, args=(3,))
    process.start()
    process.join()
    print(process.exitcode)
""",
}

SHORT = {
    *("fork and train", "fork within hooks, and the child goes on", "loaders"),
    "modules that are compared by value",
    *("both closed, and an exception", "streams that are gone"),
    *("exit with words", "terminated", "interrupted"),
    *("few files", "torch is changed by the script"),
}


def cases(**classes):
    """Those that are run, by class."""
    return [
        pytest.param(text, id=f"{kind}: {name}")
        for kind, scripts in classes.items()
        for name, text in scripts.items()
        if FULL or name in SHORT
    ]


@pytest.mark.parametrize("text", cases(forks=FORKS, objects=OBJECTS, surroundings=SURROUNDINGS))
def test_a_script_that_trains_does_what_it_does_without_us(warm, tmp_path, text):
    def run(*words):
        for path in (tmp_path / "there", tmp_path / "gone"):
            if path.exists():
                path.rmdir()
        return warm.run(*words, "script.py", cwd=tmp_path)

    Path(tmp_path, "script.py").write_text(TRAIN + text)
    plain = run()
    for _ in range(rounds(1, 3) if "fork" in text else 1):
        watched = run("-m", "ampwise", "run", "-f", "-q", "-o", "run")
        assert (watched.returncode, watched.stdout) == (plain.returncode, plain.stdout)
        assert lines_of(watched.stderr, text) == lines_of(plain.stderr, text)
        if "RLIMIT" not in text and "rmtree" not in text:
            check_record(tmp_path / "run", plain.returncode)


def lines_of(stderr, text):
    """In any order where several processes write at the same time: two tracebacks mix line by line."""
    lines = stderr.splitlines()
    return sorted(lines) if "fork" in text else lines


def check_record(folder, code):
    """It is whole, and that of the process which began it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["exit_code"], manifest["trouble"]) == (code, [])
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert max(row["s"] for row in rows) == manifest["facts"]["steps"]
    assert len({(row.get("o", 0), row["s"]) for row in rows}) == len(rows)
    assert not [each for each in manifest["facts"]["not_measured"] if "could not" in each]


@pytest.mark.parametrize("text", cases(streams=STREAMS, ends=ENDS))
def test_a_script_ends_as_it_does_without_us(tmp_path, text):
    """In a real Python, whose own end is part of it."""
    Path(tmp_path, "script.py").write_text("import os, sys\nprint('begin', flush=True)\n" + text)
    plain = python(tmp_path, "script.py")
    watched = python(tmp_path, "-m", "ampwise", "run", "-q", "-o", "run", "script.py")
    interrupted = plain.returncode == -signal.SIGINT  # as a shell has it: 128 + SIGINT
    code = 128 + signal.SIGINT if interrupted else plain.returncode
    assert (watched.returncode, watched.stdout) == (code, plain.stdout)
    assert without_addresses(watched.stderr) == without_addresses(plain.stderr)
    told = python(tmp_path, "-m", "ampwise", "run", "-f", "-o", "run", "script.py")
    assert (told.returncode, told.stdout) == (code, plain.stdout)
    assert "ampwise/cli" not in told.stderr


def without_addresses(text):
    return re.sub(r"0x\w+|refcount : \d+", "", text)


def python(folder, *words, shell=""):
    command = [sys.executable, *words]
    environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"}
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.half_by_day
@pytest.mark.parametrize("shell", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", "> /dev/full", "> /dev/full 2>&1"])
def test_streams_that_the_shell_has_closed(tmp_path, shell):
    text = (
        "import sys\nprint('said')\n"
        "open('seen', 'a').write(f'{sys.stdout is None} {sys.stderr is None} ')\nsys.exit(3)\n"
    )
    Path(tmp_path, "script.py").write_text(text)
    plain = python(tmp_path, "script.py", shell=shell)
    watched = python(tmp_path, "-m", "ampwise", "run", "-o", "run", "script.py", shell=shell)
    assert (watched.returncode, watched.stdout) == (plain.returncode, plain.stdout)
    seen = Path(tmp_path, "seen").read_text().split()
    assert seen[:2] == seen[2:]
