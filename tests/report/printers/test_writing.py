"""Nothing is written to people but through ampwise.finding.terminal, which cleans it: the whole source, read here."""

import ast
import re
from pathlib import Path

import ampwise

from ...for_each import for_each

SOURCE = Path(ampwise.__file__).parent
TERMINAL = "finding/terminal.py"

# What writes by itself, and the files that may call it.
WRITES = {
    "print": {},
    "pprint": {},
    "pprint.pprint": {},
    "rich.print": {},
    "input": {"cli/advise.py": "our own questions"},
    "os.write": {"watch/profiler.py": "what others wrote to stderr meanwhile, as they did"},
    "traceback.print_exception": {"watch/script.py": "an exception of the script's, as Python prints it"},
    "traceback.print_exc": {},
    "traceback.print_stack": {},
    "warnings.showwarning": {},
    "warnings.warn_explicit": {},
    "sys.displayhook": {},
    "sys.excepthook": {"watch/script.py": "an exception of the script's, as Python prints it"},
    "logging.basicConfig": {},
    "faulthandler.dump_traceback": {"guard/stopping.py": "it escapes all but ASCII by itself"},
    "Console": {},
}
STREAMS = {"stream", "out", "err", "stdout", "stderr", "__stdout__", "__stderr__"}  # whatever is called so
RAW = {"write", "writelines", "buffer"}
# The last parts of all names that are looked at: most files have none, most calls are of others.
CALLED = {name.rpartition(".")[2] for name in WRITES} | {"say", "say_if_open", "write", "warn", "exit", "SystemExit"}
A_NAME = re.compile(rf"\b({'|'.join(CALLED | RAW)})\b")
PASS_ON = {
    "trace/python_state.py": "what other threads write while a step is run again, as they wrote it",
    "watch/script.py": "what a script gave to sys.exit(), as Python prints it",
}
TEMPLATES = {"watch/watched_run.py": "passes on a template, which is looked at where it is given"}
PLAIN_WARNINGS = {
    "train/scaler/grad_scaler.py": "a number",
}


def offences(file, source):
    """Each place that writes past ``terminal``, or gives it a text with foreign parts in the place of a template."""
    if file == TERMINAL or not A_NAME.search(source):
        return
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in RAW and _last_name(node.value) in STREAMS:
            if file not in PASS_ON:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and _last_name(node.func) in CALLED:
            name = ast.unparse(node.func)
            first = node.args[0] if node.args else ast.Constant(None)
            if (name in WRITES and file not in WRITES[name]) or _is_wrong(name, first, file, tree):
                yield node.lineno, ast.unparse(node)


def _is_wrong(name, first, file, tree):
    """Whether the first argument of one of these may hold foreign text that nobody has cleaned."""
    if name == "say_if_open":
        return not isinstance(first, ast.Constant)
    if name in {"say", "terminal.say"} and file not in TEMPLATES:
        return not isinstance(first, ast.Constant) and (name != "say" or "say" in _of_terminal(tree))
    if name in {"write", "terminal.write"}:
        return isinstance(first, ast.JoinedStr)  # what is filled in is for `say`
    if name == "warnings.warn":
        return file not in PLAIN_WARNINGS and _is_text(first) and not _is_printable(first)
    return name in {"exit", "sys.exit", "SystemExit"} and _is_text(first)  # which Python prints


def _of_terminal(tree):
    """The names that a file has from there; a parameter may have the same."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module)
    return {alias.name for node in found if node.module.endswith("finding.terminal") for alias in node.names}


def _last_name(node):
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_text(node):
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(node))


def _is_printable(node):
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Call) and _last_name(node.func) == "printable")


def test_all_that_is_written_is_cleaned():
    files = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    assert TERMINAL in files
    found = {file: list(offences(file, path.read_text("utf-8"))) for file, path in files.items()}
    assert {file: each for file, each in found.items() if each} == {}


def test_nothing_is_allowed_that_is_not_needed():
    """An exception that nobody uses any more would let the next fault through."""
    for name, files in {**WRITES, "warnings.warn": PLAIN_WARNINGS}.items():
        for file in files:
            assert f"{name}(" in (SOURCE / file).read_text("utf-8"), (file, name)
    for file in PASS_ON:
        assert re.search(r"(stream|stderr)\.write\(", (SOURCE / file).read_text("utf-8")), file


@for_each(
    "code",
    [
        "print('x')",
        "sys.stdout.write(x)",
        "sys.stderr.buffer.write(x)",
        "out = sys.stdout.write",
        "self._out.stderr.writelines(x)",
        "stream.write(x)",
        "from ampwise.finding.terminal import say\nsay(f'ampwise: {name}')",
        "terminal.say(text)",
        "write(f'{name}\\n', sys.stdout)",
        "warnings.warn(f'{name} is odd', stacklevel=2)",
        "raise SystemExit(f'no {name}')",
        "sys.exit('no ' + name)",
        "Console(file=sys.stderr)",
    ],
)
def test_the_test_can_fail(code):
    assert list(offences("x.py", code))


def test_the_test_lets_through_what_is_cleaned():
    fine = """
say("ampwise: {}", name)
write(render(findings), sys.stdout)
warnings.warn("odd", stacklevel=2)
raise SystemExit(128 + number)
warnings.warn(printable(f"{name} is odd"), stacklevel=2)
file.write(data)
sys.stdout.flush()
sys.exit(2)
console(sys.stderr).print(text)
self._say(text)
"""
    assert not list(offences("x.py", fine))
