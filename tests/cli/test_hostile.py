"""Every command on a terminal, with names and contents that act on one: nothing of them does."""

import argparse
import json
import subprocess
import sys

import pytest

from ampwise.cli import build_parser, commands
from ampwise.guard.disk.manifest import MANIFEST

from ..hostile import (
    ACTS,
    COMMENT,
    LOOP,
    NAME,
    TEXT,
    TRAIN,
    acting,
    capsule,
    checkpoints,
    copied,
    poisoned,
    record,
    resealed,
    shown,
    sources,
)

MOVES = {"bench", "diff", "memory", "search", "watch"}  # have a bar, or a picture that changes in place
GONE = "gone/gone"
MACHINE = f"""
import ampwise.hardware
from ampwise.hardware import Cpu, CudaDevice, Fp32Switches, Machine, TorchInfo
name = {TEXT!r}
fp32 = Fp32Switches(matmul_tf32=False, convolution_tf32=True, matmul_precision="highest")
device = CudaDevice(index=0, name=name, capability="9.0", memory_bytes=2**37, bf16_claimed=True, bf16_native=True,
                    gpu=None)
facts = TorchInfo(version=name, cuda=name, hip=None, devices=(device,), mps=False, fp32=fp32, problem=name)
machine = Machine(python=name, platform=name, cpu=Cpu(model=name, features=()), driver=name, torch=facts)
ampwise.hardware.describe_machine = lambda: machine
"""


# A record that may yet come is waited for.
IMPATIENT = """
from ampwise.report.live import poller
poller.PATIENCE_S = 0.0
"""


def given(*words, **more):
    return {"words": [str(word) for word in words], **more}


def generic(command):
    """An argument too many, an option that there is not, and such a value for each option that has one."""
    parser = build_parser([command])._subparsers._group_actions[0].choices[command]
    needed = [GONE for action in parser._actions if not action.option_strings and action.nargs is None]
    yield given(command, *needed, NAME)
    yield given(command, NAME, *needed[1:])
    yield given(command, *needed, f"--{NAME}")
    yield given(command, *needed, f"-{NAME}")
    for action in parser._actions:
        if action.option_strings and action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction):
            yield given(command, action.option_strings[-1], NAME, *needed)
            yield given(command, f"{action.option_strings[-1]}={NAME}", *needed)


def of_check(folder):
    place = sources(folder / "src")
    for form in ("full", "concise", "github", "gitlab", "json", "sarif"):
        yield given("check", "--isolated", "--output-format", form, place)
    for options in (["--diff"], ["--diff", "--unsafe-fixes"], ["--statistics"], ["--add-noqa"], ["--fix"]):
        yield given("check", "--isolated", *options, place)
    yield given("check", "--config", place / f"{NAME}.toml", place)
    yield given("check", place, env={"AMPWISE_OUTPUT_FORMAT": NAME})
    code = f"import torch\ns = torch.cuda.amp.GradScaler()  {COMMENT}\n"
    for options in ([], ["--fix"], ["--diff"]):
        yield given("check", "--isolated", *options, "--stdin-filename", f"{NAME}.py", "-", stdin=code)
    yield given("check", "--fix", "-", stdin=f"def ( {ACTS}\udcff")
    settings = {
        "select": [TEXT],
        "output-format": TEXT,
        "extend-exclude": [TEXT],
        TEXT: 1,
        "per-file-ignores": {TEXT: [TEXT]},
    }
    for number, (key, value) in enumerate(settings.items()):
        other = folder / f"settings{number}"
        other.mkdir()
        values = (
            json.dumps(value) if not isinstance(value, dict) else f"{{ {json.dumps(TEXT)} = {json.dumps([TEXT])} }}"
        )
        (other / "pyproject.toml").write_text(f"[tool.ampwise]\n{json.dumps(key)} = {values}\n")
        (other / "a.py").write_text(code)
        yield given("check", other)


def of_run(folder):
    made = "import torch\nfrom train import make\nmodel, batch, loss_fn = make()\n"
    scripts = {"fine": f"{made}{LOOP}", "nan": f"{made}batch[0].fill_(torch.nan)\n{LOOP}"}
    for name, code in scripts.items():
        (folder / f"{name}{NAME}.py").write_text(code, encoding="utf-8")
        output = ["-o", folder / f"runs{name}{NAME}"]
        yield given("run", "-f", *output, "--capsule", folder / f"capsules{NAME}", f"{name}{NAME}.py", NAME)
    yield given("run", "-o", folder / "src", f"fine{NAME}.py")
    yield given("run", "--sink", f"jsonl:/dev/null/{NAME}", "-q", "-f", *output, f"fine{NAME}.py")
    yield given("run", "-m", NAME)
    (folder / f"folder{NAME}").mkdir()
    yield given("run", folder / f"folder{NAME}")
    yield given("run", "python", NAME)


def of_replay(folder):
    yield given("replay", saved := capsule(folder / f"capsules{NAME}"))
    yield given("replay", saved, "--json")
    yield given("replay", saved, "train:fails")
    yield given("replay", saved, "train:odd")
    yield given("replay", folder / f"capsules{NAME}")
    named = ("precision", "build", "device", "version", "step", "build_args", "findings")
    for name in named:
        other = copied(saved, f"{name}{NAME}", "capsule.json", lambda facts, name=name: {**facts, name: TEXT})
        yield given("replay", resealed(other))
    yield given("replay", copied(saved, "not sealed", "capsule.json", poisoned))
    yield given("replay", resealed(copied(saved, "sealed", "capsule.json", poisoned)))


def of_records(folder, command):
    first, second = record(folder / f"first{NAME}"), record(folder / "second")
    for file in ("manifest.json", "findings.json"):
        other = copied(first, f"{file}{NAME}", file, poisoned)
        yield given(command, other, *(["--once"] if command == "watch" else []))
    if command == "watch":
        yield given("watch", "--once", first)
        yield given("watch", first)
        yield given("watch", "--once", folder)
        yield given("watch", first, env={"TERM": "dumb"})
        return
    yield given("report", first)
    yield given("report", folder)
    yield given("report", first, second)
    yield given("report", first, "--json")
    yield given("report", first, second, "--json")
    yield given("report", first, "-o", folder / f"page{NAME}.html")
    (folder / f"no record{NAME}").mkdir()
    (folder / f"no record{NAME}" / f"events.out{NAME}").touch()
    yield given("report", folder / f"no record{NAME}")
    yield given("report", first, folder / f"no record{NAME}")


def of_resume(folder):
    saved = checkpoints(folder / f"saved{NAME}")
    for options in ([], ["-v"], ["--verify"], ["--json"]):
        yield given("checkpoints", saved, *options)
    newest = saved / "step-00000100"
    (newest / MANIFEST).write_text(json.dumps(poisoned(json.loads((newest / MANIFEST).read_text()))))
    yield given("checkpoints", saved)
    yield given("checkpoints", saved, "-v")
    yield given("checkpoints", newest)


def of_a_model(command, *options):
    for name in ("make", "fails", "odd", TEXT):
        yield given(command, f"train:{name}", *options)
    yield given(command, "train:make", *options, "--json")


def of_init(folder):
    """A script whose names, texts and errors act on a terminal, read and run."""
    net = f"from torch import nn\ndef build():  {COMMENT}\n    raise ValueError({TEXT!r})\n"
    loop = (
        f"def main(x):\n    model = build()\n    for x in [{TEXT!r}]:\n        model({TEXT!r}, x).backward()\nmain(1)\n"
    )
    for name in ("plain", NAME):
        place = folder / f"{name}.py"
        place.write_text(net + loop, "utf-8", "surrogateescape")
        yield given("init", "--no-run", "-f", place, "-o", folder / "made.py")
        yield given("init", "--no-run", "-f", place, "-o", folder / f"{NAME}.py")
    yield given("init", "-f", folder / "plain.py", "-o", folder / "made.py")


CASES = {
    "advise": lambda _: of_a_model("advise"),
    "align": lambda _: of_a_model("align", "--gpu", "h200"),
    "check": of_check,
    "completion": lambda _: [given("completion", shell) for shell in ("bash", "zsh", "fish")],
    "bench": lambda _: of_a_model("bench", "--precisions", "fp32,bf16", "--rounds", "1", "--steps", "1"),
    "diff": lambda _: of_a_model("diff", "--no-floor", "--ops", "-v"),
    "explain": lambda _: [given("explain", "AMP101")],
    "formats": lambda _: [given("formats"), given("formats", "fp16", "mxfp8")],
    "gpu": lambda _: [given("gpu", setup=MACHINE), given("gpu", "--json", setup=MACHINE), given("gpu", "h200")],
    "mcp": lambda folder: [given("mcp", "--root", folder / NAME)],
    "init": of_init,
    "memory": lambda _: of_a_model("memory", "--no-largest"),
    "replay": of_replay,
    "report": lambda folder: of_records(folder, "report"),
    "checkpoints": of_resume,
    "run": of_run,
    "schema": lambda _: [given("schema", NAME)],
    "search": lambda folder: of_a_model("search", "--batches", "1", "--trials", "2", "-f", "-o", folder / NAME),
    "skill": lambda folder: [given("skill"), given("skill", "-o", folder / NAME)],
    "watch": lambda folder: of_records(folder, "watch"),
}


def test_every_command_has_a_hostile_case():
    assert sorted(CASES) == commands()


@pytest.mark.half_by_day
@pytest.mark.parametrize("command", commands(), ids="ampwise-{}".format)
def test_nothing_acts_on_the_terminal(warm, tmp_path, command):
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    cases = [*CASES[command](tmp_path), *generic(command)]
    cases = [{"setup": IMPATIENT, **case} for case in cases] if command == "watch" else cases
    told = shown(warm, cases, tmp_path)
    crashed = [words for words, _, _ in told if words.startswith(b" crashed")]
    assert not crashed
    assert len(told) == len(cases)
    assert not [words for words, _, text in told if not text.strip()], "a case that shows nothing tests nothing"
    found = {words[:300]: act for words, _, text in told if (act := acting(text, moves=command in MOVES))}
    assert not found


def test_words_that_are_no_command(warm, tmp_path):
    cases = [given(NAME), given(f"--{NAME}"), given(f"--{NAME}", "check"), given("--version"), given("--help")]
    told = shown(warm, cases, tmp_path)
    assert not [(words, act) for words, _, text in told if (act := acting(text))]
    assert b"ampwise: error: unknown command" in told[0][2]


def test_our_own_styles_come_through(warm, tmp_path):
    (tmp_path / "a.py").write_text("import torch\nscaler = torch.cuda.amp.GradScaler()\n")
    words = [["explain"], ["formats"], ["explain", "AMP101"], ["gpu", "h200"], ["check", "--isolated", "a.py"]]
    cases = [given(*each, *more) for each in words for more in ([], ["--help"])]
    for _, _, text in shown(warm, cases, tmp_path, COLORTERM="truecolor"):
        assert b"\x1b[" in text
        assert rb"\x1b" not in text
    for _, _, text in shown(warm, cases, tmp_path, NO_COLOR="1"):
        assert b"\x1b" not in text
        assert rb"\x1b" not in text


def test_what_a_script_writes_is_its_own(warm, tmp_path):
    """Also how it ends: what it gives to sys.exit, and what it raises."""
    code = "import sys, torch\nsys.stdout.write('\\x1b[4;35mout\\r')\nsys.stderr.write('\\x9b2Jerr\\n')\n"
    (tmp_path / "exits.py").write_text(f"{code}sys.exit('\\x1b]0;mine\\x07')\n")
    (tmp_path / "raises.py").write_text(f"{code}raise RuntimeError('\\x1b]0;mine\\x07')\n")
    for name in ("exits", "raises"):
        [(_, _, text)] = shown(warm, [given("run", "-o", tmp_path / name, f"{name}.py")], tmp_path)
        theirs, end, ours = text.partition(b"\x1b]0;mine\x07\r\n")
        assert end
        assert b"\x1b[4;35mout\r" in theirs
        assert b"\xc2\x9b2Jerr\r\n" in theirs
        assert ours.strip()
        assert not acting(ours)


def test_a_diff_in_a_pipe_is_an_exact_patch(tmp_path):
    """And on a terminal, what it looks like: the test above has the same files."""
    place = sources(tmp_path / "src")
    for notebook in place.glob("*.ipynb"):
        notebook.unlink()
    latin = "# coding: latin-1\r\nimport torch\r\nscaler = torch.cuda.amp.GradScaler()  # \xe9\x9b2J\r\n".encode(
        "latin-1"
    )
    (place / f"latin{NAME}.py").write_bytes(latin)
    command = ["-m", "ampwise", "check", "--isolated", "--diff", "."]
    with (tmp_path / "patch").open("wb") as patch:
        done = subprocess.run([sys.executable, *command], cwd=place, stdout=patch, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2, done.stderr  # a file could not be checked
    data = (tmp_path / "patch").read_bytes()
    assert ACTS.encode() in data
    before = {file: file.read_bytes() for file in place.iterdir()}
    done = subprocess.run(["patch", "-p0", "--binary"], cwd=place, input=data, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    after = {file: file.read_bytes() for file in place.iterdir()}
    changed = {file: (before[file], after[file]) for file in before if before[file] != after[file]}
    assert len(changed) == 2
    for old, new in changed.values():
        assert new == old.replace(b"torch.cuda.amp.GradScaler()", b'torch.amp.GradScaler("cuda")')
