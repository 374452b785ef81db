"""The frame around the commands, run as a person runs it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ampwise.cli
from ampwise.cli import commands, main
from ampwise.runs.writer import RecordWriter

TEST_COMMANDS = {
    "sleep": "print('ready', flush=True); import time; time.sleep(60)",
    "crash": "raise RuntimeError('a bug')",
    "refuse": "from ampwise.errors import BadInput; raise BadInput('asked for 3, possible are 1 and 2')",
    "flood": "print('x\\n' * 10**6); return 0",
    "drip": "print('x'); return 0",
    "three": "return 3",
    "lose": "open('/no/such/file')",
}
VERB_FILE = '''"""Odd [brackets] and 100% of {{braces}}.

Examples:
  ampwise {name} [--opt] "a[0]"
"""
def add_arguments(parser):
    parser.add_argument("--opt", action="store_true", help="a [bracketed] help")
def run(args):
    {body}
'''
RUNNER = "import sys, ampwise.cli as c; c.__path__.append(sys.argv[1]); sys.exit(c.main(sys.argv[2:]))"
PLAIN = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
PLAIN.pop("PYTHONUNBUFFERED", None)  # it would hide what is flushed too late


COMMAND = [sys.executable, "-m", "ampwise"]


@pytest.fixture(scope="module")
def with_test_commands(tmp_path_factory):
    """The command that runs ampwise with a few commands added that misbehave on demand."""
    folder = tmp_path_factory.mktemp("commands")
    for name, body in TEST_COMMANDS.items():
        (folder / f"{name}.py").write_text(VERB_FILE.format(name=name, body=body))
    return [sys.executable, "-c", RUNNER, str(folder)]


def run(command, *words):
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=120, env=PLAIN)


@pytest.fixture
def here(capsys, monkeypatch):
    """Runs ampwise in this process, for words that need none of their own: the exit code, and what was said."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")

    def run(*words):
        try:
            code = main(words)
        except SystemExit as leaving:
            code = leaving.code
        return code, *capsys.readouterr()

    return run


def test_bare_prints_help_and_is_content(here):
    code, said, complained = here()
    assert (code, complained) == (0, "")
    assert said.startswith("Find and fix mixed-precision bugs in PyTorch training.\n\n  ampwise check train.py ")
    listed = [
        line.split()[0] for line in said.splitlines() if line.startswith("  ") and not line.startswith("  ampwise")
    ]
    assert sorted(listed) == commands()
    assert said.index("Find bugs\n  check ") < said.index("Choose a precision\n  advise ") < said.index("\nLook up\n")
    assert max(map(len, said.splitlines())) <= 80
    assert here("--help") == here("-h") == here("help") == (0, said, "")


def test_help_of_a_command(here):
    assert here("help", "explain") == here("explain", "--help")
    assert here("help", "explan")[2].startswith("ampwise: error: unknown command 'explan'. Did you mean explain? ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["explan", "x"],
            "unknown command 'explan'. Did you mean explain? `ampwise --help` lists the commands.",
        ),
        (["ch"], "unknown command 'ch'. Did you mean check or checkpoints? `ampwise --help` lists the commands."),
        (["compare"], "unknown command 'compare'. Did you mean `ampwise bench`?"),
        (
            ["trace"],
            "unknown command 'trace'. `ampwise run train.py` traces NaN in a script to its line; in Python, "
            "`ampwise.trace(loss_fn, x, y)` traces one step; `ampwise replay` runs a saved one again.",
        ),
        (["resume"], "unknown command 'resume'. Did you mean `ampwise checkpoints`?"),
        (["rules"], "unknown command 'rules'. Did you mean `ampwise explain`?"),
        (["lint", "train.py"], "unknown command 'lint'. Did you mean `ampwise check`?"),
        (["skill", "--out=x"], "unknown option '--out'; did you mean --output? See `ampwise skill --help`."),
        (["report", "--html", "x"], "unknown option '--html'; did you mean --output? See `ampwise report --help`."),
        (["explain", "--html"], "unknown option '--html'. See `ampwise explain --help`."),
        (["check", "--exlude=x"], "unknown option '--exlude'; did you mean --exclude? See `ampwise check --help`."),
        (["--bogus"], "unknown option '--bogus'. See `ampwise --help`."),
        (["explain", "--jsn"], "unknown option '--jsn'; did you mean --json? See `ampwise explain --help`."),
        (["explain", "--js"], "unknown option '--js'; did you mean --json? See `ampwise explain --help`."),
        (["explain", "--colour=no"], "unknown option '--colour'. See `ampwise explain --help`."),
        (["explain", "-z"], "unknown option '-z'. See `ampwise explain --help`."),
        (
            ["--json", "formats"],
            "unknown option '--json'; options come after the command: `ampwise formats --json`. See `ampwise --help`.",
        ),
        (
            ["--want", "fp8", "gpu"],
            "unknown option '--want'; options come after the command: `ampwise COMMAND --want`. See `ampwise --help`.",
        ),
        (["skill", "nan", "more"], "unexpected argument 'more'. See `ampwise skill --help`."),
        (["run"], "the following arguments are required: SCRIPT. See `ampwise run --help`."),
        (["replay"], "the following arguments are required: CAPSULE. See `ampwise replay --help`."),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(here, words, line):
    assert here(*words) == (2, "", f"ampwise: error: {line}\n")


@pytest.mark.parametrize("command", commands())
def test_every_command_explains_itself_with_an_example_in_80_columns(here, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, said, complained = here(command, "--help")
    assert (code, complained) == (0, "")
    assert f"  ampwise {command}" in said
    assert [line for line in said.splitlines() if len(line) > 80] == []


def test_version(here):
    code, said, complained = here("-V")
    assert here("--version") == (0, said, "")
    assert (code, complained) == (0, "")
    assert said.startswith("ampwise ")


def test_a_command_is_a_file_in_the_folder(here, with_test_commands, monkeypatch):
    monkeypatch.setattr("ampwise.cli.__path__", [*ampwise.cli.__path__, with_test_commands[-1]])
    _, said, _ = here("three", "--help")
    assert "Odd [brackets] and 100% of {braces}." in said
    assert '  ampwise three [--opt] "a[0]"' in said
    assert "a [bracketed] help" in said
    assert "Odd [brackets] and 100% of {braces}" in here()[1]
    assert here("three") == (3, "", "")
    assert here("refuse") == (2, "", "ampwise: error: asked for 3, possible are 1 and 2\n")


def test_a_bug_is_a_traceback(with_test_commands):
    done = run(with_test_commands, "crash")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("RuntimeError: a bug\n")


def test_ctrl_c_is_a_line_and_130(with_test_commands):
    # A shell's background job ignores Ctrl-C, and so do its children, unless told otherwise.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [*with_test_commands, "sleep"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGINT, before)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "ampwise: interrupted\n")


@pytest.mark.parametrize("command", ["flood", "drip", "--help"])
def test_a_reader_who_leaves_is_met_quietly(with_test_commands, command):
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [*with_test_commands, command], stdout=writer, stderr=subprocess.PIPE, text=True, env=PLAIN
    )
    os.close(writer)
    os.close(reader)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (141, "")


@pytest.mark.few_by_day(5)
@pytest.mark.parametrize("environment", [PLAIN, {**PLAIN, "PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    "words",
    [
        "explain --json",
        "explain AMP701",
        "formats",
        "formats --json",
        "gpu h200",
        "gpu --list --json",
        "explain --help",
        "--help",
        "--version",
    ],
)
def test_a_full_disk_is_one_line_and_exit_2(words, environment):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *words.split()], stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    line = "ampwise: error: cannot write the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.half_by_day
@pytest.mark.parametrize("words", [["formats"], ["explain", "--json"], ["gpu", "h200"], ["--help"], ["--version"]])
def test_a_closed_stdout_is_nobody_listening(words):
    done = subprocess.run(in_a_shell(">&-", *words), stderr=subprocess.PIPE, text=True, env=PLAIN)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_with_stderr_closed_does_not_go_to_stdout():
    done = subprocess.run(in_a_shell("2>&-", "explain", "AMP000"), stdout=subprocess.PIPE, text=True, env=PLAIN)
    assert (done.returncode, done.stdout) == (2, "")


def in_a_shell(redirection, *words):
    return ["sh", "-c", f'"$@" {redirection}', "sh", *COMMAND, *words]


def test_an_error_of_the_system_that_is_not_about_output_is_a_bug(with_test_commands):
    done = run(with_test_commands, "lose")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")


def test_python_m_runs_nothing_of_the_current_folder(tmp_path):
    """`python -m` has the current folder first on its path: a json.py there, or a plugin, would be run by a check."""
    trap = "open('was-run', 'a').write(__name__)\n"
    for name in ("argparse", "ast", "json", "rich", "tokenize", "tomllib", "plugin"):
        (tmp_path / f"{name}.py").write_text(trap)
    (tmp_path / "plugin-1.0.dist-info").mkdir()
    (tmp_path / "plugin-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (tmp_path / "plugin-1.0.dist-info" / "entry_points.txt").write_text("[ampwise.rules]\nplugin = plugin\n")
    (tmp_path / "ampwise.toml").write_text('select = ["AMP101"]\n')
    (tmp_path / "train.py").write_text("import torch\nscaler = torch.cuda.amp.GradScaler()\n")
    words = [*COMMAND, "check", ".", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=PLAIN, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")
    assert not (tmp_path / "was-run").exists()


# Without torch


READS = """
import sys
from ampwise.cli import main
for words in ("explain AMP701", "formats", "gpu h200", "skill", "advise --gpu h200", "report a", "report a b"):
    assert main(words.split()) == 0, words
    assert "torch" not in sys.modules, f"{words} loads torch"
"""


def test_what_reads_leaves_torch_out(tmp_path):
    for name in ("a", "b"):
        RecordWriter.create(tmp_path / name, command=["train.py"], script="train.py", environment={}).close(
            "finished", 0
        )
    subprocess.run([sys.executable, "-c", READS], cwd=tmp_path, capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory):
    """The exit code and the output of each command where torch is not installed, all from one process."""
    words = [
        *("gpu", "advise", "advise m:f --gpu h200"),
        *("align m:f", "bench m:f", "diff m:f", "memory --params 7B", "replay .", "search m:f"),
    ]
    code = (
        "import contextlib, io, json, sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError('No module named torch', name='torch')\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "from ampwise.cli import main\n"
        "found = {}\n"
        f"for words in {words!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:\n"
        "        found[words] = main(words.split()), out.getvalue(), err.getvalue()\n"
        "print(json.dumps(found))\n"
    )
    folder = tmp_path_factory.mktemp("empty")
    (folder / "m.py").write_text("def f(): ...\n")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True, env=PLAIN
    )
    return json.loads(done.stdout)


def test_what_can_do_without_torch_does(without_torch):
    code, out, _ = without_torch["gpu"]
    assert code == 0
    assert "torch   not installed, so GPUs of this machine are unknown" in out
    code, out, _ = without_torch["advise"]
    assert code == 0
    assert out.startswith(
        "Train a model in BF16 where the device has tensor cores for it, else FP16 with a loss scale.\n"
    )
    assert "torch is not installed, so this machine's devices are unknown" in " ".join(out.split())
    code, _, err = without_torch["advise m:f --gpu h200"]
    assert code == 2
    assert err == (
        "ampwise: error: advise needs torch to inspect a model: pip install 'ampwise[torch]'. "
        "Or give its size and kind: --params 124M --arch transformer.\n"
    )


@pytest.mark.parametrize("command", ["align", "bench", "diff", "memory", "replay", "search"])
def test_what_needs_torch_says_so(without_torch, command):
    code, _, err = next(found for words, found in without_torch.items() if words.startswith(command))
    assert (code, err) == (2, f"ampwise: error: ampwise {command} needs torch: pip install 'ampwise[torch]'\n")
