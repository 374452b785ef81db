"""``ampwise check``: what it prints where, what it writes, and its exit codes."""

import ast
import gc
import io
import json
import signal
import subprocess
import sys
import types

import pytest

from ampwise.cli import main
from ampwise.finding import Rule, Severity

BAD = "x = 1\nbad(x)  # é\n"
MENDED = "x = 1\ngood(x)  # é\n"


def plant(code, name, called, good=None, safe=True):
    module = types.ModuleType(name)
    module.RULE = Rule(
        code=code,
        name=name,
        severity=Severity.ERROR,
        summary="s",
        why="w",
        fix="Do not.",
        bad="b",
        good="g",
        fixable="always" if good else "",
    )

    def check(evidence):
        script = evidence.script
        for node in ast.walk(script.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == called:
                if called == "crash":
                    raise RuntimeError("planted")
                edits = (script.replace(node.func, good),) if good else ()
                yield module.RULE.at(script.place(node), f"call of {called}", edits=edits, safe=safe)

    module.check_source = check
    return module


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Run ``ampwise check`` with planted rules in a folder of its own; exit code, stdout, stderr."""
    modules = [
        plant("AMP101", "call-bad", "bad", "good"),
        plant("AMP102", "call-risky", "risky", "careful", safe=False),
        plant("AMP201", "call-plain", "plain"),
        plant("AMP301", "call-crash", "crash"),
    ]
    monkeypatch.setattr("ampwise.finding.registry.source_rules", lambda: tuple(modules))
    monkeypatch.setattr("ampwise.finding.registry.all_rules", list)
    monkeypatch.chdir(tmp_path)
    for variable in ("AMPWISE_OUTPUT_FORMAT", "GITHUB_ACTIONS", "AMPWISE_DEBUG", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)

    def run(*words, stdin=None):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(["check", *words])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


@pytest.fixture
def write(tmp_path):
    def write(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path

    return write


def test_the_collector_rests_only_during_a_check(check, write, monkeypatch):
    at_work = []

    def reports(task):
        at_work.append(gc.isenabled())
        return []

    monkeypatch.setattr("ampwise.check.linter._reports", reports)
    write(a="x = 1\n")
    for before in (gc.enable, gc.disable):
        before()
        try:
            enabled = gc.isenabled()
            check("a.py")
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
    assert at_work == [False, False]


def test_clean(check, write):
    write(a="x = 1\n")
    assert check() == (0, "All checks passed: 1 file, none with mixed precision.\n", "")
    write(a="x = 1\n", b="y = 2\n", c="import torch\nwith torch.autocast('cuda'):\n    pass\n")
    assert check() == (0, "All checks passed: 3 files, 1 with mixed precision.\n", "")


def test_findings_are_reported_and_exit_with_1(check, write):
    write(a=BAD)
    code, out, err = check("--output-format", "concise")
    assert (code, err) == (1, "")
    assert out.splitlines()[0] == "a.py:2:1: AMP101 [*] [error] call-bad: call of bad"
    assert "[*] 1 fixable with `ampwise check --fix a.py`." in out
    code, out, _ = check("a.py")
    assert "2 | bad(x)  # é" in out
    assert check("--exit-zero")[0] == 0


def test_json_has_ruffs_fields(check, write):
    write(a=BAD)
    code, out, _ = check("--json")
    (entry,) = json.loads(out)
    assert code == 1
    assert (entry["code"], entry["name"], entry["filename"]) == ("AMP101", "call-bad", "a.py")
    assert entry["location"] == {"row": 2, "column": 1}
    assert check("--json", "--ignore", "ALL")[:2] == (0, "[]\n")


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        (["--select", "AMP2"], ["AMP201"]),
        (["--select", "AMP2,call-bad"], ["AMP101", "AMP201"]),
        (["--select", "AMP2", "--select", "AMP101"], ["AMP101", "AMP201"]),
        (["--ignore", "AMP1"], ["AMP201"]),
        (["--select", "AMP2", "--extend-select", "AMP102"], ["AMP102", "AMP201"]),
    ],
)
def test_selection(check, write, words, codes):
    write(a="bad(); risky(); plain()")
    _, out, _ = check("--json", *words)
    assert [entry["code"] for entry in json.loads(out)] == codes


def test_unreadable_files_are_named_and_the_rest_goes_on(check, write):
    write(a=BAD, b="def (", c=b"\xff")
    code, out, err = check("--output-format=concise", ".", "gone.py")
    assert code == 2
    assert "a.py:2:1: AMP101" in out
    assert err.splitlines() == [
        "ampwise: b.py: cannot check: syntax error at line 1: invalid syntax",
        "ampwise: c.py: cannot check: not UTF-8 (byte 0xff at line 1); save it as UTF-8, or declare its encoding "
        "in the first line (PEP 263)",
        "ampwise: gone.py: cannot check: no such file or folder",
    ]
    assert out.splitlines()[-1] == "3 paths could not be checked."


def test_a_file_that_could_not_be_checked_is_an_error_for_programs(check, write):
    """Whatever the other files have: a job must not pass on a file that nobody read."""
    write(a="x = 1\n", b="x = 1\ndef (")
    said = "cannot check: syntax error at line 2: invalid syntax"
    code, out, _ = check("--json")
    [item] = json.loads(out)
    assert (code, item["filename"], item["location"]["row"], item["message"]) == (2, "b.py", 2, said)
    assert check("--output-format=github")[:2] == (2, f"::error title=not-checked,file=b.py,line=2::{said}\n")
    [issue] = json.loads(check("--output-format=gitlab")[1])
    assert (issue["description"], issue["location"]["lines"]["begin"]) == (said, 2)
    [result] = json.loads(check("--output-format=sarif")[1])["runs"][0]["results"]
    assert (result["level"], result["message"]["text"]) == ("error", said)
    for words in (["--exit-zero"], ["--diff"], ["--fix"], ["--add-noqa"]):
        assert check(*words)[0] == 2


NOTEBOOK = json.dumps({"nbformat": 4, "cells": [{"cell_type": "code", "source": text} for text in ("x = 1", "def (")]})


@pytest.mark.parametrize(
    ("name", "text", "missed"),
    [
        ("b.py", "def (", "1 path could not be checked"),
        ("n.ipynb", NOTEBOOK, "1 file was checked only in part"),
        ("c.py", "crash()", "1 file was checked only in part"),
    ],
)
def test_what_was_not_checked_has_not_passed(check, write, name, text, missed):
    folder = write(a="x = 1\n")
    (folder / name).write_text(text)
    for words in (
        [],
        ["--output-format=concise"],
        ["--statistics"],
        ["--fix"],
        ["--statistics", "--output-format=github"],
    ):
        code, out, _ = check(*words)
        assert (code, out) == (0 if missed.endswith("in part") else 2, f"No findings, but {missed}.\n")
    severity = "note" if missed.endswith("in part") else "error"
    assert [(item["code"], item["severity"]) for item in json.loads(check("--json")[1])] == [(None, severity)]
    assert check("--diff")[2].splitlines()[-1] == f"ampwise: nothing to fix, but {missed}"
    write(a=BAD)
    assert check()[1].splitlines()[-1] == f"{missed}."
    assert check("--fix")[1] == f"Found 1 finding (1 fixed, 0 remaining).\n{missed}.\n"


def test_statistics_of_nothing_do_not_say_that_all_passed(check, write):
    write(b="def (", a=BAD)
    assert check("--statistics", "b.py")[:2] == (2, "")
    assert check("--statistics", "--fix", "a.py")[:2] == (0, "Found 1 finding (1 fixed, 0 remaining).\n")


def test_exit_2_when_nothing_could_be_read(check, write):
    folder = write(b="def (")
    assert check()[0] == 2
    assert check()[1] == "", "not that all checks passed"
    assert check("--exit-zero")[0] == 2
    (folder / "docs").mkdir()
    assert check("docs") == (2, "", "ampwise: docs: no Python file or notebook in this folder\n")


def test_names_cannot_write_to_the_terminal(check, tmp_path):
    (tmp_path / "\x1b[2J.py").write_text("def (")
    assert "\x1b" not in check()[2]


def test_fix_writes_and_counts(check, write):
    folder = write(a=BAD + "plain()\nrisky()\n", b="bad()")
    code, out, _ = check("--fix", "--output-format", "concise")
    assert code == 1
    assert out.splitlines()[-1] == "Of 4 findings, 2 were fixed and 2 remain."
    assert out.count("Found") == 1, "one number after that word, or one wonders which it is"
    assert (folder / "a.py").read_text() == MENDED + "plain()\nrisky()\n"
    assert (folder / "b.py").read_text() == "good()"
    code, out, _ = check("--fix", "--unsafe-fixes", "--ignore", "AMP201")
    assert (code, out) == (0, "Found 1 finding (1 fixed, 0 remaining).\n")
    assert check("--fix", "--ignore", "AMP201")[:2] == (0, "All checks passed: 2 files, none with mixed precision.\n")


def test_fix_with_json_prints_json_alone(check, write):
    write(a=BAD)
    assert check("--fix", "--json")[:2] == (0, "[]\n")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full or a read-only folder")
def test_a_file_that_cannot_be_written_is_named(check, write, monkeypatch):
    folder = write(a=BAD)

    def fail(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.replace", fail)
    code, out, err = check("--fix")
    assert (code, err) == (1, "ampwise: a.py: cannot be written: permission denied\n")
    assert "fixed" not in out
    assert (folder / "a.py").read_text() == BAD


def test_diff_shows_and_writes_nothing(check, write):
    folder = write(a=BAD, b="risky()\n")
    code, out, err = check("--diff")
    assert (code, err) == (1, "ampwise: would fix 1 finding\n")
    assert "-bad(x)  # é\n+good(x)  # é\n" in out
    assert "risky" not in out
    assert "+careful()" in check("--diff", "--unsafe-fixes")[1]
    assert (folder / "a.py").read_text() == BAD
    assert check("--diff", "--select", "AMP201") == (0, "", "ampwise: nothing to fix\n")
    assert check("--diff", "--exit-zero")[0] == 0


def test_statistics(check, write):
    write(a="plain(); plain(); bad()")
    code, out, _ = check("--statistics")
    assert code == 1
    assert [line.split() for line in out.splitlines()[:2]] == [
        ["2", "AMP201", "[", "]", "call-plain"],
        ["1", "AMP101", "[*]", "call-bad"],
    ]
    told = json.loads(check("--statistics", "--json")[1])
    assert [(row["code"], row["count"], row["fixable"]) for row in told] == [("AMP201", 2, False), ("AMP101", 1, True)]
    assert check("--statistics", "--output-format", "sarif")[0] == 2


def test_add_noqa(check, write):
    folder = write(a=BAD, b="x = [\n  plain(),\n]\n")
    code, out, _ = check("--add-noqa")
    assert (code, out) == (0, "Suppressed 2 findings with comments.\n")
    assert (folder / "a.py").read_text() == "x = 1\nbad(x)  # é  # noqa: AMP101\n"
    assert (folder / "b.py").read_text() == "x = [\n  plain(),\n]  # noqa: AMP201\n"
    assert check()[0] == 0


def test_add_noqa_that_could_not_be_written_is_no_success(check, write, monkeypatch):
    write(a=BAD)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    code, out, err = check("--add-noqa")
    assert (code, out) == (1, "Suppressed 0 findings with comments.\n")
    assert err == "ampwise: a.py: cannot be written: permission denied\n"


# Excluded, whoever names it


def test_force_exclude_is_for_tools_that_name_every_file(check, write, monkeypatch):
    folder = write(a=BAD)
    (folder / "gen").mkdir()
    (folder / "gen" / "b.py").write_text(BAD)
    (folder / "ampwise.toml").write_text('extend-exclude = ["gen"]\noutput-format = "concise"\n')
    assert check("gen/b.py")[0] == 1
    assert check("--force-exclude", "gen/b.py") == (0, "", "")
    code, out, _ = check("--force-exclude", "a.py", "gen/b.py")
    assert (code, out.splitlines()[1]) == (1, "Found 1 finding (1 error).")
    assert check("--force-exclude", "gone.py")[0] == 2
    assert check("--force-exclude", "--stdin-filename", "gen/b.py", "-", stdin=b"bad()") == (0, "", "")
    assert check("--force-exclude", "--stdin-filename", "a.py", "-", stdin=b"bad()")[0] == 1
    written = []
    monkeypatch.setattr("ampwise.cli.check.write_exact", lambda data, *_: written.append(data))
    assert check("--force-exclude", "--fix", "--stdin-filename", "gen/b.py", "-", stdin=b"bad()") == (0, "", "")
    assert written == [b"bad()"]


# stdin


def test_stdin(check, write):
    write()
    code, out, _ = check("-", "--output-format", "concise", stdin=BAD.encode())
    assert (code, out.splitlines()[0]) == (1, "-:2:1: AMP101 [*] [error] call-bad: call of bad")
    code, out, _ = check("-", "--stdin-filename", "sub/t.py", stdin=BAD.encode())
    assert "sub/t.py:2:1" in out
    assert "2 | bad(x)" in out, "the excerpt is of what came in, not of a file"
    assert check("-", stdin=b"x")[0] == 0


def test_stdin_under_the_settings_of_the_name(check, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "ampwise.toml").write_text('ignore = ["AMP101"]')
    assert check("-", "--stdin-filename", "sub/t.py", stdin=b"bad()")[0] == 0
    assert check("-", "--stdin-filename", "t.py", stdin=b"bad()")[0] == 1


@pytest.mark.parametrize(
    "data",
    [BAD.encode(), b"\xef\xbb\xbfbad()\r\n", b"# coding: latin-1\nbad('\xe9')", b"x = 1\n"],
)
def test_stdin_fixed_goes_to_stdout(check, write, monkeypatch, data):
    written = []
    monkeypatch.setattr("ampwise.cli.check.write_exact", lambda data, *_: written.append(data))
    code, out, _ = check("-", "--fix", stdin=data)
    assert (code, out) == (0, "")
    assert written == [data.replace(b"bad", b"good")]


def test_stdin_that_cannot_be_read_is_not_lost(check, write, monkeypatch):
    written = []
    monkeypatch.setattr("ampwise.cli.check.write_exact", lambda data, *_: written.append(data))
    for data in (b"\xff", b"def ("):
        code, _, err = check("-", "--fix", stdin=data)
        assert (code, written.pop()) == (2, data)
        assert err.startswith("ampwise: -: cannot check: ")


def test_stdin_diff(check, write):
    code, out, _ = check("-", "--diff", "--stdin-filename", "t.py", stdin=b"bad()\n")
    assert code == 1
    assert "-bad()\n+good()\n" in out


def test_a_notebook_on_stdin(check, write):
    text = json.dumps({"nbformat": 4, "cells": [{"cell_type": "code", "source": "bad()"}]})
    _, out, _ = check("-", "--stdin-filename", "n.ipynb", "--output-format=concise", stdin=text.encode())
    assert out.startswith("n.ipynb:cell 1:1:1: AMP101")


# Settings


def test_settings_decide_what_the_command_line_leaves_open(check, write):
    folder = write(a=BAD)
    (folder / "ampwise.toml").write_text('output-format = "concise"\n')
    assert check()[1].startswith("a.py:2:1: AMP101")
    assert json.loads(check("--json")[1])
    assert check("--isolated")[1].startswith("error[AMP101]")
    (folder / "other.toml").write_text('ignore = ["ALL"]')
    write(a=BAD)
    assert check("--config", "other.toml")[0] == 0


def test_an_unknown_output_format_in_the_settings_is_refused(check, write):
    folder = write(a=BAD)
    (folder / "ampwise.toml").write_text("output-format = 'jsn'\n")
    code, out, err = check()
    assert (code, out) == (2, "")
    assert "ampwise.toml 'jsn'. Did you mean json?" in err
    assert check("--output-format", "concise")[0] == 1


@pytest.mark.parametrize("key", ["fix", "unsafe-fixes"])
def test_settings_cannot_make_it_write(check, write, key):
    """The project may be a stranger's, and a file in it a link to one of the user's."""
    folder = write(a=BAD)
    (folder / "pyproject.toml").write_text(f"[tool.ampwise]\n{key} = true\n")
    told = (
        f"ampwise: error: ./pyproject.toml: {key} is not a setting; use it on the command line: ampwise check --{key}\n"
    )
    for words in ([], ["--fix"], ["--add-noqa"]):
        code, out, err = check(*words)
        assert (code, out, err.replace(str(folder), ".")) == (2, "", told)
    assert (folder / "a.py").read_text() == BAD
    assert check("--fix", "--isolated")[0] == 0


@pytest.mark.parametrize("words", [["--fix"], ["--fix", "--unsafe-fixes"], ["--add-noqa"]])
def test_nothing_is_written_outside_of_where_one_stands(check, write, tmp_path_factory, words):
    folder, outside = write(a="x = 1\n"), tmp_path_factory.mktemp("elsewhere")
    (outside / "b.py").write_text(BAD)
    (folder / "link.py").symlink_to(outside / "b.py")
    (folder / "sub").symlink_to(outside)
    code, _, err = check(*words)
    assert (code, err) == (
        0,
        "ampwise: 2 symlinks lead out of the checked folder and were not followed: link.py, sub\n",
    )
    for named in ("link.py", "sub", "sub/b.py"):
        code, _, err = check(*words, named)
        path = "sub/b.py" if named == "sub" else named
        assert code == 1, "checked, as it was named"
        assert err == (
            f"ampwise: {path}: not written: it is a symlink out of {folder}; name the real file: {outside / 'b.py'}\n"
        )
    assert (outside / "b.py").read_text() == BAD
    assert sorted(path.name for path in outside.iterdir()) == ["b.py"]


def test_a_link_within_the_folder_is_fixed_once_and_stays(check, write):
    folder = write(real=BAD)
    (folder / "link.py").symlink_to("real.py")
    assert check("--fix")[:2] == (0, "Found 1 finding (1 fixed, 0 remaining).\n")
    assert (folder / "real.py").read_text() == MENDED
    write(real=BAD)
    assert check("--fix", "link.py")[:2] == (0, "Found 1 finding (1 fixed, 0 remaining).\n")
    assert (folder / "real.py").read_text() == MENDED
    assert (folder / "link.py").is_symlink()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--select", "AMP9"], "unknown rule selector 'AMP9'. Did you mean"),
        (["--ignore", "call-bed"], "unknown rule selector 'call-bed'. Did you mean call-bad"),
        (["--select", ""], "check --select: no rule was given"),
        (["--select", " ,"], "check --select: no rule was given"),
        (["-", "a.py"], "check -: cannot combine stdin with other paths"),
        (["-", "--add-noqa"], "check --add-noqa -: --add-noqa writes files and cannot be used with stdin"),
        (["--add-noqa", "--fix"], "check --add-noqa: cannot be combined with --fix or --diff"),
        (["--config", "gone.toml"], "check --config gone.toml: no such file"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(check, write, words, message):
    write(a=BAD)
    code, out, err = check(*words)
    assert (code, out) == (2, "")
    assert err.startswith(f"ampwise: error: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("jobs", ["0", "-1", "x"])
def test_jobs_is_a_number(check, capsys, jobs):
    with pytest.raises(SystemExit):
        check("--jobs", jobs)
    assert f"expected a whole number of 1 or more, got {jobs!r}" in capsys.readouterr().err


def test_the_help_names_every_key_of_the_settings(check, capsys):
    from ampwise.check.config import KEYS

    with pytest.raises(SystemExit):
        check("--help")
    described = capsys.readouterr().out
    assert [key for key in KEYS if key not in described] == []


SLOW = ("tomllib", "json", "multiprocessing", "concurrent.futures", "rich", "logging", "torch")


def test_what_is_slow_to_import_is_not_imported_for_a_clean_file(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    code = (
        "import sys, ampwise.check.linter as c\n"
        "c.source_rules = list\n"
        "from ampwise.cli import main\n"
        "code = main(['check', 'a.py'])\n"
        f"print(code, [name for name in {SLOW!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


# Which files


def test_exclude_adds_to_the_settings(check, tmp_path):
    for name in ("train.py", "tests/a.py", "old/b.py", "deep/old/c.py", "deep/d_old.py", "third/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(BAD)
    (tmp_path / "ampwise.toml").write_text('extend-exclude = ["third"]\n')
    words = ("--exclude", "old,*_old.py", "--exclude", "tests/*", "--show-files")
    assert check(*words) == (0, "train.py\n", "")
    assert check("--show-files", "old/b.py", "--exclude", "old") == (0, "old/b.py\n", "")  # by name, it is checked
    assert check("--show-files", "old/b.py", "--exclude", "old", "--force-exclude") == (0, "", "")
    code, out, _ = check("--exclude", "old,deep,tests", "--output-format", "concise")
    assert (code, out.count("AMP101")) == (1, 1)


def test_show_files_checks_nothing(check, tmp_path):
    (tmp_path / "b.ipynb").write_text("not even JSON")
    (tmp_path / "a\x1b[2J.py").write_text("def (")
    assert check("--show-files") == (0, "a\\x1b[2J.py\nb.ipynb\n", "")
    assert check("--show-files", "gone.py")[0] == 2


def test_watch_checks_again_when_a_file_changes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\nscaler = torch.cuda.amp.GradScaler()\n")
    command = [sys.executable, "-m", "ampwise", "check", "--watch", "--isolated", "--output-format", "concise"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children ignore Ctrl-C
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    )
    signal.signal(signal.SIGINT, before)

    def until(text):
        lines = []
        while not lines or text not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        return "".join(lines)

    assert "train.py:2:10: AMP310" in until("watching 1 file; Ctrl-C ends")
    script.write_text("import torch\n")
    assert "All checks passed: 1 file, none with mixed precision." in (said := until("watching 1 file"))
    assert said.startswith("ampwise: train.py changed at ")
    (tmp_path / "new.py").write_text("import torch\nscaler = torch.cuda.amp.GradScaler()\n")
    assert "new.py:2:10: AMP310" in until("watching 2 files")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0].strip() == ""
    assert process.returncode == 0
