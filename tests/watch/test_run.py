"""`ampwise run` as a user has it: the script's own arguments, output and exit code, and a record of what was seen."""

import json
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ampwise.report.verdict import setup_of
from ampwise.runs.reader import Run

from ..night import by_night

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "110"}
TRAINING = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def step():
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.ones(4, 8)).float().square().mean()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss
"""


def ampwise(*words, folder, **options):
    command = [sys.executable, "-m", "ampwise", *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False, **options
    )


def python(*words, folder):
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


@pytest.fixture
def watched(warm, tmp_path):
    """`ampwise run`, where it does not matter that torch is loaded already."""

    def watched(*words):
        return warm.run("-m", "ampwise", "run", *words, cwd=tmp_path, env=ENVIRONMENT)

    return watched


@pytest.fixture
def write(tmp_path):
    def write(text, name="train.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


# The script is its own master


WHO_AM_I = """
import os, sys
print(__name__, __file__, sys.argv, sys.path[0], __spec__ is None, sys.modules["__main__"].__dict__ is globals())
print("on stderr", file=sys.stderr)
"""


def test_a_script_sees_what_it_would_see_without_us(write, tmp_path):
    write(WHO_AM_I)
    plain = python("train.py", "--epochs", "3", "-o", "x", folder=tmp_path)
    run = ampwise("run", "-q", "-o", "run", "train.py", "--epochs", "3", "-o", "x", folder=tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (0, plain.stdout, plain.stderr)


@pytest.mark.parametrize("module", ["package", "package.inner"])
def test_a_module_too(write, tmp_path, module):
    write("", "package/__init__.py")
    for name in ("__main__", "inner"):
        write("from . import __name__ as home\nimport sys\nprint(__name__, __package__, sys.argv, sys.path[0], home)",
              f"package/{name}.py")  # fmt: skip
    plain = python("-m", module, "one", folder=tmp_path)
    run = ampwise("run", "-q", "-o", "run", "-m", module, "one", folder=tmp_path)
    assert plain.returncode == 0
    assert (run.returncode, run.stdout, run.stderr) == (0, plain.stdout, plain.stderr)


@pytest.mark.half_by_day
@pytest.mark.parametrize(
    "text",
    [
        "import sys\nsys.exit()",
        "import sys\nsys.exit(3)",
        "import sys\nsys.exit('could not read the data')",
        "raise SystemExit(False)",
        "import os\nprint('out', flush=True)\nos._exit(7)",
        "def f():\n    raise ValueError('no data')\n\n\nf()",
        "1 +\n",
        "import no_such_module",
        "import atexit\natexit.register(print, 'last')\nprint('first')",
        "import sys\nsys.excepthook = lambda *error: print('mine', error[0].__name__)\n1 / 0",
    ],
)
def test_exit_codes_and_words_are_its_own(write, tmp_path, text):
    write(text)
    plain = python("train.py", folder=tmp_path)
    run = ampwise("run", "-q", "-o", "run", "train.py", folder=tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    manifest = Run.read(tmp_path / "run").manifest
    assert manifest["exit_code"] == plain.returncode
    fails = any(word in text for word in ("_exit", "ValueError", "1 +", "no_such", "1 / 0"))
    assert manifest["status"] == ("failed" if fails else "finished")


def test_stdin_is_the_scripts(write, tmp_path):
    write("print(input().upper())")
    assert ampwise("run", "-q", "-o", "run", "train.py", folder=tmp_path, input="hello\n").stdout == "HELLO\n"


IDLE_POOL = """
from concurrent.futures import {kind}
if __name__ == "__main__":
    pool = {kind}(1)
    assert pool.submit(abs, -3).result() == 3
    left = pool.submit(print, "done at the end", flush=True)
"""


@pytest.mark.half_by_day
@pytest.mark.parametrize("kind", ["ThreadPoolExecutor", "ProcessPoolExecutor"])
def test_a_pool_that_nobody_has_shut_down_does_not_keep_the_run_alive(write, watched, tmp_path, kind):
    write(IDLE_POOL.format(kind=kind) + textwrap.indent(TRAINING + "step()\n", "    "))
    run = watched("-q", "-o", "run", "train.py")  # which waits for two minutes at most
    assert (run.returncode, run.stdout, run.stderr) == (0, "done at the end\n", "")
    record = Run.read(tmp_path / "run")
    assert record.status == "finished"
    assert len(record.steps) == 1
    assert not [sentence for sentence in record.facts["not_measured"] if "could not be followed" in sentence]


@pytest.mark.nightly
def test_children_of_a_fork_leave_the_record_alone(write, watched, tmp_path):
    write(
        TRAINING
        + """
import os
step()
if os.fork() == 0:
    raise SystemExit(0)
os.wait()
step()
"""
    )
    assert watched("-q", "-o", "run", "train.py").returncode == 0
    run = Run.read(tmp_path / "run")
    assert [(row.first, row.last) for row in run.steps] == [(1, 1), (2, 2)]
    assert not run.trouble


@pytest.mark.nightly
def test_variables_set_before_torch_is_imported_count(write, tmp_path):
    write("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\nprint(torch.get_num_threads())")
    assert ampwise("run", "-q", "-o", "run", "train.py", folder=tmp_path).stdout == "1\n"


# What is left of a run


def test_a_finding_and_the_record_of_it(write, warm, watched, tmp_path):
    path = write(TRAINING + "\nfor _ in range(5):\n    print(float(step().detach()))\n")
    plain = warm.run("train.py", cwd=tmp_path, env=ENVIRONMENT)
    run = watched("-o", "run", "train.py")
    assert (run.returncode, run.stdout) == (0, plain.stdout)  # to the last bit
    line = path.read_text().splitlines().index("    nn.utils.clip_grad_norm_(model.parameters(), 1.0)") + 1
    assert f"train.py:{line}" in run.stderr
    assert "AMP101" in run.stderr
    assert "5 times, steps 1 to 5" in run.stderr
    report = ampwise("report", "run", "--json", folder=tmp_path)
    (finding,) = json.loads(report.stdout)["findings"]
    assert (finding["code"], finding["name"], finding["severity"]) == ("AMP101", "clip-scaled-grads", "error")
    assert (finding["place"]["line"], finding["count"]) == (line, 5)
    assert (finding["place"]["column"], finding["place"]["end_column"]) == (5, 54), "of the call"
    assert finding["consequences"] == []
    assert finding["fix"]


def test_what_goes_bad_is_said_at_once_and_once_above_a_progress_bar(write, watched):
    pytest.importorskip("tqdm")
    write(f"import tqdm\n{TRAINING}\nfor _ in tqdm.tqdm(range(5), mininterval=0):\n    step()\n")
    lines = [line.rpartition("\r")[2] for line in watched("-o", "run", "train.py").stderr.split("\n")]
    said = (
        "ampwise: step 1: `clip_grad_norm_` gets gradients that are still multiplied by the loss scale "
        "(train.py:17, AMP101)"
    )
    assert [line for line in lines if line.startswith("ampwise:")] == [said]
    assert any("5/5" in line for line in lines[lines.index(said) :])  # the bar goes on below it
    assert "ampwise" not in watched("-q", "-f", "-o", "run", "train.py").stderr


UNTIL_IT_IS_ON_DISK = """
def is_on_disk():
    with open("run/steps.jsonl") as steps, open("run/findings.json") as findings:
        return len(steps.readlines()) > 10 and "AMP101" in findings.read()

while not (os.path.exists("run/findings.json") and is_on_disk()):
    step()
    time.sleep(0.01)
"""


@pytest.mark.parametrize("how", ["an exception", "os._exit", "kill -9", "Ctrl-C"])
def test_what_was_seen_before_the_end_is_kept(write, watched, tmp_path, how):
    endings = {
        "an exception": "raise ValueError('no more data')",
        "os._exit": "os._exit(9)",
        "kill -9": "os.kill(os.getpid(), signal.SIGKILL)",
        "Ctrl-C": "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)",
    }
    loop = UNTIL_IT_IS_ON_DISK if how == "kill -9" else "for _ in range(40):\n    step()\n"
    write(f"import os, signal, time\n{TRAINING}\n{loop}{endings[how]}\n")
    done = watched("-q", "-o", "run", "train.py")
    codes = {"an exception": 1, "os._exit": 9, "kill -9": -9, "Ctrl-C": 130}
    assert done.returncode == codes[how], done.stderr
    run = Run.read(tmp_path / "run")
    assert [seen.finding.rule.code for seen in run.findings] == ["AMP101"]
    steps = sum(bucket.count for bucket in run.steps)
    assert steps >= 10 if how == "kill -9" else steps == 40
    statuses = {"an exception": "failed", "os._exit": "failed", "kill -9": "running", "Ctrl-C": "interrupted"}
    assert run.manifest["status"] == statuses[how]


def test_a_script_without_torch_is_reported_so(write, tmp_path):
    write("print('no training here')")
    run = ampwise("run", "-o", "run", "train.py", folder=tmp_path)
    assert (run.returncode, run.stdout) == (0, "no training here\n")
    assert "the script never imported torch" in run.stderr


def test_a_script_that_never_trains_is_reported_so(write, watched, tmp_path):
    write("import torch\nprint(torch.ones(2).sum())")
    run = watched("-o", "run", "train.py")
    assert run.returncode == 0
    assert "which took no step" in run.stderr


def test_a_script_that_trains_by_hand_is_reported_so(write, watched, tmp_path):
    write(
        "import torch\nw = torch.zeros(2, requires_grad=True)\nfor _ in range(3):\n"
        "    w.square().sum().backward()\n    w.data.add_(w.grad, alpha=-0.1)"
    )
    run = watched("-o", "run", "train.py")
    assert "train.py: 3 backward passes, but no optimizer stepped" in run.stderr


def test_without_o_each_run_has_a_folder_of_its_own(write, watched, tmp_path):
    write("print('hello')")
    for _ in range(2):
        assert watched("-q", "train.py").returncode == 0
    ignored, *folders = sorted(path.name for path in (tmp_path / "ampwise-runs").iterdir())
    assert (ignored, len(folders)) == (".gitignore", 2)
    assert all(name.startswith("train-") for name in folders)


@pytest.mark.parametrize("module", [*by_night(True), False], ids=["-m", "torchrun"])
def test_ranks_each_write_a_part(write, watched, tmp_path, module):
    apart = TRAINING.replace("init_scale=1024.0", "init_scale=1024.0 * (1 + rank)")
    told = "for _ in range(3):\n    step()\nprint(f'rank {rank}\\n', end='')\n"
    write(f"import os\nrank = int(os.environ['RANK'])\n{apart}\n{told}")
    launcher = ["-m", "torch.distributed.run"] if module else [Path(sys.executable).with_name("torchrun")]
    run = watched("-o", "run", *launcher, "--standalone", "--nproc-per-node", "2", "train.py")
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.split("\n"))[-2:] == ["rank 0", "rank 1"]
    record = Run.read(tmp_path / "run")
    assert set(record.ranks) == {1}
    found = {seen.finding.rule.code: seen for seen in record.merged_findings()}
    assert found["AMP101"].count == 6
    assert sorted(found["AMP101"].ranks) == [0, 1]
    assert found["AMP207"].finding.message == "the loss scale is 2048 on rank 1 and 1024 on rank 0"
    assert run.stderr.count("AMP101") >= 1
    again = watched("-o", "run", *launcher, "--standalone", "--nproc-per-node", "2", "train.py")
    assert again.returncode == 2
    assert "-f" in again.stderr


BAD_ON_ONE_RANK = """
import math
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.ones(2, 4)
    if step == 1 and distributed.get_rank() == 1:
        x[0] = math.nan
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
distributed.destroy_process_group()
"""


def test_the_rank_that_went_bad_is_named_and_the_others_guess_no_more(write, watched, tmp_path):
    write(BAD_ON_ONE_RANK)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = watched("-o", "run", "--every", "1", *launcher, "train.py")
    assert run.returncode == 0, run.stderr
    record = Run.read(tmp_path / "run")
    (batch,) = [seen.finding for seen in record.merged_findings() if seen.finding.rule.code == "AMP901"]
    assert (batch.place.rank, batch.place.step) == (1, 2)
    others = [seen.finding for seen in record.findings if seen.finding.rule.code in ("AMP612", "AMP613")]
    assert {each.fix for each in others} == {"See the finding about the operation."}
    assert "another rank" not in " ".join(record.facts["not_measured"])


REPLICAS = """
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(0)
wrapped = DistributedDataParallel(nn.Linear(4, 1))
sgd = torch.optim.SGD
through = sgd(wrapped.parameters(), lr=0.1)  # the wrapper is called
other = DistributedDataParallel(nn.Linear(4, 1))
past = sgd(other.parameters(), lr=0.1)  # expect: AMP209
torch.manual_seed(rank)
seeded = nn.Linear(4, 1)
averaged = sgd(seeded.parameters(), lr=0.1)  # expect: AMP209
alone = nn.Linear(4, 1)
own = sgd(alone.parameters(), lr=0.1)
near = nn.Linear(4, 1)
local = sgd(near.parameters(), lr=0.1)  # its weights are averaged now and then
torch.manual_seed(0)
rewrapped, clipped = nn.Linear(4, 1), nn.Linear(4, 2)
again = torch.optim.Adam(rewrapped.parameters())  # expect: AMP209
alike = sgd(clipped.parameters(), lr=0.1)  # expect: AMP209
torch.manual_seed(rank)
for step in range(4):
    x = torch.randn(8, 4)
    for model, optimizer in ((wrapped, through), (other.module, past), (alone, own), (near, local)):
        optimizer.zero_grad()
        (model(x) - x.sum()).square().mean().backward()
        optimizer.step()
    averaged.zero_grad()
    seeded(torch.full((2, 4), float(rank))).square().mean().backward()
    for each in seeded.parameters():
        distributed.all_reduce(each.grad)
    averaged.step()
    for each in near.parameters() if step % 2 else ():
        distributed.all_reduce(each.data)
        each.data /= 2
    model = DistributedDataParallel(rewrapped) if step % 2 else rewrapped
    again.zero_grad()
    (model(x) - x.sum()).square().mean().backward()
    again.step()
    alike.zero_grad()
    clipped(torch.ones(2, 4)).square().mean().backward()
    for each in clipped.parameters():
        each.grad *= 1 + rank
    alike.step()
distributed.destroy_process_group()
"""


def test_replicas_that_differ_are_named_and_models_of_their_own_are_not(write, watched, tmp_path):
    write(REPLICAS)
    run = watched("-o", "run", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    assert run.returncode == 0, run.stderr
    found = [seen.finding for seen in Run.read(tmp_path / "run").findings if seen.finding.rule.code == "AMP209"]
    guilty = [number for number, line in enumerate(REPLICAS.splitlines(), 1) if line.endswith("# expect: AMP209")]
    assert sorted(each.place.line for each in found) == guilty
    by_wrapper, by_seed, by_turns, by_factor = sorted(found, key=lambda each: each.place.line)
    assert by_wrapper.message.endswith("although DistributedDataParallel wraps the model")
    assert by_seed.message.endswith("they are averaged, and the weights were never equal")
    assert by_turns.message.endswith("and now differ: not every backward pass averages them")
    assert "but for a factor of 2 at step 1" in by_factor.message


# Bad input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no_such.py"], "no_such.py: no such file. For a module: ampwise run -m no_such."),
        (["folder"], "folder is a folder without __main__.py. Give the path of a script."),
        (["--every", "0", "train.py"], "--every"),
        (["--capsule", "train.py/saved", "train.py"], "train.py is not a folder. Name another folder."),
        ([], "SCRIPT"),
    ],
)
def test_what_cannot_be_run_is_reported_in_a_line(write, watched, tmp_path, words, said):
    write("print('ran')")
    (tmp_path / "folder").mkdir()
    run = watched(*words)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("ampwise: error: ")
    assert said in run.stderr
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "ampwise-runs").exists()


def test_a_record_is_not_written_over_by_accident(write, watched):
    write("print('ran')")
    assert watched("-q", "-o", "run", "train.py").returncode == 0
    again = watched("-q", "-o", "run", "train.py")
    assert (again.returncode, again.stdout) == (2, "")
    assert "run already holds a record; -f overwrites it, -o names another folder." in again.stderr
    assert watched("-q", "-f", "-o", "run", "train.py").returncode == 0


def test_what_is_not_text_is_not_python(watched, tmp_path):
    (tmp_path / "train.py").write_bytes(b"\x7fELF\xff\xfe\x00")
    run = watched("-q", "-o", "run", "train.py")
    assert run.returncode == 2
    assert "train.py is not Python" in run.stderr
    assert not (tmp_path / "run").exists()


# While it runs


def test_a_record_says_what_runs_before_the_end(write, watched, tmp_path):
    """Whoever looks meanwhile reads the same words as at the end."""
    told = """
        import time, pathlib
        for _ in range(3):
            step()
        while not pathlib.Path("go-on").exists():
            time.sleep(0.1)
            step()
    """
    write(TRAINING + textwrap.dedent(told))
    with ThreadPoolExecutor() as pool:
        running = pool.submit(watched, "-q", "-o", "run", "train.py")
        try:
            run = _read_until(tmp_path / "run", lambda run: run.facts.keys() >= {"precision", "optimizers"})
            assert (run.status, run.alive) == ("running or killed", True)
        finally:
            (tmp_path / "go-on").touch()
        assert running.result(timeout=120).returncode == 0
    end = Run.read(tmp_path / "run")
    assert run.facts["precision"] == end.facts["precision"] == "fp16"
    assert run.facts["optimizers"] == end.facts["optimizers"] == [{"index": 0, "name": "SGD", "model": "Linear"}]
    assert setup_of(run) == setup_of(end) == " (fp16, scaler)"


def _read_until(folder, holds, seconds=120.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (folder / "manifest.json").exists() and holds(run := Run.read(folder)):
            return run
        time.sleep(0.1)
    raise AssertionError(Run.read(folder).manifest)
