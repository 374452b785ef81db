"""`ampwise init`: a make function for scripts of every shape, what is said about it, and what is refused."""

import ast
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from ampwise.cli import main  # noqa: E402
from ampwise.tune.init import init as init_module  # noqa: E402
from ampwise.tune.init.reading import read_training_script  # noqa: E402
from ampwise.tune.init.rewriting import rewritten  # noqa: E402
from ampwise.tune.init.trial import try_drafts  # noqa: E402
from ampwise.tune.init.writing import drafts_of  # noqa: E402
from ampwise.tune.train_case import load_factory  # noqa: E402

HEAD = """
    import argparse
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset

    class Net(nn.Module):
        def __init__(self, width=8, classes=3):
            super().__init__()
            self.layer = nn.Linear(6, width)
            self.head = nn.Linear(width, classes)

        def forward(self, x):
            return self.head(self.layer(x).relu())

    def samples():
        return TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
"""

GUARDED = """
    def train(args, model, device, loader, optimizer):
        model.train()
        for i, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type):
                output = model(x)
                loss = F.cross_entropy(output, y)
            loss.backward()
            optimizer.step()

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--width", type=int, default=16, help="of the layer")
        parser.add_argument("--lr", type=float, default=0.1)
        args = parser.parse_args()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        loader = DataLoader(samples(), batch_size=5, num_workers=4, pin_memory=True)
        model = Net(args.width).to(device)
        model = torch.nn.DataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
        train(args, model, device, loader, optimizer)

    if __name__ == "__main__":
        main()
"""

TOP_LEVEL = """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = 12
    net = Net(width).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = DataLoader(samples(), batch_size=7)
    scaler = torch.amp.GradScaler(device)
    for epoch in range(2):
        open("trained", "w").close()
        for x, y in loader:
            x = x.to(device)
            loss = criterion(net(x), y.to(device)) / 2
            scaler.scale(loss).backward()
            scaler.step(optimizer)
"""

TRAINER = """
    class Trainer:
        def __init__(self, net, data, rank):
            self.rank = rank
            self.net = net.to(rank)
            self.data = data
            self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def run_batch(self, source, targets):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.net(source), targets)
            loss.backward()
            self.optimizer.step()

        def run_epoch(self):
            for source, targets in self.data:
                self.run_batch(source.to(self.rank), targets.to(self.rank))

    def run(rank=0):
        trainer = Trainer(Net(9), DataLoader(samples(), batch_size=4), rank)
        trainer.run_epoch()

    if __name__ == "__main__":
        run()
"""

MODEL_LOSS = """
    class WithLoss(Net):
        def forward(self, features, labels):
            from types import SimpleNamespace
            return SimpleNamespace(loss=F.cross_entropy(super().forward(features), labels))

    def rows(items):
        features, labels = zip(*items)
        return {"features": torch.stack(features), "labels": torch.stack(labels)}

    def main():
        accelerator = None
        model = WithLoss()
        loader = DataLoader(samples(), batch_size=3, collate_fn=rows)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for step, batch in enumerate(loader):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)

    if __name__ == "__main__":
        main()
"""

LIGHTNING = """
    class Lit(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.net = Net(width)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    if __name__ == "__main__":
        import pytorch_lightning as pl
        pl.Trainer(max_epochs=1).fit(Lit(5), DataLoader(samples()))
"""

NO_DATA = """
    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Conv2d(3, 4, 3, stride=2)
            self.head = nn.Linear(4, 10)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x):
            return self.head(self.norm(self.features(x)).mean((2, 3)))

    def get_loader():
        raise FileNotFoundError("data/train.bin")

    def main():
        model = Images()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in get_loader():
            image, label = batch["image"], batch["label"]
            loss = F.cross_entropy(model(image), label)
            loss.backward()
            optimizer.step()

    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def init(tmp_path, monkeypatch):
    """Write a script, run the command on it (the trial in this process), and load what was written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["ampwise"])
    before = dict(sys.modules)

    def here(script, output, options, limit_s):
        drafts = drafts_of(read_training_script(script), output, options)
        return try_drafts(drafts, output.absolute(), lambda outcome: None)

    monkeypatch.setattr(init_module, "try_in_process", here)

    def run(code, *options, name="train_me.py"):
        (tmp_path / name).write_text(textwrap.dedent(HEAD) + textwrap.dedent(code))
        return main(["init", "-q", name, *options])

    yield run
    for name in set(sys.modules) - set(before):
        if name in ("train_me", "ampwise_make"):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("code", "rows", "weights", "optimizer"),
    [
        (GUARDED, 5, 16 * 7 + 17 * 3, torch.optim.SGD),
        (TOP_LEVEL, 7, 12 * 7 + 13 * 3, torch.optim.AdamW),
        (TRAINER, 4, 9 * 7 + 10 * 3, torch.optim.SGD),
        (MODEL_LOSS, 3, 8 * 7 + 9 * 3, None),
    ],
    ids=["guarded main", "top level", "own trainer", "loss in the model"],
)
def test_batch_model_and_loss_are_those_of_the_script(init, tmp_path, capsys, code, rows, weights, optimizer):
    assert init(code) == 0
    out = capsys.readouterr().out
    assert out.startswith("ampwise_make.py: make() runs: a step on the CPU, loss ")
    assert "next: ampwise bench ampwise_make.py:make" in out
    assert "random data" not in out
    assert not (tmp_path / "trained").exists()
    sys.modules.pop("ampwise_make", None)
    case = load_factory("ampwise_make.py:make").make("cpu")
    assert case.rows == rows
    assert sum(parameter.numel() for parameter in case.parameters) == weights
    assert optimizer is None or type(case.optimizer) is optimizer
    case.loss().backward()
    assert all(parameter.grad is not None for parameter in case.parameters)
    text = (tmp_path / "ampwise_make.py").read_text()
    assert "cuda" not in text
    assert "autocast" not in text
    assert "GradScaler" not in text


def test_parts_are_found_with_their_lines(init, tmp_path, capsys):
    init(GUARDED, "--no-run")
    out = capsys.readouterr().out
    lines = (tmp_path / "train_me.py").read_text().splitlines()
    starts = {"model": "model = Net", "loss": "loss = F", "data": "for i", "optimizer": "optimizer ="}
    for what, start in starts.items():
        number = next(n for n, line in enumerate(lines, 1) if line.strip().startswith(start))
        assert any(line.split()[:3] == [what, "line", str(number)] for line in out.splitlines()), (what, number, out)
    assert "ampwise_make.py: written, not run (--no-run)" in out


def test_without_its_data_a_batch_is_found_by_trying_and_said_to_be(init, tmp_path, capsys):
    assert init(NO_DATA) == 0
    out = capsys.readouterr().out
    assert "random data: FileNotFoundError: data/train.bin" in out
    number = int(out.partition("check ampwise_make.py:")[2].partition(":")[0])
    assert "found by trying" in (tmp_path / "ampwise_make.py").read_text().splitlines()[number - 1]
    sys.modules.pop("ampwise_make", None)
    case = load_factory("ampwise_make.py:make").make("cpu", batch=6)
    assert case.rows == 6
    (batch,) = case.args
    assert batch["image"].shape[1] == 3
    assert 0 <= batch["label"].min() <= batch["label"].max() < 10
    case.loss().backward()


def test_a_batch_that_is_unpacked_has_as_many_tensors(init, tmp_path, capsys):
    taken = 'image, label = batch["image"], batch["label"]'
    for unpacked in ("image, label = batch", "image, label = (each.to('cuda') for each in batch)"):
        assert init(NO_DATA.replace(taken, unpacked), "-f") == 0
        sys.modules.pop("ampwise_make", None)
        (batch,) = load_factory("ampwise_make.py:make").make("cpu", batch=6).args
        assert [each.shape[0] for each in batch] == [6, 6]
        assert batch[0].ndim == 4


def test_a_training_step_of_lightning(init, tmp_path, capsys):
    assert init(LIGHTNING) == 0, capsys.readouterr().out
    text = (tmp_path / "ampwise_make.py").read_text()
    assert "model = Lit(5)" in text
    assert "return model.training_step(batch, 0)" in text


def test_options_of_the_script_are_given_and_never_made_up(init, tmp_path, capsys):
    code = GUARDED.replace('"--lr", type=float, default=0.1', '"--lr", type=float, required=True')
    assert init(code) == 1
    out = capsys.readouterr().out
    assert 'give the options you train with: ampwise init train_me.py -f --args="--option value"' in out.splitlines()
    assert "sys.argv = ['train_me.py']" in (tmp_path / "ampwise_make.py").read_text()
    sys.modules.pop("ampwise_make", None)
    only_data = (
        code.replace("args.width", "8").replace("lr=args.lr", "lr=1").replace("batch_size=5", "batch_size=args.width")
    )
    assert init(only_data, "-f") == 1  # no random data for want of an option
    sys.modules.pop("ampwise_make", None)
    sys.modules.pop("train_me", None)
    assert init(code, "-f", "--args=--width 4 --lr 0.5") == 0
    sys.modules.pop("ampwise_make", None)
    case = load_factory("ampwise_make.py:make").make("cpu")
    assert case.model.head.in_features == 4
    assert init(code, "-f", "--args='open") == 2
    assert "expected options as in a shell" in capsys.readouterr().err


def test_what_cannot_be_known_is_named_with_its_line(init, tmp_path, capsys):
    code = """
    def train(model, cfg):
        for x, y in DataLoader(samples()):
            loss = F.cross_entropy(model(x), y) * cfg.weight
            loss.backward()
    """
    assert init(code) == 1
    out = capsys.readouterr().out
    text = (tmp_path / "ampwise_make.py").read_text()
    assert "ampwise_make.py: written, 2 to fill in" in out
    for line in [line for line in out.splitlines() if line.startswith("ampwise_make.py:1") or "set " in line]:
        number = int(line.split(":")[1])
        assert "TODO: set " in text.splitlines()[number - 1]
    lines = (tmp_path / "train_me.py").read_text().splitlines()
    line = next(n for n, each in enumerate(lines, 1) if "def train" in each)
    assert f"set cfg (line {line}: no call of train() in the script gives it)" in out


@pytest.mark.parametrize("code", ["", "\nprint('hello')\n", "\nclass Table:\n    pass\nmodel = Table()\n"])
def test_a_script_without_a_model(tmp_path, monkeypatch, capsys, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_me.py").write_text(code)
    assert main(["init", "-q", "train_me.py", "--timeout", "100"]) == 1
    assert "ampwise_make.py:" in capsys.readouterr().out


def test_near_misses(init, tmp_path, capsys):
    code = """
    def attack_test(model, x):
        model(x).sum().backward()

    def batch_norm_count(model):
        return 3

    def main():
        model = Net(batch_norm_count(None))
        prefetch_batch = 9
        for epoch in range(3):
            for x, y in DataLoader(samples(), batch_size=2):
                weight = batch_norm_count(model)
                if epoch > 1:
                    continue
                loss = weight * F.cross_entropy(model(x), y)
                loss.backward()

    if __name__ == "__main__":
        main()
    """
    assert init(code) == 0
    text = (tmp_path / "ampwise_make.py").read_text()
    assert "sum()" not in text
    assert "prefetch_batch" not in text
    assert "model = Net(batch_norm_count(None))" in text


def test_an_error_names_the_line_to_edit(init, tmp_path, capsys):
    assert init(GUARDED.replace("Net(args.width)", "Net(open('sizes.txt'))")) == 1
    out = capsys.readouterr().out
    lines = (tmp_path / "ampwise_make.py").read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "sizes.txt" in line)
    assert f"ampwise_make.py:{number}: FileNotFoundError: [Errno 2] No such file or directory: 'sizes.txt'" in out
    assert "make() does not run" in out


@pytest.mark.parametrize(
    "code",
    [
        """
    def worker(rank, width):
        model = Net(width).to(rank)
        model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
        for x, y in DataLoader(samples(), batch_size=2):
            loss = F.cross_entropy(model(x.to(rank)), y.to(rank, non_blocking=True))
            loss.backward()

    if __name__ == "__main__":
        torch.multiprocessing.spawn(worker, args=(9,), nprocs=4)
    """,
        """
    def main():
        model = Net(9)
        optimizer = torch.optim.LBFGS(model.parameters())
        for x, y in DataLoader(samples(), batch_size=2):
            def closure():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss
            optimizer.step(closure)

    if __name__ == "__main__":
        main()
    """,
        """
    def compute(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    model = Net(9)
    x, y = next(iter(DataLoader(samples(), batch_size=2)))
    while True:
        total = 0
        for part in range(2):
            total += compute(model, (x, y)) / 2
        if total < 1:
            break
        total.backward()
    """,
        """
    class Loop:
        def __init__(self, model, loader):
            self.model, self.loader = model, loader
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(self, x, y):
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

        def train(self, scale):
            self.model.train()
            for x, y in self.loader:
                self.optimizer.step()
                self.step(x / scale, y)

    if __name__ == "__main__":
        Loop(Net(9), DataLoader(samples(), batch_size=2)).train(2.0)
    """,
    ],
    ids=["spawned", "closure", "no loop over data", "methods named as those of an optimizer and a model"],
)
def test_other_shapes(init, tmp_path, capsys, code):
    assert init(code) == 0, capsys.readouterr().out + (tmp_path / "ampwise_make.py").read_text()
    assert "random data" not in capsys.readouterr().out
    sys.modules.pop("ampwise_make", None)
    case = load_factory("ampwise_make.py:make").make("cpu")
    assert (case.rows, case.parameters[0].shape) == (2, (9, 6))
    assert case.loss().requires_grad


def test_hostile_names_stay_text(init, tmp_path, capsys):
    name = 'tr"""\x1b[2J\u202e\nimport os.py'
    assert init(TOP_LEVEL, "--no-run", name=name) == 0
    text = (tmp_path / "ampwise_make.py").read_text()
    tree = ast.parse(text)
    assert not any(isinstance(node, ast.Import) and node.names[0].name == "os" for node in ast.walk(tree))
    assert all(char == "\n" or char.isprintable() for char in text + capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gone.py"], "gone.py: there is no such file. Give the script that trains: ampwise init train.py"),
        (["notes.txt"], "notes.txt: expected a Python script, such as train.py."),
        (["broken.py"], "broken.py:2: "),
        (["train_me.py", "-o", "train_me.py"], "that is the script itself, which is never changed. Name another file."),
        (["train_me.py", "-o", "a-b.py"], "expected the name of a Python file that can be imported"),
        (["train_me.py", "-o", "no/where.py"], "there is no folder no."),
        (["train_me.py", "-o", "other.py"], "other.py is there already. Overwrite it with -f, or name another file"),
        (["train_me.py", "--timeout", "-1"], "--timeout -1: expected a number of seconds above 0."),
        (["train_me.py", "--timeout", "nan"], "--timeout nan: expected a number of seconds above 0."),
        (["deep.py"], "deep.py: it is nested too deeply to be read."),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_me.py").write_text("x = 1\n")
    (tmp_path / "other.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("x = 1\ndef (\n")
    (tmp_path / "deep.py").write_text(f"loss = {'-' * 1500}x\nloss.backward()\n")
    assert main(["init", "-q", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ampwise: error: ")
    assert said in error
    assert error.count("\n") == 1
    assert (tmp_path / "train_me.py").read_text() == "x = 1\n"


def test_in_a_process_of_its_own_without_network_and_with_a_limit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    net = """
    import socket

    def data():
        socket.create_connection(("127.0.0.1", 9))

    def main():
        model = Net()
        for x, y in data():
            F.cross_entropy(model(x), y).backward()

    if __name__ == "__main__":
        main()
    """
    (tmp_path / "train_me.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(net))
    assert main(["init", "-q", "train_me.py"]) == 0
    out = capsys.readouterr().out
    assert "makes no connection to the network" in out
    assert main(["init", "-q", "train_me.py", "-f", "--timeout", "0.01"]) == 1
    assert "not done after 0.01 s (loading torch)" in capsys.readouterr().out


def test_the_process_writes_nothing_and_ends_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sizes.py").write_text("WIDTH = 7\n")
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the user is not a library of ours')\n")
    code = """
    import subprocess, sys
    from sizes import WIDTH

    def data():
        subprocess.Popen([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(99)"],
                         stdout=open(sys.argv[1], "w"))
        while True:
            pass

    def main():
        model = Net(WIDTH)
        for x, y in data():
            F.cross_entropy(model(x), y).backward()

    if __name__ == "__main__":
        main()
    """
    (tmp_path / "train_me.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(code))
    before = {each.name for each in tmp_path.iterdir()}
    pid = tmp_path / "pid"
    command = [sys.executable, "-m", "ampwise", "init", "-q", "train_me.py", f"--args={pid}"]
    root = str(Path(init_module.__file__).parents[3])
    # -P: the folder has a file json.py, which is not for this process.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    process = subprocess.Popen([command[0], "-P", *command[1:]], env={**os.environ, "PYTHONPATH": root})
    wait_for(lambda: pid.exists() and pid.read_text().strip(), 60)
    child = int(pid.read_text())
    assert Path(f"/proc/{child}").exists() or not Path("/proc").exists()
    process.kill()  # the command itself: nothing of it is left to end its process
    process.wait()
    wait_for(lambda: not is_running(child), 20)
    assert {each.name for each in tmp_path.iterdir()} == before | {"pid"}


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def test_an_optimizer_that_cannot_be_made_is_left_out(init, tmp_path, capsys):
    assert init(GUARDED.replace("lr=args.lr)", "lr=args.lr, fused='maybe', nonsense=1)")) == 0
    out = capsys.readouterr().out
    assert "random data" not in out
    assert "check optimizer: it is left out, since it cannot be made here" in out
    assert (tmp_path / "ampwise_make.py").read_text().endswith("return model, (x, y), loss_fn\n")


def test_options_that_a_function_completes(init, tmp_path, capsys):
    complete = "def complete(args):\n        args.classes = 3\n        return 'cpu'\n\n    def main():"
    code = GUARDED.replace("def main():", complete).replace("Net(args.width)", "Net(args.width, args.classes)")
    for statement in ("complete(args)", "device = complete(args)"):
        assert init(code.replace("        loader =", f"        {statement}\n        loader ="), "-f") == 0
        assert statement in (tmp_path / "ampwise_make.py").read_text()
        sys.modules.pop("train_me", None)


def test_what_others_hang_on_the_one_load_of_python_is_not_copied():
    """As IPython does for its tracebacks: a whole tree, with each name that is copied."""
    load = ast.parse("a", mode="eval").body.ctx
    load.parent = ast.parse("b")
    try:
        assert rewritten(ast.parse("a + b")).body[0].value.left.ctx is load
    finally:
        del load.parent
