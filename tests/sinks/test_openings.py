"""A sink that cannot be had is refused before anything begins, in one line."""

import json
import sys
from pathlib import Path

import pytest

from ampwise.errors import BadInput, MissingDependency, UnknownName
from ampwise.sinks import built_in_kinds, openings
from ampwise.sinks.about import About

from .sink_toys import all_sinks, steps

BASE = Path("runs") / "first"
PACKAGED = [kind for kind in built_in_kinds() if kind != "jsonl"]


def refused(*asked, kind=BadInput, **options):
    with pytest.raises(kind) as caught:
        openings(asked, base=BASE, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unknown_name_has_its_nearest():
    assert refused("tensorbord", kind=UnknownName) == (
        "unknown sink 'tensorbord'. Did you mean tensorboard? The sinks are jsonl, mlflow, tensorboard, trackio, wandb."
    )


@pytest.mark.parametrize("kind", PACKAGED)
def test_a_package_that_is_missing(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    expected = f"{kind} is not installed. pip install 'ampwise[{kind}]'"
    assert refused(f"{kind}:x", kind=MissingDependency) == f"--sink {kind}: {expected}"
    asked = refused(kind, kind=MissingDependency, prefix="Engine(sinks=['{}'])")
    assert asked == f"Engine(sinks=['{kind}']): {expected}"


def test_json_lines_need_nothing():
    assert [each.label for each in openings(["jsonl"], base=BASE)] == ["jsonl"]


def test_what_is_neither_name_nor_function():
    assert refused(3) == "--sink 3: a sink's name is expected, or a function that takes a row."
    assert refused("jsonl:").startswith("--sink jsonl:: nothing follows the colon.")
    assert refused("").startswith("--sink '': a sink's name is expected")


def test_a_target_may_have_colons_and_a_sink_named_twice_is_one():
    (opening,) = openings(["jsonl:a:b.jsonl", "jsonl:a:b.jsonl"], base=BASE)
    assert opening.about.target == "a:b.jsonl"
    assert opening.about.name == "first"


def test_checking_loads_no_package():
    import subprocess

    code = (
        "import sys; from pathlib import Path; from ampwise.sinks import built_in_kinds, openings\n"
        "openings([k for k in built_in_kinds() if k == 'jsonl' or __import__('importlib.util').util.find_spec(k)],"
        " base=Path('x'))\n"
        "print([name for name in ('torch', 'wandb', 'mlflow', 'trackio', 'tensorboard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_path_is_from_where_the_run_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named, unnamed = openings(["jsonl:logs/m.jsonl", "jsonl"], base=BASE)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert named.about.path("metrics.jsonl") == tmp_path / "logs" / "m.jsonl"
    assert unnamed.about.path("metrics.jsonl") == tmp_path / "runs" / "first.metrics.jsonl"


def test_a_name_with_a_dot_keeps_it(tmp_path):
    assert About(base=tmp_path / "run-0.1").path("tensorboard").name == "run-0.1.tensorboard"


# A function


def test_a_function_gets_one_row_at_a_time():
    rows = []
    sinks, found = all_sinks(*openings([rows.append], base=BASE))
    for step in steps([1.0, 2.0]):
        sinks.tell(step)
    sinks.close(60)
    assert [(row.step, row.metrics["ampwise/loss"]) for row in rows] == [(1, 1.0), (2, 2.0)]
    assert not found


def test_a_function_that_fails_is_named():
    def too_fussy(row):
        raise KeyError("ampwise/accuracy")

    sinks, found = all_sinks(*openings([too_fussy], base=BASE))
    sinks.tell(*steps([1.0]))
    sinks.close(60)
    assert "too_fussy` failed after 0 rows, and got no more: KeyError: 'ampwise/accuracy'" in found[0].message


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
    sinks, found = all_sinks(*openings([f"tally:{target}"], base=BASE))
    for step in steps([1.0, 2.0]):
        sinks.tell(step)
    sinks.close(60)
    assert not found
    assert json.loads(target.read_text()) == [1, 2]


def test_a_broken_one_is_refused_in_a_line(install):
    install("raise RuntimeError('from within')")
    assert refused("tally") == "--sink tally: my_sinks:open_sink cannot be loaded: RuntimeError: from within"


def test_ours_cannot_be_replaced(install):
    install("def open_sink(about): raise RuntimeError", entry="jsonl = my_sinks:open_sink")
    (opening,) = openings(["jsonl"], base=BASE)
    assert opening.open_sink.__module__ == "ampwise.sinks.kinds.jsonl"
