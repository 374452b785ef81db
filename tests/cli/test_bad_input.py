"""Wrong arguments of every command: one line that says the way out, exit code 2, and torch is not imported for it."""

import json
import subprocess
import sys

import pytest

from ampwise.cli import commands, main

TRAIN = "import torch\n\n\ndef make():\n    raise RuntimeError('it was called')\n"
# What is typed, and a part of the line that answers.
BAD = {
    "advise": {
        "train.py:nope": "train.py has no function 'nope'. `ampwise init train.py` writes one.",
        "--gpu h2oo": "unknown device 'h2oo'. Did you mean h200",
        "--want bf61": "unknown precision 'bf61'. Did you mean bf16",
        "--symptom nanan": "unknown symptom 'nanan'. Did you mean nan",
    },
    "align": {
        "": "name your function that makes the model and a batch, MAKE; `ampwise init train.py` writes one. See",
        "train.py:make --precision fp61": "unknown precision 'fp61'. Did you mean fp16",
        "train.py:make --batch 0": "--batch: expected a whole number of 1 or more, got '0'",
        "train.py:make --gpu h2oo": "unknown device 'h2oo'",
    },
    "bench": {
        "trian.py:make": "there is no file trian.py. Did you mean train.py?",
        "train.py:make --precisions float16": "unknown precision 'float16'. Did you mean fp16?",
        "train.py:make --optimizer adamm": "unknown optimizer 'adamm'. Did you mean adam",
        "train.py:make --device gpu": "unknown device 'gpu'",
        "train.py:make -o no/page.html": "-o no/page.html: there is no folder no.",
        "train.py:make --keep head": "--keep head: expected fp32=PATTERN",
        "train.py:make --html page.html": "unknown option '--html'; did you mean --output?",
    },
    "check": {
        "--select AMP99": "unknown rule selector 'AMP99'",
        "nothing.py": "nothing.py: cannot check: no such file",
        "--config gone.toml": "check --config gone.toml: no such file",
        "--watch --diff": "check --watch: cannot be combined with",
        "--jobs none": "--jobs: expected a whole number of 1 or more, got 'none'",
    },
    "checkpoints": {
        "": "arguments are required: DIR",
        "gone": "'gone': no such folder",
        "run --show": "unknown option '--show'",
    },
    "completion": {
        "--shell zsh": "unknown option '--shell'",
        "basch": "invalid choice: 'basch'",
        "bash zsh": "unexpected argument 'zsh'",
    },
    "diff": {
        "train:nope": "train.py has no function 'nope'.",
        "train.py:make --b bf61": "unknown precision 'bf61'. Did you mean bf16",
        "train.py:make --b bf16,atention=math": "'atention'. Did you mean attention",
        "train.py:make --b policy.json": "there is no file policy.json.",
        "train.py:make -o .": "-o .: is a folder.",
    },
    "explain": {
        "AMP1O1": "unknown rule 'AMP1O1'. Did you mean AMP101",
        "clip-scaled-grad --jsn": "unknown option '--jsn'; did you mean --json?",
        "no-such-thing-at-all": "unknown rule 'no-such-thing-at-all'",
    },
    "formats": {
        "fp17": "unknown format 'fp17'. Did you mean fp16",
        "--js": "unknown option '--js'; did you mean --json?",
        "fp16 -x": "unknown option '-x'",
    },
    "gpu": {
        "h2oo": "unknown device 'h2oo'. Did you mean h200",
        "--want fp9": "unknown format 'fp9'. Did you mean fp8",
        "h200 --list": "give a NAME or --list, not both",
    },
    "init": {
        "-q gone.py": "there is no such file",
        "train.py more.py": "unexpected argument 'more.py'",
        "-q train.py -o no/x.py": "-o no/x.py: there is no folder no.",
    },
    "mcp": {
        "--root gone": "gone",
        "more": "unexpected argument 'more'",
        "--alow-run": "did you mean --allow-run?",
    },
    "memory": {
        "": "no model given: name your function, train.py:make (`ampwise init train.py` writes one)",
        "--params lots": "--params lots: expected a number of parameters",
        "train.py:make --precision fp61": "unknown precision 'fp61'. Did you mean fp16",
        "--params 7B --gpu h2oo": "unknown device 'h2oo'",
        "--params 7B --batch 1,x": "--batch 1,x: expected whole numbers of rows",
        "--params 7B --gpu 8.6": "--gpu 8.6: a capability is not enough here.",
    },
    "replay": {
        "gone": "gone: there is no such folder",
        "run --precision fp61": "unknown precision 'fp61'. Did you mean fp16",
        "run train.py:nope": "train.py has no function 'nope'.",
        "run --build train.py:make": "unknown option '--build'; did you mean MAKE?",
    },
    "report": {
        "": "there are no runs in ampwise-runs. `ampwise run train.py` makes one",
        "gone": "gone",
        "run -o no/page.html": "run",
    },
    "run": {
        "": "arguments are required: SCRIPT",
        "gone.py": "gone.py",
        "--every 0 train.py": "--every: expected a whole number of 1 or more, got '0'",
        "--capsule train.py/x train.py": "--capsule train.py/x",
        "--sink tensorbord train.py": "unknown sink 'tensorbord'. Did you mean tensorboard",
    },
    "schema": {
        "nope": "unknown schema 'nope'",
        "check bench": "unexpected argument 'bench'",
        "--jsn": "unknown option '--jsn'",
    },
    "search": {
        "train.py:make --formats fp17,fp32": "unknown format 'fp17'. Did you mean fp16",
        "train.py:make --tolerance 0": "--tolerance 0: expected a number above 0",
        "train.py:make --out policy.json": "unknown option '--out'; did you mean --output?",
        "train.py:make -o no/policy.json": "-o no/policy.json: cannot write there",
        "train.py:make --batches 99": "--batches 99: expected 1 to 16",
    },
    "skill": {
        "more": "unknown topic 'more'. The topics are step, ",
        "-o train.py": "-o: train.py/SKILL.md cannot be written",
        "--out skills": "unknown option '--out'; did you mean --output?",
    },
    "watch": {
        "run --interval soon": "expected 0.1 to 3600 seconds, got 'soon'",
        "run --serve http": "'http' is not a port",
        "run --once": "run",
    },
}
# All in one process, with a torch that only notes that it was imported.
TORCH = "import sys\n\nsys.imports_of_torch = 1\nraise ImportError('torch was imported')\n"
ASK = """
import contextlib, io, json, sys
sys.path.insert(0, sys.argv[1])
from ampwise.cli import main
answers = []
for words in json.load(sys.stdin):
    sys.imports_of_torch = 0
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as leaving:
            code = leaving.code
    answers.append((code, sys.imports_of_torch, out.getvalue(), err.getvalue()))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(TRAIN)
    (folder / "run").mkdir()
    (folder / "library").mkdir()
    (folder / "library" / "torch.py").write_text(TORCH)
    asked = [[command, *words.split()] for command, cases in BAD.items() if command in commands() for words in cases]
    done = subprocess.run(
        [sys.executable, "-c", ASK, "library"], input=json.dumps(asked), cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {" ".join(words): answer for words, answer in zip(asked, json.loads(done.stdout), strict=True)}


@pytest.mark.parametrize("command", commands(), ids="ampwise-{}".format)
def test_a_mistake_is_one_line_before_torch_is_imported(answers, command):
    assert len(BAD[command]) >= 3
    for words, expected in BAD[command].items():
        typed = f"{command} {words}".strip()
        code, imports_of_torch, out, err = answers[typed]
        assert (code, imports_of_torch, out) == (2, 0, ""), (typed, out, err)
        assert expected in err, typed
        line, *notes = err.splitlines()
        assert line.startswith(("ampwise: error: ", "ampwise: nothing.py: ")), typed
        assert not notes, typed


@pytest.mark.parametrize(
    "words", ["advise --gpu a100", "gpu a100", "memory --layers 2 --hidden 256 --gpu a100 -q --no-largest"]
)
def test_the_name_of_a_family_is_enough(capsys, words):
    assert main(words.split()) == 0
    said = capsys.readouterr()
    assert said.err.startswith("ampwise: a100 is taken as A100 SXM 80GB; others: a100-40, a100-pcie-80\n")
    assert "A100" in said.out


def test_what_is_known_without_torch_is_what_the_library_has():
    from ampwise.cli import bench, diff, memory, search
    from ampwise.train.precision.names import PLAIN
    from ampwise.train.precision.precision import PRECISIONS
    from ampwise.tune.bench.lineup import NAMES
    from ampwise.tune.diff import side
    from ampwise.tune.memory import optimizers
    from ampwise.tune.search.arguments import MOST_BATCHES
    from ampwise.tune.train_case import OPTIMIZERS

    assert tuple(PRECISIONS) == PLAIN
    assert bench.PRECISIONS == NAMES
    assert tuple(OPTIMIZERS) == bench.OPTIMIZERS
    assert memory.OPTIMIZERS == optimizers.NAMES
    assert search.MOST_BATCHES == MOST_BATCHES
    assert set(diff.OPTIONS) == {option.partition("=")[0] for option in side.OPTIONS}
