"""`ampwise watch` in a real terminal, in a pipe, and beside a real run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ampwise.cli import main
from ampwise.report.live import poller as looking_module
from ampwise.report.live import terminal as terminal_module
from ampwise.report.live.poller import RecordPoller
from ampwise.report.live.terminal import poll
from ampwise.runs.findings_json import findings_data
from ampwise.runs.reader import RecordFollower
from ampwise.runs.writer import RecordWriter

from ...night import by_night
from .live_toys import Terminal, clipped, growing, step

SCRIPT = """
import itertools
import pathlib
import sys
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for steps in itertools.count(1):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.ones(8, 4)).float().pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if steps >= 60 and pathlib.Path(sys.argv[1]).exists():
        break
print(steps)
"""


def ampwise(*words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "ampwise", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


# --- in a terminal -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(80, 24), (20, 5), *by_night((120, 40), (40, 10))])
def test_the_picture_fits_and_changes_in_place(tmp_path, width, height):
    with (
        growing(tmp_path / "run") as writer,
        Terminal("watch", str(tmp_path / "run"), "--interval", "0.2", width=width, height=height) as terminal,
    ):
        screen = terminal.until(lambda screen: "step 120" in screen.text)
        writer.step(step(121, loss=0.123))
        writer.flush()
        screen = terminal.until(lambda screen: "step 121" in screen.text)
        assert screen.text.count("step 12") == 1
        assert screen.scrolled == 0  # however low the terminal is
        assert screen.is_second
        assert not screen.cursor_shown
        assert screen.lines[0].startswith("1 error in 12"[: width - 1])
        if height >= 10:
            assert "loss          0.123" in screen.text
            assert "scale         65536" in screen.text
            assert "norm           1.25" in screen.text
            assert "error[AMP101] train.py:31 ×120" in screen.text
        if width >= 80:
            assert "skipped    2 (1.7%)" in screen.text
            assert "head.weight" in screen.text
            assert "!" in next(line for line in screen.lines if line.startswith("loss"))  # the NaN of step 70


def test_it_ends_with_the_run_and_its_summary(tmp_path):
    with (
        growing(tmp_path / "run") as writer,
        Terminal("watch", str(tmp_path / "run"), "--interval", "0.2", height=80) as terminal,
    ):
        terminal.until(lambda screen: "running" in screen.text)
        writer.close("failed", 1, ValueError("no data"))
        assert terminal.end() == 0
        text = terminal.screen.text
        assert terminal.screen.cursor_shown
        assert not terminal.screen.is_second
        assert text.count("The script failed with ValueError: no data (exit code 1).") == 1
        assert text.index("loss  ") < text.index("The script failed")  # the curves stay, and the summary comes after
        assert text.count("error[AMP101]") == 1
        assert "help: Call `scaler.unscale_(optimizer)`" in text


def test_ctrl_c_leaves_the_watcher_and_the_screen_in_order(tmp_path):
    with (
        growing(tmp_path / "run") as writer,
        Terminal("watch", str(tmp_path / "run"), "--interval", "0.2") as terminal,
    ):
        terminal.until(lambda screen: "step 120" in screen.text)
        os.kill(terminal.process.pid, signal.SIGINT)
        assert terminal.end() == 130
        assert terminal.screen.cursor_shown
        assert not terminal.screen.is_second
        assert terminal.screen.lines == ["ampwise: interrupted", ""]  # and what was on the screen before
        writer.step(step(121))  # the run has not noticed
        writer.flush()
        assert RecordFollower(tmp_path / "run").look().steps[-1].last == 121


def test_ctrl_z_and_kill_give_the_screen_back(tmp_path):
    with (
        growing(tmp_path / "run") as writer,
        Terminal("watch", str(tmp_path / "run"), "--interval", "0.2") as terminal,
    ):
        terminal.until(lambda screen: "step 120" in screen.text)
        assert not terminal.screen.cursor_shown
        os.kill(terminal.process.pid, signal.SIGTSTP)
        terminal.until(lambda screen: not screen.is_second and screen.cursor_shown)
        assert os.WIFSTOPPED(os.waitpid(terminal.process.pid, os.WUNTRACED)[1])
        writer.step(step(121))
        writer.flush()
        os.kill(terminal.process.pid, signal.SIGCONT)
        terminal.until(lambda screen: "step 121" in screen.text)
        assert terminal.screen.is_second
        os.kill(terminal.process.pid, signal.SIGTERM)
        assert terminal.end() == 128 + signal.SIGTERM
        assert terminal.screen.cursor_shown
        assert not terminal.screen.is_second


@pytest.mark.nightly
def test_a_window_that_changes_its_size(tmp_path):
    with (
        growing(tmp_path / "run") as writer,
        Terminal("watch", str(tmp_path / "run"), "--interval", "0.1", width=100, height=40) as terminal,
    ):
        terminal.until(lambda screen: "step 120" in screen.text)
        for number, (width, height) in enumerate([(40, 10), (1, 1), (200, 60)], 121):
            terminal.resize(width, height)
            writer.step(step(number))
            writer.flush()
            if width > 1:
                screen = terminal.until(lambda screen, wanted=f"step {number}": wanted in screen.text)
                assert screen.text.count("step 12") == 1  # nothing is left of earlier pictures
                assert len(screen.lines) <= height
            terminal.see_pictures(2)  # the first may have been begun before
        writer.close("finished", 0)
        assert terminal.end() == 0


def test_trouble_has_a_line_and_names_from_a_script_do_nothing_to_the_terminal(tmp_path):
    with growing(tmp_path / "run") as writer:
        with (writer.folder / "layers.jsonl").open("ab") as file:
            file.write(b"nonsense\n")
        (writer.folder / "findings.json").unlink()
        with Terminal("watch", str(tmp_path / "run"), "--interval", "0.2", width=120) as terminal:
            screen = terminal.until(lambda screen: "step 120" in screen.text)
            assert "layers.jsonl: 1 of 2 lines cannot be read" in screen.text
            assert "(and 1 more)" in screen.text
            writer.findings([clipped("\x1b[2J\x1b]0;title\x07[bold red]gone[/]\nnext")])
            screen = terminal.until(lambda screen: "gone" in screen.text)  # a strange sequence is refused by Screen
            assert r"\x1b[2J\x1b]0;title\x07[bold red]gone[/] next" in screen.text


def test_a_record_that_cannot_be_read_for_a_while_stays_on_the_screen(tmp_path):
    with (
        growing(tmp_path / "run") as writer,
        Terminal("watch", str(tmp_path / "run"), "--interval", "0.2", width=120) as terminal,
    ):
        terminal.until(lambda screen: "step 120" in screen.text)
        writer.folder.rename(tmp_path / "elsewhere")
        screen = terminal.until(lambda screen: "has been unreadable since " in screen.text)
        assert "step 120" in screen.text  # what was seen is still there
        assert "error[AMP101]" in screen.text
        (tmp_path / "elsewhere").rename(writer.folder)
        screen = terminal.until(lambda screen: "cannot be read" not in screen.text)
        writer.step(step(121))
        writer.flush()
        terminal.until(lambda screen: "step 121" in screen.text)
        writer.close("finished", 0)
        assert terminal.end() == 0


def test_once_in_a_terminal_without_unicode(tmp_path):
    words = ("watch", str(tmp_path / "run"), "--once")
    with growing(tmp_path / "run"), Terminal(*words, PYTHONIOENCODING="ascii", LC_ALL="C") as terminal:
        assert terminal.end() == 0
        text = terminal.screen.text
        assert "step 120" in text
        assert "error[AMP101]" in text
        assert "running" in text
        assert text.isascii()
        assert "x120" in text
        assert "\\u" not in text


# --- elsewhere -----------------------------------------------------------------------------------------------------


def test_a_line_whenever_something_changed(tmp_path):
    with growing(tmp_path / "run") as writer:
        process = ampwise("watch", tmp_path / "run", "--interval", "0.1")
        first = process.stdout.readline()
        assert first == "step 120  loss 0.06667  scale 65536  norm 1.25  skipped 2  findings 1 (AMP101)\n"
        time.sleep(0.3)  # nothing new, no line
        writer.step(step(121, loss=float("inf"), norm=float("nan")))
        writer.flush()
        assert (
            process.stdout.readline() == "step 121  loss inf  scale 65536  norm NaN  skipped 2  findings 1 (AMP101)\n"
        )
        writer.close("finished", 0)
        rest, errors = process.communicate(timeout=120)
        lines = rest.splitlines()
        assert lines[0].endswith("  finished")
        assert lines[2].startswith("1 error in 121 steps of train.py (fp16, scaler)")
        assert (process.returncode, errors) == (0, "")


def test_a_reader_that_has_gone(tmp_path):
    with growing(tmp_path / "run") as writer:
        process = ampwise("watch", tmp_path / "run", "--interval", "0.1")
        process.stdout.readline()
        process.stdout.close()
        for number in range(121, 160):
            writer.step(step(number))
            writer.flush()
            if process.poll() is not None:
                break
            time.sleep(0.1)
        assert process.wait(timeout=120) == 141
        assert process.stderr.read() == ""
        process.stderr.close()


def test_a_run_that_was_killed(tmp_path, capsys):
    code = f"""
import os, signal
from ampwise.runs.writer import RecordWriter
from ampwise.runs.rows import StepRow
writer = RecordWriter.create({str(tmp_path / "run")!r}, script="train.py")
for step in range(1, 11):
    writer.step(StepRow(step=step, loss=1.0, seconds=step * 30))
writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert main(["watch", str(tmp_path / "run")]) == 0
    line, _, verdict, *_ = capsys.readouterr().out.splitlines()
    assert line == "step 10  loss 1  skipped 0  findings 0  killed"
    assert verdict.startswith("The run was killed before it could finish its record")


def test_an_end_that_is_written_between_the_look_and_the_question(tmp_path):
    """The process is gone when it is asked for, since it ended well a moment after the look."""
    with growing(tmp_path / "run") as writer:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        manifest = json.loads((writer.folder / "manifest.json").read_text())
        (writer.folder / "manifest.json").write_text(json.dumps(manifest | {"pid": gone.pid}))

        class Slow(RecordFollower):
            def look(self):
                run = super().look()
                writer.close("finished", 0)
                return run

        assert [run.status for run in poll(RecordPoller(Slow(writer.folder)), 0.1)] == ["finished"]


def test_once_in_a_pipe(tmp_path, capsys):
    with growing(tmp_path / "run"):
        assert main(["watch", str(tmp_path / "run"), "--once"]) == 0
    assert capsys.readouterr().out == "step 120  loss 0.06667  scale 65536  norm 1.25  skipped 2  findings 1 (AMP101)\n"


def test_trouble_in_a_pipe(tmp_path, capsys):
    with growing(tmp_path / "run") as writer:
        (writer.folder / "findings.json").unlink()
        assert main(["watch", str(tmp_path / "run"), "--once"]) == 0
    assert capsys.readouterr().out.endswith("  findings 0  trouble: findings.json is missing.\n")


class Clock:
    """The time for a watcher: to sleep takes none, and meanwhile happens what is planned, a thing each time."""

    def __init__(self, *planned):
        self.slept_s, self.planned = 0.0, list(planned)

    def sleep(self, seconds):
        self.slept_s += seconds
        if self.planned:
            self.planned.pop(0)()

    def monotonic(self):
        return time.monotonic() + self.slept_s

    def time(self):
        return time.time() + self.slept_s

    def __getattr__(self, name):
        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    for module in (terminal_module, looking_module):
        monkeypatch.setattr(module, "time", found)
    return found


# --- a record that is lost -----------------------------------------------------------------------------------------


def test_a_record_that_does_not_come_back_ends_the_watch(tmp_path, clock, monkeypatch, capsys):
    """What was seen is told; whether the run has ended nobody knows, and that is an error."""
    monkeypatch.setattr(terminal_module, "PATIENCE_S", 0.5)
    with growing(tmp_path / "run") as writer:
        clock.planned.append(lambda: writer.folder.rename(tmp_path / "elsewhere"))  # all of it at once
        assert main(["watch", str(tmp_path / "run"), "--interval", "0.1"]) == 2
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith("step 120 ")
    assert " trouble: The record has been unreadable since " in lines[1]
    assert lines[2] == ""  # said once, though it was looked at several times
    assert lines[3].startswith("1 error in 120 steps of train.py")
    assert re.fullmatch(
        rf"ampwise: error: {tmp_path / 'run'} has been unreadable since \d\d:\d\d:\d\d: .* does not exist\. .* "
        r"The last known state is above\.\n",
        said.err,
    )


def test_a_process_that_ends_while_its_record_cannot_be_read_has_not_been_killed(tmp_path):
    """Its end may be in the record, once that is there again."""
    with growing(tmp_path / "run") as writer:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        manifest = json.loads((writer.folder / "manifest.json").read_text())
        (writer.folder / "manifest.json").write_text(json.dumps(manifest | {"pid": process.pid}))
        seen = []
        for run in poll(RecordPoller(RecordFollower(writer.folder)), 0.1):
            seen.append((bool(run.trouble), run.status))
            if len(seen) == 1:
                writer.folder.rename(tmp_path / "elsewhere")
            elif len(seen) == 3:
                process.communicate(b"\n")
            elif len(seen) == 6:
                (tmp_path / "elsewhere").rename(writer.folder)
                (writer.folder / "manifest.json").write_text(json.dumps(manifest | {"status": "finished"}))
        going = (True, "running or killed")
        assert seen == [(False, "running or killed"), *[going] * 5, (False, "finished")]


def test_a_manifest_that_cannot_be_read_for_a_moment_is_no_end(tmp_path):
    with growing(tmp_path / "run") as writer:
        whole = (writer.folder / "manifest.json").read_bytes()
        looking = RecordPoller(RecordFollower(writer.folder))
        (writer.folder / "manifest.json").write_bytes(whole[:100])
        looking.look()
        assert "manifest.json, which has the command and how the run ended, cannot be read" in looking.lost
        assert looking.run.manifest  # as it was
        (writer.folder / "manifest.json").write_bytes(whole)
        assert looking.look().trouble == []
        assert (looking.lost, looking.lost_s) == ("", 0.0)


# --- several ranks -------------------------------------------------------------------------------------------------


def late_finding(folder):
    data = json.loads((folder / "findings.json").read_text())
    late = [clipped("what shows only in all ranks together", line=99)]
    (folder / "findings.json").write_text(json.dumps(findings_data(late) | {"late": data["findings"]}))


def test_what_the_launcher_of_ranks_finds_at_last_is_in_the_summary(tmp_path, clock, capsys):
    with growing(tmp_path / "run", world_size=2) as writer:
        clock.planned += [lambda: writer.close("finished", 0), lambda: None, lambda: late_finding(writer.folder)]
        assert main(["watch", str(tmp_path / "run"), "--interval", "0.1"]) == 0
    assert "what shows only in all ranks together" in capsys.readouterr().out


@pytest.mark.parametrize(("world_size", "hours_ago"), [(2, 1), (1, 0)])
def test_otherwise_nobody_waits_for_a_launcher(tmp_path, capsys, monkeypatch, world_size, hours_ago):
    with growing(tmp_path / "run", world_size=world_size) as writer:
        pass
    then = time.time() - hours_ago * 3600
    for file in writer.folder.iterdir():
        os.utime(file, (then, then))
    monkeypatch.setattr(terminal_module.time, "sleep", lambda seconds: pytest.fail("slept"))
    assert main(["watch", str(tmp_path / "run")]) == 0


# --- which record --------------------------------------------------------------------------------------------------


def test_a_record_that_comes_late(tmp_path):
    process = ampwise("watch", tmp_path / "run", "--interval", "0.1")
    told = process.stderr.readline()
    assert told == f"ampwise: waiting for a record in {tmp_path / 'run'}, which does not exist yet; Ctrl-C quits\n"
    (tmp_path / "run").mkdir()  # as torchrun does, long before the first rank writes
    time.sleep(0.3)
    with growing(tmp_path / "run"):
        assert any(line.startswith("step 120 ") for line in process.stdout)  # it may have looked while it came to be
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    assert "1 error in 120 steps" in output


def test_the_newest_of_a_folder(tmp_path, capsys):
    for name in ("b-first", "c-second", "a-third"):
        RecordWriter.create(tmp_path / "runs" / name, script=f"{name}.py").close("finished", 0)
        manifest = tmp_path / "runs" / name / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"created": "', f'"created": "{name[2:].count("i")}'))
    newest = tmp_path / "runs" / "b-first" / "manifest.json"
    newest.write_text(newest.read_text().replace('"created": "1', '"created": "9'))
    (tmp_path / "runs" / "notes.txt").write_text("no record")
    assert main(["watch", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr()
    assert said.err == f"ampwise: {tmp_path / 'runs'} is a folder of records; watching the newest, b-first\n"
    assert "b-first.py" in said.out


@pytest.mark.parametrize("words", [[], ["--once"]], ids=["watch", "once"])
def test_what_will_never_be_a_record(tmp_path, capsys, words):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    for name, reason in [("full", "is not a record"), ("full/thesis.txt", "is a file"), ("no/such", "does not exist")]:
        assert main(["watch", str(tmp_path / name), *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"ampwise: error: {tmp_path / name} {reason}")
        assert error.count("\n") == 1
        assert reason == "is a file" or "`ampwise run -o " in error  # the way out


@pytest.mark.parametrize("words", [[], ["--once"], ["--serve"]], ids=["watch", "once", "serve"])
def test_what_it_is_instead_is_reported(tmp_path, capsys, words):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.out.tfevents.1.host").write_text("")
    with growing(tmp_path / "run"):
        pass
    for name, hint in [
        ("logs", "It looks like a TensorBoard log"),
        ("run/steps.jsonl", "The record is its folder, "),
    ]:
        assert main(["watch", str(tmp_path / name), *words]) == 2
        error = capsys.readouterr().err
        assert (error.count("\n"), hint in error) == (1, True)


def test_no_name_is_no_record(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["watch", ""]) == 2
    said = "watch: the name of the record is empty. Name its folder; `.` is the current one."
    assert capsys.readouterr().err == f"ampwise: error: {said}\n"


def test_once_does_not_wait(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--open"], "--open: needs --serve"),
        (["--once", "--serve"], "--once: cannot be combined"),
        (["--interval", "0"], "expected 0.1 to 3600 seconds, got '0'"),
        (["--interval", "nan"], "expected 0.1 to 3600 seconds, got 'nan'"),
        (["--serve", "70000"], "'70000' is not a port; RUN comes first: `ampwise watch RUN --serve`"),
    ],
)
def test_options_that_make_no_sense(tmp_path, capsys, words, said):
    try:
        code = main(["watch", str(tmp_path), *words])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert said in capsys.readouterr().err


# --- beside a real run ---------------------------------------------------------------------------------------------


def test_beside_a_script_that_trains(warm, tmp_path):
    """Which goes on until it has been seen from both sides."""
    script, seen = tmp_path / "train.py", tmp_path / "seen"
    script.write_text(SCRIPT)
    watcher = ampwise("watch", tmp_path / "run", "--interval", "0.1")
    with ThreadPoolExecutor(1) as pool:
        words = ("-m", "ampwise", "run", "-q", "-o", str(tmp_path / "run"), str(script), str(seen))
        training = pool.submit(warm.run, *words, cwd=tmp_path)
        try:
            first = watcher.stdout.readline()
            assert first.startswith("step ")
            once = ampwise("watch", tmp_path / "run", "--once")
            told, errors = once.communicate(timeout=120)
            assert (once.returncode, errors, told.count("\n")) == (0, "", 1)
        finally:
            seen.touch()
        done = training.result()
    output, _ = watcher.communicate(timeout=120)
    assert (watcher.returncode, done.returncode) == (0, 0)
    steps = int(done.stdout)
    lines = output.splitlines()
    last = lines[lines.index("") - 1]
    assert last.startswith(f"step {steps:,}  loss ")
    assert last.endswith("  finished")
    assert f" in {steps:,} steps of " in output


def test_torch_stays_out(tmp_path):
    with growing(tmp_path / "run"):
        pass
    code = (
        f"import sys\nfrom ampwise.cli import main\nmain(['watch', {str(tmp_path)!r}])\nprint('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        main(["watch", "--help"])
    text = capsys.readouterr().out
    assert "ampwise watch RUN --serve --open" in text
    assert "Ctrl-C stops the watcher, not the run (exit code 130)" in text
