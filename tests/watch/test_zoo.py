"""The zoo of training scripts: each planted mistake is found at its line, and the clean ones leave nothing to say.

A broken script says what is to be found in it, with ``# expect: AMP101`` on the line the finding should name; a clean
one what may be said of it all the same, with ``# allow: AMP602`` before its docstring.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from ampwise.errors import BadInput
from ampwise.report.as_json import as_json
from ampwise.runs.reader import Run

from ..night import by_night

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
ZOO = ROOT / "examples" / "zoo"
SHAPES = sorted(path.stem.removesuffix("_clean") for path in ZOO.glob("*_clean.py"))
LIBRARIES = {
    "accelerate_loop": ["accelerate"],
    "hf_trainer": ["accelerate"],
    "lightning": ["pytorch_lightning"],
    "transformers": ["transformers", "transformers.trainer"],
}
ON_RANKS = {"ddp"}
LARGE = ("lightning", "seq2seq", "transformers")  # take seconds each, and have tests of their own
SMALL = [shape for shape in SHAPES if shape not in LARGE]
DIE = {"finetune_broken", "nanogpt_broken"}  # of the mistakes planted in them: torch raises
CONDUCT = re.compile(r"AMP[1-5]\d\d")

# What the zoo must have an example of: the mistakes that a running script shows without a GPU.
COVERED = {
    *("AMP101", "AMP103", "AMP104", "AMP106", "AMP107", "AMP108", "AMP109", "AMP110", "AMP111", "AMP114"),
    *("AMP201", "AMP202", "AMP204", "AMP205", "AMP206"),
    *("AMP301", "AMP302", "AMP304", "AMP306", "AMP307", "AMP308"),
    "AMP501",
}


def script_of(shape, kind):
    return ZOO / f"{shape}_{kind}.py"


def codes_after(mark, line):
    """The codes in a comment such as ``# expect: AMP101, AMP204``."""
    comment = re.search(rf"# {mark}: (AMP\d\d\d(?:, ?AMP\d\d\d)*)\s*$", line)
    return comment[1].replace(" ", "").split(",") if comment else []


def expected(script):
    lines = script.read_text(encoding="utf-8").splitlines()
    return {(code, number) for number, line in enumerate(lines, start=1) for code in codes_after("expect", line)}


def allowed(script):
    head, _, _ = script.read_text(encoding="utf-8").partition('"""')
    return {code for line in head.splitlines() for code in codes_after("allow", line)}


@pytest.fixture
def watch(warm, tmp_path):
    """Run a script of the zoo under ``ampwise run``: how it ended, and the findings of its report."""

    def watch(shape, kind):
        script = [script_of(shape, kind)]
        if shape in ON_RANKS:
            script = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
        # The tests around these use the other cores.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        loaded = LIBRARIES.get(shape, ())
        run = warm.run("-m", "ampwise", "run", "-q", "-o", "run", *script, cwd=tmp_path, env=environment, loaded=loaded)
        try:
            return run, json.loads(as_json(Run.read(tmp_path / "run")))["findings"]
        except BadInput as error:
            pytest.fail(f"{error}\n{last_words(run)}")

    return watch


def lines_of(findings, script):
    """(code, line) of what was found in the script; the name of the place where it is not there."""
    found = set()
    for finding in findings:
        place = finding["place"]
        here = Path(place.get("file") or "").name == script.name
        found.add((finding["code"], place.get("line") if here else str(place)))
    return found


def told(findings):
    return "\n".join(f"{finding['code']} {finding['place']}: {finding['message']}" for finding in findings)


def last_words(process):
    """The end of what it wrote to stderr, without the C++ frames that a CPU without BF16 adds."""
    return "\n".join([line for line in process.stderr.splitlines() if not line.startswith("frame #")][-30:])


def needs_library(shape):
    for name in LIBRARIES.get(shape, ())[:1]:
        if importlib.util.find_spec(name) is None:  # not imported here, where nothing needs it
            pytest.skip(f"needs {name}")


@pytest.mark.parametrize("shape", [*SMALL, *by_night(*LARGE)])
def test_what_is_planted_is_found(shape, watch):
    needs_library(shape)
    script = script_of(shape, "broken")
    run, findings = watch(shape, "broken")
    conduct = [finding for finding in findings if CONDUCT.fullmatch(finding["code"])]
    assert lines_of(conduct, script) == expected(script), told(conduct)
    assert all(finding["count"] >= 1 and finding["message"] and finding["fix"] for finding in findings)
    assert (run.returncode != 0) == (script.stem in DIE), last_words(run)


@pytest.mark.half_by_day
@pytest.mark.parametrize("shape", [*SMALL, *by_night(*LARGE)])
def test_a_clean_script_leaves_nothing_to_say(shape, watch):
    needs_library(shape)
    script = script_of(shape, "clean")
    run, findings = watch(shape, "clean")
    said = [finding for finding in findings if finding["code"] not in allowed(script)]
    assert lines_of(said, script) == set(), told(said)
    assert run.returncode == 0, last_words(run)
    assert "loss" in run.stdout or "accuracy" in run.stdout, "the script's own words are gone"


def test_the_zoo_is_made_of_pairs():
    pairs = sorted(f"{shape}_{kind}.py" for shape in SHAPES for kind in ("broken", "clean"))
    assert sorted(path.name for path in ZOO.glob("*.py")) == pairs
    assert len(SHAPES) >= 8


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pair_differs_in_one_to_four_mistakes(shape):
    assert 1 <= len(expected(script_of(shape, "broken"))) <= 4
    assert not expected(script_of(shape, "clean"))


def test_the_zoo_has_every_mistake_that_shows_without_a_gpu():
    planted = {code for shape in SHAPES for code, _ in expected(script_of(shape, "broken"))}
    assert planted == COVERED


def test_expectations_are_read_from_comments():
    assert codes_after("expect", "step()  # expect: AMP101") == ["AMP101"]
    assert codes_after("expect", "step()  # expect: AMP101, AMP204,AMP205") == ["AMP101", "AMP204", "AMP205"]
    assert codes_after("expect", "step()  # allow: AMP101") == []
    assert codes_after("expect", "step()  # expect AMP101 soon") == []


def test_a_finding_in_another_file_is_not_taken_for_one_here(tmp_path):
    findings = [
        {"code": "AMP101", "place": {"file": "somewhere/train.py", "line": 3}},
        {"code": "AMP101", "place": {"file": "somewhere/else.py", "line": 3}},
        {"code": "AMP604", "place": {"parameter": "head.weight"}},
    ]
    assert lines_of(findings, tmp_path / "train.py") == {
        ("AMP101", 3),
        ("AMP101", "{'file': 'somewhere/else.py', 'line': 3}"),
        ("AMP604", "{'parameter': 'head.weight'}"),
    }
