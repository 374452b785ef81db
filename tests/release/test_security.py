"""What docs/security.md promises: that each promise names its test; and those of the whole source, read here."""

import ast
import re
from functools import cache

from ampwise.cli import main
from ampwise.report.live import server

from ..for_each import for_each
from .conftest import ROOT

SOURCE = ROOT / "src" / "ampwise"
POLICY = ROOT / "docs" / "security.md"

RUNS_THE_SCRIPT = "watch/script.py"  # `ampwise run`, which is there to run one
# Statements of the running script, once more.
RUNS_ITS_CODE = ("watch/loss_code.py", "watch/code_slice.py", "watch/outside_values.py", "watch/update_by_hand.py")
# `ampwise init`, which tries the `make` that it has drafted from a script, in a process of its own.
TRIES_THE_DRAFT = ("tune/init/trial.py", "tune/init/random_batch.py")
# Calls that make code of data, or a shell's command of text; and the only files that may have them.
MAKES_CODE = {
    **dict.fromkeys(["exec", "compile"], (RUNS_THE_SCRIPT, *RUNS_ITS_CODE, *TRIES_THE_DRAFT)),
    **dict.fromkeys(["eval", "__import__", "torch.load", "torch.hub.load", "numpy.load", "np.load"], ()),
    **dict.fromkeys(["os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"], ()),
    **dict.fromkeys(["shutil.unpack_archive", "tempfile.mktemp"], ()),
}
# Modules whose readers do; and archives, whose names may lead anywhere.
READS_CODE = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "runpy", "zipfile", "tarfile"}
# Who may talk to others, and why.
NETWORK = {
    "guard/disk/lock.py": "the name of this machine",
    "report/live/server.py": "the page of a run, on loopback",
    "tune/init/trial.py": "refuses connections in the process that tries a script's model",
}
TALKS = {
    "socket",
    "socketserver",
    "ssl",
    "http",
    "urllib.request",
    "wsgiref",
    "ftplib",
    "smtplib",
    "requests",
    "httpx",
    "aiohttp",
}
TRUSTED_MARKUP = {"report/page/syntax.py", "report/page/templates.py"}


@cache
def texts():
    return {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}


def trees(*words):
    """The files that have one of the words, parsed: comments and docstrings may well have them."""
    return {file: ast.parse(text) for file, text in texts().items() if any(word in text for word in words)}


def calls(tree):
    """Each call, by the name it is called by."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else "", node


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def makers_of_code(tree, file="x.py"):
    return [name for name, _ in calls(tree) if name in MAKES_CODE and file not in MAKES_CODE[name]]


def readers_of_code(tree):
    return [name for name in imports(tree) if name.partition(".")[0] in READS_CODE]


def shells(tree):
    """Calls with a shell in them; a list of words needs none."""
    for name, node in calls(tree):
        values = {word.arg: word.value for word in node.keywords}
        if "shell" in values and not (isinstance(values["shell"], ast.Constant) and values["shell"].value is False):
            yield name


def talkers(tree):
    return [name for name in imports(tree) if any(f"{name}.".startswith(f"{each}.") for each in TALKS)]


def test_nothing_makes_code_of_data():
    looked_at = trees(*(f"{name}(" for name in MAKES_CODE))
    assert RUNS_THE_SCRIPT in looked_at
    assert {file: found for file, tree in looked_at.items() if (found := makers_of_code(tree, file))} == {}


def test_nothing_reads_pickles_or_archives():
    """A search tells batches apart by their bytes, pickled: it hashes them, and reads nothing."""
    looked_at = trees(*(f"{kind} {name}" for name in READS_CODE for kind in ("import", "from")))
    users = {file: found for file, tree in looked_at.items() if (found := readers_of_code(tree))}
    assert users == {"tune/search/trials.py": ["pickle"]}
    assert [name for name, _ in calls(looked_at[min(users)]) if "pickle" in name] == ["pickle.dumps"]


def test_no_shell():
    assert {file: found for file, tree in trees("shell=").items() if (found := list(shells(tree)))} == {}


def test_few_can_talk_to_others_and_it_is_known_why():
    assert {
        file
        for file, tree in trees(
            *(f"{kind} {name.partition('.')[0]}" for name in TALKS for kind in ("import", "from"))
        ).items()
        if talkers(tree)
    } == set(NETWORK)


@for_each(
    ("code", "found"),
    [
        ("torch.load(path)", makers_of_code),
        ("eval(text)", makers_of_code),
        ("import pickle", readers_of_code),
        ("from pickle import loads", readers_of_code),
        ("subprocess.run('ls', shell=True)", shells),
        ("subprocess.run(line, shell=yes)", shells),
        ("import http.client", talkers),
        ("from urllib import request", talkers),
    ],
)
def test_these_tests_can_fail(code, found):
    assert list(found(ast.parse(code)))
    fine = "model.eval()\nre.compile(x)\nrun([x], shell=False)\nfrom urllib.parse import quote\n'pickle.loads(x)'"
    assert not list(found(ast.parse(fine)))


def test_servers_are_on_loopback():
    assert server.HOST == "127.0.0.1"
    text = (SOURCE / "report" / "live" / "server.py").read_text()
    assert not re.search(r"0\.0\.0\.0|INADDR_ANY|[\"']::[\"']|gethostname", text)


def test_templates_escape():
    """All pages come from one environment, which escapes; what is markup already is made in two files."""
    environments = [
        (file, {word.arg: ast.unparse(word.value) for word in node.keywords})
        for file, tree in trees("Environment(").items()
        for name, node in calls(tree)
        if name.rpartition(".")[2] == "Environment"
    ]
    assert [(file, words["autoescape"]) for file, words in environments] == [("report/page/templates.py", "True")]
    trusting = {file for file, tree in trees("Markup(").items() if any(name == "Markup" for name, _ in calls(tree))}
    assert trusting == TRUSTED_MARKUP
    templates = {path.name: path.read_text() for path in SOURCE.rglob("*.html")}
    assert templates
    assert not [name for name, text in templates.items() if re.search(r"\|\s*safe|autoescape", text)]


def test_scripts_of_pages_take_markup_from_one_place():
    """Which comes from the server that the page itself came from, and was escaped there."""
    scripts = {path.name: path.read_text() for path in (SOURCE / "report" / "page").glob("*.js")}
    risky = re.compile(r"\.innerHTML\s*=|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function")
    assert {name: len(risky.findall(text)) for name, text in scripts.items() if risky.search(text)} == {"page.js": 1}


def test_a_check_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trap = "open('was_run', 'w')\n"
    (tmp_path / "train.py").write_text(f"import helper, torch\n{trap}scaler = torch.cuda.amp.GradScaler()\n")
    for name in ("helper.py", "conftest.py", "sitecustomize.py", "torch.py"):
        (tmp_path / name).write_text(trap)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check", "--isolated", "--fix", "."]) == 0
    assert "torch.amp.GradScaler" in (tmp_path / "train.py").read_text()
    assert not (tmp_path / "was_run").exists()


# --- the policy


def promised():
    """The tests that docs/security.md names."""
    return sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", POLICY.read_text())))


def test_each_promise_has_the_test_it_names():
    assert len(promised()) > 40
    for file, name in promised():
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_each_line_of_promises_names_a_test():
    table = re.findall(
        r"^\| (?!promise|---)(.+) \|$", POLICY.read_text().partition("## What is promised")[2], re.MULTILINE
    )
    assert len(table) > 10
    assert [line for line in table if "tests/" not in line] == []


def test_no_address_is_invented():
    text = (ROOT / "SECURITY.md").read_text() + POLICY.read_text()
    assert "private vulnerability reporting" in " ".join(text.split())
    assert not re.search(r"\S+@\S+\.\w+|https?://", text)


def test_what_executes_your_code_is_said():
    """Commands that take a script or a function."""
    section = POLICY.read_text().partition("## What runs your code")[2].partition("\n## ")[0]
    takes = re.compile(r"add_make\(parser[,)]|metavar=\"SCRIPT\"")
    commands = {file[4:-3] for file, text in texts().items() if file.startswith("cli/") and takes.search(text)}
    assert commands >= {"run", "bench", "replay"}
    assert [command for command in sorted(commands) if f"`ampwise {command}`" not in section] == []
