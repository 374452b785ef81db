"""The summary in the terminal."""

import re

import pytest

from ampwise.finding import Place
from ampwise.finding.registry import find_rule
from ampwise.numbers.census.algebra import Census
from ampwise.report.run_text import run_text
from ampwise.runs.events import LoggedEvent
from ampwise.runs.rows import CountedFinding

GOLDEN = """\
2 problems in 120 steps of train.py (fp16, scaler): 1 error, 1 warning.

error[AMP101] clip-scaled-grads: `clip_grad_norm_` sees gradients multiplied by 65536
  --> train.py:31, 120 times, steps 1 to 120
  31 | clip_grad_norm_(model.parameters(), 1.0)
  = clips at 1/65,536 to 1/32,768 of the limit
  = norm: 1.52588e-05; scale: 65536
  help: Call scaler.unscale_(optimizer) before clipping.

warning[AMP204] scaler-not-checkpointed: The state of the scaler is not saved
  --> train.py:40
  = about 1 skipped step at each resume
  help: Save scaler.state_dict() too.

The record is in runs/one
  ampwise explain AMP101                       why it matters, with an example
  ampwise report runs/one -v                   layers, times, and what was fine
  ampwise report runs/one -o page.html --open  the same with curves, as a page
"""
DETAILS = """\
Suggested for the GradScaler
  init_scale=32768: 65536 overflowed twice.

Layers, worst first
  Unscaled gradients over 2 sampled steps; lost and subnormal in FP16 in the last finite one, at the
      last loss scale, 32,768.
  layer            share   norm   largest  lost, min.  subnormal
  blocks.1.bias     8.8%      0         0           0          0  dead
  blocks.0.weight  73.7%  1e-05  1.35e-06       27.3%      66.7%
  The other one looks fine.

Where time goes
  matmuls in half precision  87.3%
  device syncs per step      1

Fine
  - Every step was followed by one update of the scaler.

Not measured
  - Activations: run with --activations.

"""

HOSTILE = "<script>\x1b[2J\u202egpj.exe\n'\"[red]\udc80"


def plain(run, width=100, verbose=True):
    return run_text(run, colour=False, width=width, verbose=verbose)


def test_the_whole_text(make_run):
    assert plain(make_run(), verbose=False) == GOLDEN


def test_details_are_for_who_asks(make_run):
    start, _, end = GOLDEN.partition("The record is in runs/one")
    whole = f"{start}{DETAILS}The record is in runs/one{end}"
    (shorter,) = (line for line in whole.splitlines(keepends=True) if " runs/one -v " in line)
    assert plain(make_run()) == whole.replace(shorter, "")


def test_colour_changes_nothing_but_colour(make_run):
    coloured = run_text(make_run(), colour=True, width=100)
    assert coloured.startswith("\x1b[1;31m2 problems")
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == GOLDEN


def test_a_clean_run_is_calm(make_run):
    text = plain(make_run(findings=[]))
    assert text.startswith("No findings in 120 steps of train.py (fp16, scaler).\n\nSuggested")
    assert "Every step was followed" in text
    assert "error" not in text
    assert "explain" not in text


def test_an_empty_run_is_short(make_run):
    run = make_run(findings=[], steps=[], layers=[], manifest={"facts": {}})
    assert plain(run) == "Nothing to judge in train.py, which took no step.\nThe record is in runs/one\n"


def test_a_script_that_failed_before_its_first_step(make_run):
    error = {"type": "ValueError", "message": "no data"}
    facts = {"not_measured": ["Nothing was watched: the script never imported torch."]}
    manifest = {"status": "failed", "exit_code": 1, "error": error, "facts": facts}
    run = make_run(findings=[], steps=[], layers=[], manifest=manifest, trouble=["steps.jsonl is missing."])
    assert plain(run) == (
        "The script failed with ValueError: no data (exit code 1).\n"
        "Nothing was watched: the script never imported torch.\n"
        "The record is in runs/one\n\n"
        "Problems with this record\n"
        "  - steps.jsonl is missing.\n"
    )


def test_findings_without_a_step_have_no_curves(make_run):
    text = plain(make_run(steps=[], layers=[], manifest={"facts": {}}))
    assert "error[AMP101]" in text
    assert "--html" not in text
    assert "ampwise explain AMP101" in text


def test_what_modules_put_out(make_run):
    shapes = {
        "stem": {"dtype": "bfloat16", "largest": 300.0},
        "broken": {"dtype": "float16", "largest": "NaN"},
        "head": {"dtype": "float16", "largest": 32752},
        "other": {"dtype": "complex64", "largest": 1.0},
        **{f"blocks.{n}": {"dtype": "float16", "largest": 1000.0 + n} for n in range(15)},
        "odd": 3,
        "odder": {"dtype": None},
    }
    text = plain(make_run({"activations": shapes}))
    table = text[text.index("Modules, worst first") : text.index("Where time goes")].splitlines()
    assert table[1] == "  The largest output magnitude of each module in the sampled steps."
    assert [line.split() for line in table[3:6]] == [
        ["broken", "float16", "NaN", "not", "finite"],
        ["head", "float16", "3.28e+04", "50.0%"],
        ["blocks.14", "float16", "1.01e+03", "1.5%"],
    ]
    assert table[-2] == "  … and 7 more"
    assert "Modules" not in plain(make_run({"activations": {}}))
    assert "Modules" not in plain(make_run({"activations": [1]}))


def test_evidence_is_for_people(make_run, rules):
    evidence = {
        "lost_share": 0.4131,
        "scale": None,
        "worst": ["a", "b", "c", "d", "e", "f"],
        "is_dead": True,
        "flops_by_precision": {"fp16": 2.0, "fp32": None},
    }
    seen = [
        CountedFinding(finding=rules[one].but(name="other").at(Place(), "m", evidence=all_of))
        for one, all_of in [("clip", evidence), ("save", {"scale": None})]
    ]
    text = plain(make_run(findings=seen))
    told = [line.strip() for line in text.splitlines() if line.strip().startswith("=")]
    assert told == ["= lost share: 41.3%; worst: a, b, c, d and 2 more; is dead: yes"], "nested data is for machines"


def test_a_run_in_bf16_has_no_columns_of_fp16(make_run):
    text = plain(make_run({"precision": "bf16"}, findings=[]))
    assert "layer          share  norm  largest\n" in text
    assert "lost" not in text


def test_seconds_are_reported_in_units_one_can_read(make_run):
    assert "time per step  11.8 ms\n" in plain(make_run({"timing": {"seconds_per_step": 0.01184}}))


def test_a_run_without_an_end_and_with_trouble_says_so(make_run):
    text = plain(make_run(manifest={"status": "running"}, trouble=["steps.jsonl: line 7 could not be read."]))
    assert text.splitlines()[1].startswith("The run is still going or was killed")
    assert "Problems with this record\n  - steps.jsonl: line 7 could not be read.\n" in text


def test_a_table_of_zeros_is_a_sentence(make_run, make_sample):
    layers = {name: Census(binades={-8: 9}, amax=0.005, amin=0.005, sum_squares=9 * 0.005**2) for name in ("a", "b")}
    text = plain(make_run({"timing": {"data_wait_share": 0.0}}, layers=[make_sample(1, layers)]))
    assert "\nLayers: all 2 look fine, with gradient norms from 0.015 to 0.015\n" in text
    assert "waiting for data" not in text


def test_fp16_on_a_cpu_that_ran_fp32_is_no_contradiction(make_run):
    timing = {"device": "cpu", "autocast": "fp16", "half_share": 0.0}
    assert "half precision  n/a: the matmuls ran in FP32 on this CPU\n" in plain(make_run({"timing": timing}))
    gpu = plain(make_run({"timing": {**timing, "device": "cuda", "half_share": 0.001}}))
    assert "half precision  0.1%" in gpu


def test_the_fix_that_a_command_makes_comes_first(make_run, rules):
    diffs = [("a b.py", True), ("other.py", False)]
    found = [
        CountedFinding(finding=rules["clip"].at(Place(file=file, line=1), "m"), diff="-x\n+y", diff_is_safe=safe)
        for file, safe in diffs
    ]
    *_, fix, page = plain(make_run(findings=found)).splitlines()
    assert fix.split("  ")[1] == "ampwise check --fix 'a b.py'"
    assert fix.endswith("fixes AMP101")
    assert page.startswith("  ampwise report runs/one -o page.html --open")


def test_paths_are_shown_from_here(make_run, rules, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [CountedFinding(finding=rules["clip"].at(Place(file=str(tmp_path / "src" / "train.py"), line=3), "m"))]
    text = plain(make_run(findings=found, folder=tmp_path / "runs"))
    assert "  --> src/train.py:3\n" in text
    assert str(tmp_path) not in text


def test_places_with_the_same_fix_are_one_paragraph(make_run, rules):
    found = [CountedFinding(finding=rules["save"].at(Place(file="t.py", line=n), f"m{n}")) for n in range(1, 10)]
    text = plain(make_run(findings=found))
    assert text.startswith("9 warnings in 120 steps")
    assert text.count("warning[AMP204]") == text.count("help: ") == 1
    assert "  --> t.py:1\n" in text
    assert "  = also 8 more of these, at t.py:2, t.py:3, t.py:4, t.py:5, t.py:6, t.py:7 and 2 more\n" in text


def test_what_a_fault_caused_is_a_part_of_its_finding(make_run):
    overflow, loss, collapse = (find_rule(code) for code in ("AMP904", "AMP612", "AMP607"))
    found = [
        CountedFinding(finding=collapse.at(Place(step=5), "the scale fell"), first_step=5, last_step=20),
        CountedFinding(finding=loss.at(Place(step=4), "the loss is nan: the data is bad"), first_step=4, last_step=20),
        CountedFinding(finding=overflow.at(Place(file="t.py", line=7), "65504 + 1 is inf"), first_step=4, last_step=4),
    ]
    text = plain(make_run(findings=found))
    assert text.startswith("1 error in 120 steps")
    assert "  = this also explains: the loss is nan (AMP612); the scale fell (AMP607)\n" in text
    found[2].first_step = 6  # too late to be the cause
    assert plain(make_run(findings=found)).startswith("2 errors in 120 steps")


def test_many_layers_are_cut_and_counted(make_run, make_sample):
    layers = {f"blocks.{n}.weight": Census(zeros=1) for n in range(40)}
    text = plain(make_run(layers=[make_sample(1, layers)]))
    assert text.count(" dead") == 12
    assert "… and 28 more\n" in text


def test_events_are_listed_in_order_with_advice_at_the_last_of_a_kind(make_run):
    late = [
        LoggedEvent(name="checkpoint-late", level="warning", message="late", step=n, advice="Hurry.") for n in (5, 9)
    ]
    failed = LoggedEvent(name="sink-failed", level="warning", message="the sink `a\x1b` failed")
    text = plain(make_run(events=[*late, failed]))
    lines = [
        "Events",
        "  - checkpoint-late at step 5: late",
        "  - checkpoint-late at step 9: late. Hurry.",
        "  - sink-failed: the sink `a\\x1b` failed",
    ]
    assert "\n".join(lines) + "\n\n" in text


def test_of_many_events_the_last_are_listed(make_run):
    many = [LoggedEvent(name="step-skipped", level="info", message="skipped", step=n) for n in range(1, 31)]
    text = plain(make_run(events=many))
    assert "Events\n  - 10 earlier ones: the JSON has all of them\n  - step-skipped at step 11: skipped\n" in text
    assert text.count("step-skipped at step") == 20
    assert plain(make_run(events=many), verbose=False).count("step-skipped at step") == 5


def test_a_run_with_events_alone_is_not_empty(make_run):
    alone = {"findings": [], "steps": [], "layers": [], "manifest": {"facts": {}}}
    late = LoggedEvent(name="lock-taken-over", level="info", message="the folder was locked")
    assert "lock-taken-over: the folder was locked" in plain(make_run(**alone, events=[late]))


def test_many_findings_are_cut_and_counted(make_run, rules):
    many = [
        CountedFinding(finding=rules["clip"].at(Place(file="t.py", line=n), "m", fix=f"Fix {n}."), count=n)
        for n in range(1, 31)
    ]
    text = plain(make_run(findings=many))
    assert text.count("error[AMP101]") == 20
    assert "… and 10 more findings: the page and the JSON have all of them." in text
    assert text.index("t.py:30") < text.index("t.py:11")


@pytest.mark.parametrize("width", [2, 60, 80, 100])
def test_the_table_keeps_to_the_width(make_run, make_sample, width):
    name = "module.transformer.encoder.layers.11.attention.projection.weight"
    text = plain(make_run(layers=[make_sample(1, {name: Census(zeros=1), "ж" * 70: Census(zeros=2)})]), width)
    table = text[text.index("layer  ") : text.index("Where time")]
    assert max(map(len, table.splitlines())) <= max(width, 72)
    assert "weight " in table
    assert ("…" in table) == (width < 124)


def test_names_stay_whole_where_there_is_room(make_run, make_sample):
    name = "module.transformer.encoder.layers.11.attention.projection.weight"
    assert name in plain(make_run(layers=[make_sample(1, {name: Census(zeros=1)})]), 160)


def test_what_the_script_names_cannot_reach_the_terminal(make_run, make_sample, rules):
    finding = rules["clip"].at(Place(file=HOSTILE, line=2), HOSTILE, evidence={HOSTILE: HOSTILE}, fix=HOSTILE)
    run = make_run(
        findings=[CountedFinding(finding=finding, excerpt={"first_line": 1, "lines": [HOSTILE, HOSTILE]})],
        layers=[make_sample(1, {HOSTILE: Census(zeros=1)})],
        folder=HOSTILE,
        trouble=[HOSTILE],
        manifest={"script": HOSTILE, "status": "failed", "error": {"type": HOSTILE, "message": HOSTILE}},
        facts={
            "what_was_fine": [HOSTILE],
            "not_measured": [HOSTILE],
            "precision": HOSTILE,
            "settings": [{"name": HOSTILE, "value": HOSTILE, "reason": HOSTILE}],
            "timing": {HOSTILE: HOSTILE, "seconds_per_step": HOSTILE},
            "activations": {HOSTILE: {"dtype": HOSTILE, "largest": 1.0}},
            "optimizers": [{"index": 0, "name": HOSTILE, "model": HOSTILE}],
        },
    )
    text = plain(run)
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e\udc80]", text)
    assert text.count("\\x1b[2J") > 12
    assert "[red]" in text  # no markup of rich either


@pytest.mark.parametrize(
    "facts",
    [
        {"what_was_fine": "all", "settings": {"a": 1}, "timing": [1], "modules": 3, "steps": "x", "precision": []},
        {"activations": 3, "optimizers": {"index": 0}, "torch": "2.13"},
        {"activations": {"a": {"dtype": 3, "largest": 10**400}}, "optimizers": [1, {"index": "0"}], "torch": [1]},
        {"settings": [1, {"name": "x"}], "timing": {"a": {}}, "modules": [None], "not_measured": [None]},
    ],
)
def test_facts_of_another_shape_are_no_crash(make_run, facts):
    assert plain(make_run(facts=facts)).startswith("2 problems")


@pytest.mark.parametrize(
    "excerpt",
    [
        {},
        {"first_line": 1},
        {"first_line": 10**15, "lines": ["x"]},
        {"first_line": "31", "lines": ["x"]},
        {"first_line": 50, "lines": ["x"]},
        {"first_line": 1, "lines": "text"},
    ],
)
def test_an_excerpt_that_does_not_fit_is_left_out(make_run, rules, excerpt):
    seen = CountedFinding(finding=rules["clip"].at(Place(file="t.py", line=31), "m"), excerpt=excerpt)
    assert " |" not in plain(make_run(findings=[seen]))


def test_lines_that_were_not_kept_are_not_invented(make_run, rules):
    seen = CountedFinding(
        finding=rules["clip"].at(Place(file="t.py", line=31), "m"), excerpt={"first_line": 31, "lines": ["x()"]}
    )
    assert "  31 | x()\n  =" in plain(make_run(findings=[seen]))


def test_a_column_that_is_known_is_marked_alone(make_run, rules):
    place = Place(file="t.py", line=3, column=5, end_line=3, end_column=9)
    seen = CountedFinding(finding=rules["clip"].at(place, "m"), excerpt={"first_line": 3, "lines": ["a = clip(b)"]})
    assert "  3 | a = clip(b)\n    |     ^^^^\n" in plain(make_run(findings=[seen]))


def test_a_folder_with_blanks_can_be_pasted(make_run):
    assert "ampwise report 'my runs/1' -o" in plain(make_run(folder="my runs/1"))
