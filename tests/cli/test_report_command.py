"""`ampwise report`: a record that was really written, read back in three forms."""

import json
import os
import subprocess
import sys
import webbrowser

import pytest

from ampwise import __version__
from ampwise.cli import main
from ampwise.finding import Place
from ampwise.finding.registry import find_rule
from ampwise.numbers.census.algebra import Census
from ampwise.report.page import GENERATOR_MARK
from ampwise.runs.rows import CountedFinding, LayerSample, StepRow
from ampwise.runs.writer import RecordWriter


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "100")


def begin_record(folder):
    writer = RecordWriter.create(folder, command=["train.py"], script="train.py", environment={"torch": "2.13.0"})
    for step in range(1, 11):
        writer.step(StepRow(step=step, loss=1 / step, scale=65536.0, norm=0.5, skipped=step == 4))
    weights = Census(binades={-20: 3}, amax=2**-19.5, amin=2**-19.5)
    writer.layers(LayerSample(first=1, last=1, scale=65536.0, layers={"head.weight": weights}))
    finding = find_rule("AMP101").at(Place(file="train.py", line=2), "clipped while scaled by 65536")
    excerpt = {"first_line": 1, "lines": ["backward()", "clip()"]}
    writer.findings([CountedFinding(finding=finding, count=10, first_step=1, last_step=10, excerpt=excerpt)])
    writer.fact("precision", "fp16")
    writer.flush()
    return writer


@pytest.fixture
def record(tmp_path):
    begin_record(tmp_path / "run").close("finished", 0)
    return tmp_path / "run"


def test_the_summary(record, capsys):
    assert main(["report", str(record)]) == 0  # with an error in it: the report was made
    text = capsys.readouterr().out
    assert text.startswith("1 error in 10 steps of train.py (fp16, scaler).\n")
    assert "  2 | clip()\n" in text
    assert "10 times, steps 1 to 10" in text
    assert "\x1b" not in text
    assert "Layers" not in text
    assert f"ampwise report {record} -o page.html" in text


def test_json(record, capsys):
    assert main(["report", str(record), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["version"], data["status"], data["exit_code"]) == (1, "finished", 0)
    assert [one["code"] for one in data["findings"]] == ["AMP101"]
    assert sum(row["skipped"] for row in data["metrics"]["steps"]) == 1
    assert data["metrics"]["layers"][0]["name"] == "head.weight"
    assert data["environment"] == {"torch": "2.13.0", "ampwise": __version__}


def test_the_page_is_written_and_written_again(record, tmp_path, capsys):
    paper = tmp_path / "page.html"
    for _ in range(2):  # an earlier report gives way to the next
        assert main(["report", str(record), "-o", str(paper)]) == 0
    assert GENERATOR_MARK in paper.read_text()
    assert capsys.readouterr().out.splitlines()[1] == f"Wrote {paper}"


def test_json_and_page_together(record, tmp_path, capsys):
    assert main(["report", str(record), "--json", "-o", str(tmp_path / "p.html")]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 1
    assert (tmp_path / "p.html").exists()


def test_a_file_of_somebody_else_is_kept(record, tmp_path, capsys):
    paper = tmp_path / "thesis.html"
    paper.write_text("<p>Years of work</p>")
    assert main(["report", str(record), "-o", str(paper)]) == 2
    assert capsys.readouterr().err == (
        f"ampwise: error: -o {paper}: exists and is not an ampwise page. Use -f to overwrite it, or give another.\n"
    )
    assert paper.read_text() == "<p>Years of work</p>"
    assert main(["report", str(record), "-o", str(paper), "-f"]) == 0
    assert GENERATOR_MARK in paper.read_text()


def test_a_run_that_is_still_going(tmp_path, capsys):
    writer = begin_record(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "The run is still going; this is what it has recorded so far.\n" in capsys.readouterr().out
    writer.close("failed", 1, ValueError("no data"))
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "The script failed with ValueError: no data (exit code 1).\n" in capsys.readouterr().out


def test_a_record_cut_short_is_still_reported(record, capsys):
    steps = record / "steps.jsonl"
    steps.write_bytes(b"nonsense\n" + steps.read_bytes()[:-5])
    (record / "findings.json").unlink()
    assert main(["report", str(record)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("The findings of 9 steps of train.py (fp16, scaler) could not be read.")
    assert "Problems with this record" in text
    assert "findings.json is missing." in text


@pytest.mark.parametrize("name", ["nowhere", "empty", "a_file"])
def test_what_is_no_record(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a_file").write_text("text")
    assert main(["report", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ampwise: error: {tmp_path / name} ")
    assert error.count("\n") == 1
    assert ("`ampwise run -o " in error) is (name != "a_file")  # the way out, where it is one


def test_an_empty_name_is_refused(capsys, tmp_path, monkeypatch):
    begin_record(tmp_path / "run").close("finished", 0)
    monkeypatch.chdir(tmp_path / "run")  # where "" would be a record
    for words in ([""], [".", ""], ["", "."]):
        assert main(["report", *words]) == 2
        assert capsys.readouterr().err == (
            "ampwise: error: report: the name of the record is empty. Name its folder; `.` is the current one.\n"
        )


def test_a_link_to_itself(tmp_path, capsys):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert main(["report", str(tmp_path / "loop")]) == 2
    assert capsys.readouterr().err == f"ampwise: error: {tmp_path / 'loop'} is a broken link.\n"


def test_an_ascii_terminal_gets_arrows_and_no_escapes(record, tmp_path):
    begin_record(tmp_path / "later").close("finished", 1)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    shown = []
    for words in ([record], [record, tmp_path / "later"]):
        command = [sys.executable, "-m", "ampwise", "report", *map(str, words)]
        shown.append(subprocess.run(command, capture_output=True, check=True, env=environment).stdout.decode("ascii"))
        assert "\\u" not in shown[-1]
        assert "\\x" not in shown[-1]
    assert "10 times, steps 1 to 10" in shown[0]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("logs/events.out.tfevents.1700000000.host.1.0", "It looks like a TensorBoard log"),
        ("wandb/debug.log", "It looks like a Weights & Biases log"),
        ("run-x/run-x.wandb", "It looks like a Weights & Biases log"),
        ("mlruns/0/meta.yaml", "It looks like an MLflow log"),
        ("model/model.safetensors", "It looks like a checkpoint"),
        ("new/manifest.json.new", "A run is about to write a record here: try again in a moment."),
    ],
)
def test_what_another_tool_has_left(tmp_path, capsys, path, told):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("text")
    folder = tmp_path / path.partition("/")[0]
    assert main(["report", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ampwise: error: {folder} is not a record")
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("run.zip", "It looks like an archive; unpack it, and name the folder."),
        ("last.ckpt", "It looks like a checkpoint, which is not a record of the run."),
        ("events.out.tfevents.17.host", "It looks like a TensorBoard log"),
    ],
)
def test_a_file_of_another_kind(tmp_path, capsys, name, told):
    (tmp_path / name).write_bytes(b"PK")
    assert main(["report", str(tmp_path / name)]) == 2
    assert told in capsys.readouterr().err


def test_a_file_of_a_record_leads_to_its_folder(record, capsys):
    assert main(["report", str(record / "steps.jsonl")]) == 2
    assert f"The record is its folder, {record}.\n" in capsys.readouterr().err


@pytest.fixture
def three_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for day, name in [(1, "old"), (3, "new"), (2, "middle")]:
        folder = tmp_path / "ampwise-runs" / name
        if name == "middle":
            RecordWriter.create(folder, command=[], script="evil\x1b[2J.py", environment={}).close("failed", 1)
        else:
            begin_record(folder).close("finished", 0)
        manifest = json.loads((folder / "manifest.json").read_text())
        created = {"created": f"2026-01-0{day}T00:00:00+00:00"}  # and not what a copy does to the times of files
        (folder / "manifest.json").write_text(json.dumps(manifest | created))


def test_without_an_argument_it_is_the_newest_run(three_runs, capsys):
    assert main(["report", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["created"].startswith("2026-01-03")
    assert said.err == "ampwise: ampwise-runs/new is the newest run\n"


def test_a_folder_of_runs_is_listed_newest_first(three_runs, capsys):
    assert main(["report", "ampwise-runs"]) == 0
    heading, *lines, hint = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["run", "started"]
    assert [line.split()[0] for line in lines] == ["new", "middle", "old"]
    assert lines[0].split()[1:] == ["01-03", "00:00", "10", "finished", "AMP101", "clip-scaled-grads"]
    assert lines[1].split()[3:] == ["0", "failed", "none"]
    assert "\x1b" not in "".join(lines)
    assert hint == "`ampwise report ampwise-runs/new` shows one."
    assert main(["report", "ampwise-runs", "--json"]) == 0
    newest, _, oldest = json.loads(capsys.readouterr().out)["runs"]
    assert (newest["run"], newest["steps"], newest["worst"]) == ("ampwise-runs/new", 10, "AMP101 clip-scaled-grads")
    assert oldest["created"] == "2026-01-01T00:00:00+00:00"
    assert main(["report", "ampwise-runs", "-o", "page.html"]) == 2
    assert "it has 3 runs. Name one for a page, such as ampwise-runs/new." in capsys.readouterr().err


def test_a_list_fits_into_80_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    for name in ("vae-20261119-145103", "vae-20261119-145203"):
        begin_record(tmp_path / "ampwise-runs" / name).close("finished", 0)
    assert main(["report", "ampwise-runs"]) == 0
    _, *lines, _ = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["vae-20261119-145203", "vae-20261119-145103"]
    assert all("AMP101 clip-scaled-grads" in line for line in lines)


def test_text_is_not_written_as_a_page(record, tmp_path, capsys):
    assert main(["report", str(record), "-o", str(tmp_path / "page.txt")]) == 2
    assert "-o writes an HTML page" in capsys.readouterr().err
    assert not (tmp_path / "page.txt").exists()


def test_a_record_of_a_later_version_is_refused_and_cannot_harm_the_terminal(record, capsys):
    manifest = json.loads((record / "manifest.json").read_text())
    (record / "manifest.json").write_text(json.dumps(manifest | {"version": 99, "ampwise": "9\x1b[2J\n9"}))
    assert main(["report", str(record)]) == 2
    error = capsys.readouterr().err
    assert f"{record} is a record of version 99, written by ampwise 9\\x1b[2J\\n9;" in error
    assert "\x1b" not in error
    assert error.count("\n") == 1


def test_a_torn_manifest(record, capsys):
    (record / "manifest.json").write_text('{"format": "ampwise-r')
    assert main(["report", str(record)]) == 0  # what can be shown is shown
    text = capsys.readouterr().out
    assert text.startswith("1 error in 10 steps of an unknown script (scaler).\n")
    assert "How the run ended is unknown: its manifest could not be read.\n" in text
    assert "cannot be read: it is truncated or damaged." in " ".join(text.split())
    (record / "manifest.json").write_text('{"format": "another"}')
    assert main(["report", str(record)]) == 2
    assert "is not an ampwise record" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("html", "reason"), [(".", "is a folder. Give a file"), ("no/such/page.html", "there is no folder no/such")]
)
def test_a_page_that_cannot_be_written(record, tmp_path, capsys, monkeypatch, html, reason):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(record), "-o", html]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ampwise: error: -o {html}: {reason}")
    assert error.count("\n") == 1


def test_open_shows_the_page(record, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(webbrowser, "open", lambda address: shown.append(address) or True)
    assert main(["report", str(record), "--open"]) == 0
    assert shown == [(record / "report.html").as_uri()]
    assert main(["report", str(record)]) == 0  # the page in its folder is no trouble to the record
    assert "Trouble" not in capsys.readouterr().out


def test_open_without_a_browser(record, monkeypatch, capsys):
    monkeypatch.setattr(webbrowser, "open", lambda _: False)
    assert main(["report", str(record), "--open"]) == 2
    assert "no browser found. Open " in capsys.readouterr().err
    assert (record / "report.html").exists()


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    text = capsys.readouterr().out
    assert "ampwise report RUN -o page.html --open" in text
    assert "exit code is 0" in " ".join(text.split())
