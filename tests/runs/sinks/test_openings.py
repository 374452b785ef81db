"""A sink that cannot be had is refused before anything begins, in one line."""

import json
import os
import random
import sys
import threading
import types
from pathlib import Path

import pytest

from ampwise.errors import BadInput, MissingDependency, UnknownName
from ampwise.runs.sinks import SinkSyntax, built_in_kinds, requested_sinks
from ampwise.runs.sinks.sink_context import SinkContext, use_separate_random

from ...for_each import for_each
from .sink_toys import all_sinks, steps

IN_AN_ENGINE = SinkSyntax("Sinks({})", quoted=True, each="give each a string of its own")

BASE = Path("runs") / "first"
PACKAGED = [kind for kind in built_in_kinds() if kind != "jsonl"]


def refused(*asked, kind=BadInput, **options):
    with pytest.raises(kind) as caught:
        requested_sinks(asked, base=BASE, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unknown_name_has_its_nearest():
    assert refused("tensorbord", kind=UnknownName) == (
        "--sink tensorbord: unknown sink 'tensorbord'. Did you mean tensorboard? "
        "The sinks are jsonl, mlflow, tensorboard, trackio, wandb."
    )


@pytest.mark.parametrize("kind", PACKAGED)
def test_a_package_that_is_missing(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    expected = f"{kind} is not installed. pip install 'ampwise[{kind}]'"
    assert refused(f"{kind}:x", kind=MissingDependency) == f"--sink {kind}: {expected}"
    asked = refused(kind, kind=MissingDependency, asking=IN_AN_ENGINE)
    assert asked == f"Sinks('{kind}'): {expected}"


def test_json_lines_need_nothing():
    assert [each.label for each in requested_sinks(["jsonl"], base=BASE)] == ["jsonl"]


def test_what_is_neither_name_nor_function():
    assert refused(3) == "--sink 3: expected the name of a sink, or a function that takes a row."
    assert refused("jsonl:").startswith("--sink jsonl:: expected a target after the colon.")
    names = "jsonl, mlflow, tensorboard, trackio, wandb"
    assert refused("") == f"--sink '': expected the name of a sink: {names}."
    assert refused(":x") == f"--sink :x: expected the name of a sink before the colon: {names}."


@for_each(
    ("asked", "words"),
    [
        (["jsonl"], "Sinks(['jsonl']): expected the name of a sink, or a function that takes a row."),
        (None, "Sinks(None): expected the name of a sink, or a function that takes a row."),
        ("", "Sinks(''): expected the name of a sink: jsonl, mlflow, tensorboard, trackio, wandb."),
        (
            "jsonl,wandb:p",
            "Sinks('jsonl,wandb:p'): this is more than one sink: give each a string of its own.",
        ),
    ],
)
def test_an_engine_quotes_as_python_does(asked, words):
    assert refused(asked, asking=IN_AN_ENGINE) == words


def test_an_unknown_name_says_who_asked():
    assert refused("nowhere", kind=UnknownName, asking=IN_AN_ENGINE).startswith(
        "Sinks('nowhere'): unknown sink 'nowhere'. The sinks are jsonl,"
    )


def test_several_in_one():
    assert refused("jsonl,tensorboard") == (
        "--sink jsonl,tensorboard: this is more than one sink: give --sink once for each."
    )
    assert requested_sinks(["jsonl:a,b.jsonl"], base=BASE)  # a comma may be part of a name


def test_two_ways_to_name_a_place_are_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    same = ["jsonl:two", "jsonl:./two", "jsonl:x/../two", f"jsonl:{tmp_path / 'two'}"]
    assert len(requested_sinks(same, base=BASE)) == 1
    assert len(requested_sinks(["jsonl", "jsonl:runs/first.metrics.jsonl"], base=BASE)) == 1
    assert len(requested_sinks(["jsonl:two", "jsonl:three", "tensorboard:two"], base=BASE)) == 3
    assert len(requested_sinks([print, print, repr], base=BASE)) == 2


# Targets


def test_targets_that_cannot_be_written_are_refused_and_nothing_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    folder, file = tmp_path, tmp_path / "file"
    assert refused("jsonl:.") == f"--sink jsonl:.: {folder} is a folder, expected a file."
    taken = f"{file} is a file, expected a folder."
    assert refused("jsonl:file/m.jsonl") == f"--sink jsonl:file/m.jsonl: {taken}"
    assert refused("tensorboard:file/deep/logs") == f"--sink tensorboard:file/deep/logs: {taken}"
    assert refused("mlflow:./file") == f"--sink mlflow:./file: {taken}"
    assert requested_sinks(
        ["jsonl:new/m.jsonl", "tensorboard:new", "mlflow:./new", "tensorboard:gs://b/logs"], base=BASE
    )
    assert requested_sinks(
        ["jsonl:file/m.jsonl"], base=BASE, sends=False
    )  # on this machine; the one that sends will tell
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="all may be written")
def test_a_folder_that_may_not_be_written(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert refused(f"jsonl:{closed}/m.jsonl").endswith(f"nothing may be written in {closed}.")


@pytest.mark.parametrize("seconds", ["soon", "-1", "nan", "inf"])
def test_a_patience_that_is_no_number(seconds, monkeypatch):
    monkeypatch.setenv("AMPWISE_SINK_WAIT", seconds)
    assert refused("jsonl") == f"AMPWISE_SINK_WAIT={seconds}: expected a number of seconds from 0 to 86400."


# What is drawn by chance


def test_a_module_draws_apart_in_threads_and_as_ever_in_the_main_one(monkeypatch):
    drawing = types.ModuleType("drawing")
    drawing.random = random
    monkeypatch.setitem(sys.modules, "drawing", drawing)
    use_separate_random(["drawing", "not_loaded"])
    random.seed(5)
    thread = threading.Thread(target=lambda: [drawing.random.random() for _ in range(9)])
    thread.start()
    thread.join()
    assert drawing.random.random() == random.Random(5).random()


# MLflow without a database


@pytest.fixture
def without_sqlalchemy(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("asked", ["mlflow", "mlflow:my-experiment", "mlflow:sqlite:///my.db"])
def test_mlflow_needs_more_for_a_database(asked, without_sqlalchemy):
    assert refused(asked) == (
        f"--sink {asked}: MLflow would write to a database (sqlite:), which mlflow-skinny alone cannot: "
        "pip install mlflow, or name a server (mlflow:http://…) or a folder (mlflow:./mlruns)."
    )


def test_mlflow_with_a_server_or_a_folder_needs_no_more(without_sqlalchemy, monkeypatch):
    assert len(requested_sinks(["mlflow:http://localhost:5000", "mlflow:./runs", "mlflow:file:runs"], base=BASE)) == 3
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    assert requested_sinks(["mlflow"], base=BASE)


def test_a_target_may_have_colons_and_a_sink_named_twice_is_one():
    (opening,) = requested_sinks(["jsonl:a:b.jsonl", "jsonl:a:b.jsonl"], base=BASE)
    assert opening.about.target == "a:b.jsonl"
    assert opening.about.name == "first"


def test_checking_loads_no_package():
    import subprocess

    code = (
        "import sys; from pathlib import Path; from ampwise.runs.sinks import built_in_kinds, requested_sinks\n"
        "requested_sinks([k for k in built_in_kinds()"
        " if k == 'jsonl' or __import__('importlib.util').util.find_spec(k)], base=Path('x'))\n"
        "print([name for name in ('torch', 'wandb', 'mlflow', 'trackio', 'tensorboard') if name in sys.modules])"
    )
    environment = {**os.environ, "MLFLOW_TRACKING_URI": "http://localhost:5000"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_path_is_from_where_the_run_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named, unnamed = requested_sinks(["jsonl:logs/m.jsonl", "jsonl"], base=BASE)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert named.about.path("metrics.jsonl") == tmp_path / "logs" / "m.jsonl"
    assert unnamed.about.path("metrics.jsonl") == tmp_path / "runs" / "first.metrics.jsonl"


def test_a_name_with_a_dot_keeps_it(tmp_path):
    assert SinkContext(base=tmp_path / "run-0.1").path("tensorboard").name == "run-0.1.tensorboard"


# A function


def test_a_function_gets_one_row_at_a_time():
    rows = []
    sinks, found = all_sinks(*requested_sinks([rows.append], base=BASE))
    for step in steps([1.0, 2.0]):
        sinks.send(step)
    sinks.close(60)
    assert [(row.step, row.metrics["ampwise/loss"]) for row in rows] == [(1, 1.0), (2, 2.0)]
    assert not found


def test_a_function_that_fails_is_named():
    def too_fussy(row):
        raise KeyError("ampwise/accuracy")

    sinks, found = all_sinks(*requested_sinks([too_fussy], base=BASE))
    sinks.send(*steps([1.0]))
    sinks.close(60)
    assert "too_fussy` failed after 0 rows and was dropped: KeyError: 'ampwise/accuracy'" in found[0].message


# Other packages' sinks


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package with a sink, as pip would."""

    def install(text, entry="tally = my_sinks:open_sink"):
        (tmp_path / "my_sinks.py").write_text(text)
        info = tmp_path / "my_sinks-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-sinks\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[ampwise.sinks]\n{entry}\n")

    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    sys.modules.pop("my_sinks", None)


def test_a_sink_of_another_package(install, tmp_path):
    install(
        "import json\n"
        "from contextlib import contextmanager\n"
        "@contextmanager\n"
        "def open_sink(about):\n"
        "    kept = []\n"
        "    yield kept.extend\n"
        "    with open(about.target, 'w') as file:\n"
        "        json.dump([row.step for row in kept], file)\n"
    )
    target = tmp_path / "kept.json"
    sinks, found = all_sinks(*requested_sinks([f"tally:{target}"], base=BASE))
    for step in steps([1.0, 2.0]):
        sinks.send(step)
    sinks.close(60)
    assert not found
    assert json.loads(target.read_text()) == [1, 2]


def test_a_broken_one_is_refused_in_a_line(install):
    install("raise RuntimeError('from within')")
    assert refused("tally") == "--sink tally: my_sinks:open_sink cannot be loaded: RuntimeError: from within"


def test_ours_cannot_be_replaced(install):
    install("def open_sink(about): raise RuntimeError", entry="jsonl = my_sinks:open_sink")
    (opening,) = requested_sinks(["jsonl"], base=BASE)
    assert opening.open_sink.__module__ == "ampwise.runs.sinks.kinds.jsonl"
