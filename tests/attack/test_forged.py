"""Forged checkpoints, capsules and records: any value replaced, sums and seals made to fit, loaded as users load them.

What comes of it is success, or one line of ampwise's own. Anything else that is raised fails the test.
"""

import hashlib
import itertools
import json
import random
import shutil
import sys

import pytest
import torch

from ampwise import BadInput, Capsules, Engine, Guard
from ampwise.cli import main
from ampwise.errors import AmpwiseError
from ampwise.finding import Place
from ampwise.finding.registry import find_rule
from ampwise.guard.disk.catalog import checkpoints, mark_good
from ampwise.numbers.census.algebra import Census
from ampwise.runs.events import LoggedEvent
from ampwise.runs.rows import CountedFinding, LayerSample, StepRow
from ampwise.runs.writer import RecordWriter
from ampwise.trace.capsule import CapsuleContents, read, write
from ampwise.train.random_state import plain_random_state

from .effort import rounds

CPU = torch.device("cpu")


# --- the forger ----------------------------------------------------------------------------------------------------


class Twice(dict):
    """An object whose first key is there twice."""


def deep(depth):
    node = []
    for _ in range(depth):
        node = [node]
    return node


def missing(parent, key):
    del parent[key]


def doubled(parent, key):
    if isinstance(parent[key], dict) and parent[key]:
        parent[key] = Twice(parent[key])
    else:
        parent[key] = [parent[key], parent[key]]


def one_level_off(parent, key):
    parent[key] = {key: parent[key]} if isinstance(key, str) else [parent[key]]


def put(value):
    return lambda parent, key: parent.__setitem__(key, value)


VALUES = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**70, 10**400, -0.5, 1e-320, 1e308, "", "NaN", "Infinity", "\ud800",
    "\x1b[2J\u202e\n", "x" * 5000, [], {}, [None], [[]], {"": None}, {"tensor": "w"}, {"dict": {}}, {"float": "00"},
    deep(60), deep(3000), [1, 2], "0", "fp16", "cuda", "../../etc/passwd", "__class__",
]  # fmt: skip
CHANGES = [*map(put, VALUES), missing, doubled, one_level_off]


def places(node, path=()):
    """Where in the data there is something to change; of a long list, its ends."""
    keys = list(node) if isinstance(node, dict) else [*range(min(2, len(node))), len(node) - 1] if node else []
    for key in dict.fromkeys(keys):
        yield (*path, key)
        if isinstance(node[key], dict | list):
            yield from places(node[key], (*path, key))


def forged(text, path, change):
    """The text of the JSON, with one thing changed in it."""
    data = json.loads(text)
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    change(parent, path[-1])
    return dumped(data)


def dumped(node):
    if isinstance(node, dict):
        pairs = [f"{json.dumps(key)}:{dumped(value)}" for key, value in node.items()]
        return "{" + ",".join(pairs + pairs[:1] * isinstance(node, Twice)) + "}"
    if isinstance(node, list):
        opened = 0
        while isinstance(node, list) and len(node) == 1:  # which may be deeper than Python goes
            node, opened = node[0], opened + 1
        inner = ",".join(map(dumped, node)) if isinstance(node, list) else dumped(node)
        return "[" * opened + (f"[{inner}]" if isinstance(node, list) else inner) + "]" * opened
    return json.dumps(node)


def forgeries(text, count, seed):
    """So many, at random but the same each time: each with a name for the error."""
    rng = random.Random(seed)
    found = list(places(json.loads(text)))
    for _ in range(count):
        path, number = rng.choice(found), rng.randrange(len(CHANGES))
        yield f"{'.'.join(map(str, path))} <- {number}", forged(text, path, CHANGES[number])


def sealed(file, seal, text):
    file.write_text(text)
    seal.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  {file.name}\n")


def loads(what, load, *arguments):
    """Whether it was taken; else it was refused in a line."""
    try:
        load(*arguments)
    except AmpwiseError as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    else:
        return True
    assert "\n" not in said, what
    assert len(said) < 2000, what
    return False


def runs(what, capsys, *words):
    """The exit code of a command; what it says of a mistake is one line."""
    capsys.readouterr()
    try:
        code = main([str(word) for word in words])
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    out = capsys.readouterr()
    assert code in (0, 1, 2), what
    assert "Traceback" not in out.err, what
    assert "\x1b" not in out.out + out.err, what
    if code == 2:
        assert out.err.splitlines()[-1].startswith("ampwise: error: "), what
    return code


# --- checkpoints ---------------------------------------------------------------------------------------------------


class Average:
    """Something of the user's that is saved, too."""

    def __init__(self):
        self.weights, self.count = [torch.zeros(2), torch.ones(1)], 0

    def state_dict(self):
        return {"weights": self.weights, "count": self.count}

    def load_state_dict(self, state):
        self.weights, self.count = [each.clone() for each in state["weights"]], state["count"] + 0


def training(directory):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    engine = Engine(model, optimizer, "fp16", scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3))
    return model, Guard(engine, directory, state={"average": Average()}, every="2 steps", keep=9)


def train(directory, steps):
    model, guard = training(directory)
    with guard:
        for batch in itertools.islice(guard.batches([torch.ones(4, 2), torch.zeros(4, 2)], epochs=None), steps):
            guard.step(lambda x: model(x).float().square().mean(), batch)
    return guard


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    home = tmp_path_factory.mktemp("forged") / "checkpoints"
    train(home, 4)
    mark_good(checkpoints(home)[0])
    return home


def resumed(home):
    """One more step, from what is there."""
    train(home, 5)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["plain-00000.json", "checkpoint.json", "mark.json"])
def test_checkpoints(saved, tmp_path, capsys, name):
    newest = checkpoints(saved)[0].path.name
    text = (saved / newest / name).read_text()
    shutil.copytree(saved, tmp_path / "whole")
    assert loads("as it was", resumed, tmp_path / "whole")
    for number, (what, data) in enumerate(forgeries(text, rounds(6, 100), seed=name)):
        home = tmp_path / str(number)
        shutil.copytree(saved / newest, home / newest)
        folder = home / newest
        if name == "checkpoint.json":
            sealed(folder / name, folder / "checkpoint.sha256", data)
        else:
            (folder / name).write_text(data)
        if name == "plain-00000.json":
            manifest = json.loads((folder / "checkpoint.json").read_text())
            raw = data.encode()
            manifest["files"][name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
            sealed(folder / "checkpoint.json", folder / "checkpoint.sha256", json.dumps(manifest))
        runs(what, capsys, "checkpoints", home, *([], ["-v"], ["--verify"], ["--json"])[number % 4])
        loads(what, resumed, home)
        shutil.rmtree(home)


# --- capsules ------------------------------------------------------------------------------------------------------

MAKE = """
import torch

def make(width=2):
    model = torch.nn.Linear(width, 1)
    return model, lambda x, y: (model(x["a"]) - y[0]).float().square().mean()
"""


def test_capsules(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "made_for_forgeries", None)  # a name that the file has for itself
    script = tmp_path / "made_for_forgeries.py"
    script.write_text(MAKE)
    model = torch.nn.Linear(2, 1)
    contents = CapsuleContents(
        args=({"a": torch.ones(3, 2)}, (torch.zeros(3, 1), [1, None, "text", float("nan")])),
        random=plain_random_state(CPU),
        weights=dict(model.named_parameters()),
        precision="fp16",
        scale=2.0,
        step=3,
        loss=float("inf"),
        build=f"{script.name}:make",
        build_args={"width": 2},
        evaluating=[""],
        policy={"version": 1, "base": "fp16", "keep": []},
        findings=[find_rule("AMP101").at(Place(file="train.py", line=2, step=3), "clipped", evidence={"norm": 1.0})],
    )
    home = write(tmp_path / "capsules", contents)
    text = (home / "capsule.json").read_text()
    assert runs("as it was", capsys, "replay", home, f"{script}:make") == 0
    codes = set()
    for what, data in forgeries(text, rounds(20, 200), seed=5):
        sealed(home / "capsule.json", home / "capsule.sha256", data)
        loads(what, read, home)
        codes.add(runs(what, capsys, "replay", home, f"{script}:make"))
        runs(what, capsys, "replay", home)
    assert codes >= {0, 2}


# --- records -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    home = tmp_path_factory.mktemp("forged") / "run"
    for rank in (0, 1):
        writer = RecordWriter.create(home, rank=rank, world_size=2, command=["train.py"], script="train.py")
        for step in range(1, 6):
            writer.step(StepRow(step=step, loss=1 / step, scale=65536.0, norm=0.5, lr=0.1, skipped=step == 4))
        weights = Census(binades={-20: 3}, amax=2**-19.5, amin=2**-19.5)
        writer.layers(LayerSample(first=1, last=1, scale=65536.0, layers={"head.weight": weights}))
        place = Place(file="train.py", line=2, module="head", step=1, rank=rank)
        finding = find_rule("AMP101").at(place, "clipped", evidence={"norm": 2.0, "trace": {"trials": [{"a": 1}]}})
        excerpt = {"first_line": 1, "lines": ["backward()", "clip()"]}
        writer.findings(
            [CountedFinding(finding=finding, count=9, first_step=1, last_step=5, ranks=[rank], excerpt=excerpt)]
        )
        facts = {"precision": "fp16", "steps": 5, "optimizers": ["AdamW"], "settings": {"tf32": True}}
        facts |= {"timing": {"step": 0.1}, "memory": {"peak": 5}, "not_measured": ["activations"], "scaler": {"a": 1}}
        for name, fact in facts.items():
            writer.fact(name, fact)
        writer.event(LoggedEvent(name="rolled-back", level="warning", message="rolled back", step=3, fields={"a": [1]}))
        writer.close("failed", 1, error=ValueError("no data"))
    return home


FORMS = [[], ["--json"], ["-o", "page.html", "-f"]]


@pytest.mark.parametrize(
    "name", ["manifest.json", "findings.json", "steps.jsonl", "layers.jsonl", "events.jsonl", "rank1/findings.json"]
)
def test_records(record, tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(record, "run")
    text = (record / name).read_text()
    first, rest = (text, "") if name.endswith(".json") else text.split("\n", 1)
    for number, (what, data) in enumerate(forgeries(first, rounds(12, 150), seed=name)):
        (tmp_path / "run" / name).write_text(f"{data}\n{rest}" if rest else data)
        runs(f"{name}: {what}", capsys, "report", "run", *FORMS[number % 3])
        if number % 3 == 1:
            runs(f"{name}: {what}", capsys, "report", record, "run", *FORMS[number % 2])


def test_what_was_found_by_hand(record, tmp_path, capsys):
    """A step of a place that is a list, in a finding: it is left out, and the report says so."""
    shutil.copytree(record, tmp_path / "run")
    findings = json.loads((record / "findings.json").read_text())
    findings["findings"][0]["place"]["step"] = [None]
    (tmp_path / "run" / "findings.json").write_text(json.dumps(findings))
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "findings.json: 1 of 1 findings are invalid and were ignored." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", 3), ("level", "fatal"), ("level", []), ("message", None), ("advice", {}), ("step", "3"), ("fields", 1)],
)
def test_an_event_that_is_none_is_left_out_and_the_report_says_so(record, tmp_path, capsys, field, value):
    shutil.copytree(record, tmp_path / "run")
    event = json.loads((record / "events.jsonl").read_text())
    good = json.dumps(event | {"message": "\x1b[2Jthis one\nis good"})
    (tmp_path / "run" / "events.jsonl").write_text(f"{json.dumps(event | {field: value})}\n{good}\n")
    assert main(["report", str(tmp_path / "run")]) == 0
    text = " ".join(capsys.readouterr().out.split())  # lines are wrapped to the terminal
    assert "events.jsonl: 1 of 2 lines cannot be read and were ignored; the first is line 1." in text
    assert "\\x1b[2Jthis one" in text


# --- links ---------------------------------------------------------------------------------------------------------


def test_a_guard_does_not_write_through_a_symlink_in_its_directory(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "received").mkdir()
    (tmp_path / "received" / "capsules").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match=r"capsules in it is a symlink, .* does not write through symlinks\. Remove it"):
        train(tmp_path / "received", 1)
    (tmp_path / "mine").symlink_to(tmp_path / "elsewhere")  # which the user names is the user's
    train(tmp_path / "mine", 1)
    assert checkpoints(tmp_path / "elsewhere")
    assert Capsules(tmp_path / "mine")


def test_a_report_does_not_write_through_a_symlink_in_its_record(record, tmp_path, capsys):
    shutil.copytree(record, tmp_path / "run")
    (tmp_path / "run" / "report.html").symlink_to(tmp_path / "new")
    assert main(["report", str(tmp_path / "run"), "--open"]) == 2
    assert "is a symlink and is not written to. Name another file with -o." in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
