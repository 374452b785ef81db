"""The picture: it fits whatever it is drawn on, and says what is so."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from ampwise.finding import Severity
from ampwise.report.live.frame import TerminalSize, draw_curves, draw_frame
from ampwise.report.live.run_state import format_duration, one_line, state_of
from ampwise.runs.events import LoggedEvent
from ampwise.runs.reader import Run
from ampwise.runs.rows import LayerSample, StepBucket

from ...for_each import for_each
from .live_toys import FADING, HEALTHY, clipped, layers, step

CREATED = 1_700_000_000.0


def run_of(steps=120, findings=(), samples=(), **manifest):
    """A run of that many steps, or of those buckets."""
    plain = {
        "status": "running",
        "script": "train.py",
        "created": "2023-11-14T22:13:20+00:00",
        "facts": {"precision": "fp16"},
    }
    rows = [StepBucket.of(step(number)) for number in range(1, steps + 1)] if isinstance(steps, int) else steps
    return Run(folder=Path("run"), manifest=plain | manifest, steps=rows, findings=list(findings), layers=list(samples))


def text_of(run, width=100, height=40, encoding="utf-8", **when):
    paper = TerminalSize(width=width, height=height, encoding=encoding)
    return "\n".join(line.plain for line in draw_frame(run, state_of(run, **when), paper))


hostile = st.text(max_size=60) | st.sampled_from(
    ["\x1b[2J", "[bold]x[/bold]", "名前" * 30, "a\nb", "\u202e", "x" * 500]
)


@given(
    width=st.integers(1, 160),
    height=st.integers(1, 50),
    encoding=st.sampled_from(["utf-8", "ascii", "latin-1", "cp437"]),
    steps=st.integers(0, 150),
    messages=st.lists(hostile, max_size=12),
    names=st.lists(hostile, max_size=12, unique=True),
    script=hostile,
)
def test_it_always_fits(width, height, encoding, steps, messages, names, script):
    samples = [LayerSample(first=1, last=1, scale=65536.0, layers=dict.fromkeys(names, FADING))] if names else []
    run = run_of(steps, [clipped(message or "x") for message in messages], samples, script=script)
    paper = TerminalSize(width=width, height=height, encoding=encoding)
    lines = draw_frame(run, state_of(run), paper)
    assert 0 < len(lines) <= height
    for line in lines:
        assert cell_len(line.plain) <= width
        line.plain.encode(encoding)
        assert all(char.isprintable() or char.isspace() for char in line.plain)
        assert not set(line.plain) & set("\x1b\n\r\t\u202e")


def test_a_long_list_is_cut_and_counted():
    many = [clipped(f"finding {number:02}", count=100 - number) for number in range(40)]
    names = [f"block.{number}.weight" for number in range(40)]
    run = run_of(findings=many, samples=[layers(120, names)])
    text = text_of(run, height=24)
    assert "40 errors in 120 steps of train.py (fp16, scaler)." in text
    shown = sum(f"finding {number:02}" in text for number in range(40))
    named = sum(f"{name}" in text.split() for name in names)
    assert shown >= 2
    assert named >= 1
    assert f"… and {40 - shown} more findings" in text
    assert f"… and {40 - named} more layers" in text
    assert "finding 00" in text  # the most frequent stay
    everything = text_of(run, height=200)
    assert all(name in everything for name in names)
    assert "more" not in everything


def test_of_each_kind_of_event_the_last_is_shown_after_the_findings():
    events = [
        LoggedEvent(name="step-skipped", level="info", message=f"skipped {step}", step=step) for step in range(100)
    ]
    events.append(LoggedEvent(name="rolled-back", level="warning", message="went\nback \x1b", step=101))
    run = replace(run_of(findings=[clipped("a finding")]), events=events)
    text = text_of(run)
    assert (
        text.index("a finding")
        < text.index("rolled-back step 101  went back \\x1b")
        < text.index("step-skipped step 99")
    )
    assert text.count("step-skipped") == 1
    assert "  findings 1 (AMP101)  events 101" in one_line(state_of(run))


def test_findings_come_before_layers_in_a_low_terminal():
    text = text_of(run_of(findings=[clipped()], samples=[layers(120)]), width=40, height=9)
    assert "error[AMP101] train.py:31 ×120" in text
    assert "loss" in text


def test_the_worst_comes_first():
    mild = clipped("mild")
    mild.finding = mild.finding.but(rule=mild.finding.rule.but(code="AMP999", severity=Severity.INFO))
    text = text_of(run_of(findings=[mild, clipped("bad")]))
    assert text.index("error[AMP101]") < text.index("note[AMP999]")


def test_layers_that_lose_nothing_are_reported_in_a_line():
    fine = LayerSample(first=1, last=1, scale=65536.0, layers={"stem": HEALTHY, "head": HEALTHY})
    assert "none of 2 layers loses gradients in FP16" in text_of(run_of(samples=[fine]))
    in_bf16 = text_of(run_of(samples=[fine], facts={"precision": "bf16"}))
    assert "layers" not in in_bf16  # nothing was measured that could be said


def test_layers_are_those_of_now():
    """One that lost much long ago no longer does, and another is no longer trained."""
    bad, good = layers(1), LayerSample(first=9, last=9, scale=65536.0, layers={"stem.weight": HEALTHY})
    assert {"stem.weight", "head.weight"} <= set(text_of(run_of(samples=[bad])).split())
    assert not {"stem.weight", "head.weight"} & set(text_of(run_of(samples=[bad, *[good] * 8])).split())


def test_numbers_that_are_not_finite_are_shown_as_they_are():
    rows = [StepBucket.of(step(1)), StepBucket.of(step(2, loss=math.nan, norm=-math.inf))]
    run = run_of(steps=rows)
    text = text_of(run)
    assert "loss            NaN" in text
    assert "norm           -inf" in text
    assert one_line(state_of(run)).startswith("step 2  loss NaN  scale 65536  norm -inf  skipped 0")


def test_what_was_never_measured_has_no_line():
    rows = [StepBucket.of(step(1, scale=None, norm=None))]
    drawn = [
        line.plain.split()[0] for line in draw_curves(state_of(run_of(steps=rows)), TerminalSize(width=80, height=10))
    ]
    assert drawn == ["loss", "skipped"]
    assert one_line(state_of(run_of(steps=rows))) == "step 1  loss 8  skipped 0  findings 0"
    assert "no step yet" in text_of(run_of(steps=[]))


def test_several_optimizers_show_the_first_and_name_it():
    rows = [StepBucket.of(step(number, optimizer=which)) for number in (1, 2, 3) for which in (0, 1)]
    facts = {"optimizers": [{"index": 0, "name": "AdamW", "model": "Generator"}]}
    assert "step 3 of AdamW of Generator" in text_of(run_of(steps=rows, facts=facts))


# --- time ----------------------------------------------------------------------------------------------------------


@for_each(
    ("manifest", "wanted"),
    [
        ({}, "step 120 · 10 steps/s · running 3 min"),
        ({"status": "finished", "finished": "2023-11-15T00:13:50+00:00"}, "step 120 · finished after 2 h 0 min"),
        ({"status": "failed", "finished": None}, "step 120 · failed"),
        ({"created": "yesterday"}, "step 120 · 10 steps/s · running"),
        ({"created": None}, "step 120 · 10 steps/s · running"),
        ({"status": "odd\x1b"}, r"step 120 · odd\x1b"),
    ],
)
def test_how_it_stands(manifest, wanted):
    assert wanted in text_of(run_of(**manifest), clock=CREATED + 200).splitlines()


def test_a_killed_run_stops_at_its_last_step(monkeypatch):
    run = run_of()
    monkeypatch.setattr(Run, "alive", property(lambda _: False))
    text = text_of(run, clock=CREATED + 9999)
    assert "The run was killed before it could finish its record" in text
    assert "step 120 · killed after 12 s" in text


def test_a_run_that_writes_nothing_is_reported():
    run = run_of()
    assert "nothing written" not in text_of(run, written=CREATED, clock=CREATED + 50)
    assert "· nothing written for 5 min" in text_of(run, written=CREATED, clock=CREATED + 300)
    assert "nothing written for 5 min" in one_line(state_of(run, written=CREATED, clock=CREATED + 300))
    ended = run_of(status="finished")
    assert "nothing written" not in text_of(ended, written=CREATED, clock=CREATED + 300)


@given(st.floats(0, 1e9))
def test_times_in_words_are_never_longer_than_they_were(seconds):
    units = {"s": 1, "min": 60, "h": 3600, "d": 86400}
    words = format_duration(seconds).replace(",", "").split()
    told = sum(int(number) * units[unit] for number, unit in zip(words[::2], words[1::2], strict=True))
    assert told <= seconds < told + 86400 / 24
    assert (seconds < 60) == (words[1] == "s")


@pytest.mark.nightly
def test_a_frame_of_a_long_run_is_cheap():
    """A watcher beside a training, of 50,000 rows and 500 samples of 300 layers: as much as a record ever has."""
    rows = [StepBucket.of(step(number)) for number in range(1, 50_001)]
    names = [f"block.{number}" for number in range(300)]
    run = run_of(steps=rows, samples=[layers(number, names) for number in range(500)])
    began = time.perf_counter()
    text = text_of(run)
    took = time.perf_counter() - began
    assert "step 50,000" in text
    assert took < 60, f"{took:.2f} s"  # half a second on a quiet machine


def test_trouble_is_reported_in_one_harmless_line():
    run = replace(run_of(), trouble=["steps.jsonl:\n3 of \x1b[2J9 lines cannot be read.", "a second", "a third"])
    told = r"steps.jsonl: 3 of \x1b[2J9 lines cannot be read. (and 2 more)"
    assert text_of(run).splitlines()[2] == told
    assert "cannot be read" not in text_of(run_of())
    assert "trouble" not in one_line(state_of(run_of()))
    assert one_line(state_of(run)).endswith("  trouble: steps.jsonl: 3 of \x1b[2J9 lines cannot be read. (and 2 more)")
