"""The page: well formed, quiet, small, and deaf to what a record tries to say to a browser."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.census.algebra import Census
from ampwise.finding import Place
from ampwise.printers.terminal import printable
from ampwise.record.bucket import Bucket
from ampwise.record.reader import Run
from ampwise.record.rows import Seen, StepRow
from ampwise.report.chart import chart
from ampwise.report.curves import thinned
from ampwise.report.page import MARK, page

VOID = {"meta", "br"}
TAGS = """html head meta title style body main h1 h2 h3 p code pre span i b article figure figcaption svg path text
    tspan sup div table thead tbody tr th td ul li details summary footer br"""
ATTRIBUTES = """lang charset name content http-equiv class d viewbox role aria-label x y dy text-anchor font-size width
    height"""
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x1b[2J\u202e\udc80\n</style>"


class Outline(HTMLParser):
    """Every tag closed in order, every tag and attribute one of ours; and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag in TAGS.split(), tag
        assert {name for name, _ in attrs} <= set(ATTRIBUTES.split()), attrs
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return "".join(self.words)


def test_all_is_there(make_run):
    facts = {
        "torch": {"torch": "2.13.0+cu130", "devices": ["A100", "H200"], "cuda": None},
        "timing": {"seconds_per_step": 0.01184, "half_share": 0.873},
        "activations": {"backbone": {"dtype": "float16", "largest": 32752.0}},
    }
    text = page(make_run(facts, {"ampwise": "0.1.0"}, trouble=["steps.jsonl is missing."]))
    found = Outline(text).text
    for expected in [
        "1 error, 1 warning in 120 steps of train.py (fp16, scaler): gradients are clipped while still scaled.",
        "train.py --epochs 3",
        "error[AMP101]",
        "train.py:31",
        "31      clip_grad_norm_(model.parameters(), 1.0)",
        "×120, first at step 1, last at step 120",
        "Call scaler.unscale_(optimizer) before clipping.",
        "init_scale=32768",
        "blocks.0.weight",
        "dead",
        "87.3%",
        "Every step was followed by one update of the scaler.",
        "Activations: run with --activations.",
        "gpu.name",
        "From 2026-11-15 10:00:00 UTC to 2026-11-15 10:05:00 UTC.",
        "2.13.0+cu130",
        "A100, H200",
        "0.1.0",
        "time a step11.8 ms",
        "backbone",
        "H200",
        "steps.jsonl is missing.",
        "runs/one",
    ]:
        assert expected in found
    assert found.index("AMP101") < found.index("AMP204")
    assert text.count('class="chart"') == 4
    assert text.count("skipped, step 50<") == 2  # marked beside the scale and the norm
    assert text.count("inf or NaN, step 7<") == 1
    assert text.count("<pre>") == 1
    assert "2<sup>−41</sup> to 2<sup>−7</sup>" in text  # of the histograms
    assert "cuda" not in found
    assert "once" not in found


def test_names_between_backquotes_are_code(make_run, rules):
    seen = Seen(finding=rules["clip"].at(Place(), "`clip<b>` sees ` alone", fix="`a` then `b`"))
    text = page(make_run(findings=[seen]))
    assert "<code>clip&lt;b&gt;</code> sees ` alone" in text
    assert "<code>a</code> then <code>b</code>" in text


def test_it_needs_nothing_and_runs_nothing(make_run):
    text = page(make_run())
    assert MARK in text[:500]
    assert not re.search(r"https?:|//|url\(|@import|<script|<link|<img|\son\w+=|javascript:", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text


def test_hostile_names(make_run, make_sample, rules):
    finding = rules["clip"].at(Place(file=HOSTILE, line=2), HOSTILE, evidence={HOSTILE: HOSTILE}, fix=HOSTILE)
    run = make_run(
        findings=[Seen(finding=finding, excerpt={"first_line": 1, "lines": [HOSTILE, HOSTILE]})],
        layers=[make_sample(1, {HOSTILE: Census(zeros=1)})],
        folder=HOSTILE,
        trouble=[HOSTILE],
        manifest={
            "script": HOSTILE,
            "command": [HOSTILE],
            "created": HOSTILE,
            "finished": HOSTILE,
            "environment": {HOSTILE: {HOSTILE: [HOSTILE]}},
            "status": HOSTILE,
        },
        facts={
            "what_was_fine": [HOSTILE],
            "not_measured": [HOSTILE],
            "precision": HOSTILE,
            "settings": [{"name": HOSTILE, "value": HOSTILE, "reason": HOSTILE}],
            "timing": {HOSTILE: HOSTILE, "seconds_per_step": HOSTILE},
            "activations": {HOSTILE: {"dtype": HOSTILE, "largest": 1.0}},
            "optimizers": [{"index": 0, "name": HOSTILE, "model": HOSTILE}],
            "torch": {HOSTILE: HOSTILE},
            "modules": [{"name": HOSTILE, "kind": HOSTILE, "precision": HOSTILE}],
        },
    )
    text = page(run)
    outline = Outline(text)  # which knows no script and no img
    assert outline.text.count("<script>alert(1)</script>") > 15
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e\udc80]", text)
    text.encode("utf-8")


@given(name=st.text(min_size=1))
def test_any_name_comes_out_as_text(name):
    text = page(Run(folder=Path("r"), manifest={"script": name, "status": "finished"}))
    assert printable(name) in Outline(text).text


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"findings": [], "steps": [], "layers": [], "manifest": {"facts": {}}}, "which took no step"),
        ({"manifest": {"status": "running", "finished": None}}, "or was killed"),
        ({"findings": []}, "No findings in 120 steps"),
        ({"findings": [], "manifest": {"status": "failed", "exit_code": 1}}, "The script failed (exit code 1)."),
        ({"manifest": {"command": "text", "created": None, "environment": 3}}, "1 error"),
    ],
)
def test_other_runs(make_run, changed, told):
    text = page(make_run(**changed))
    assert told in Outline(text).text
    assert ("<svg" in text) == (changed.get("steps") != [])


def test_a_week_long_run_is_a_small_page_with_its_extremes(make_run, make_sample):
    """A hundred thousand points, three hundred layers; a spike of one step is still seen."""
    steps = [
        Bucket.of(StepRow(step=n, loss=1.0 + (n == 54_321) * 40, scale=2.0 ** (n % 24), norm=1.0, skipped=n % 9 == 0))
        for n in range(1, 100_001)
    ]
    census = Census(binades={e: abs(e) for e in range(-60, -1)}, amax=0.4, amin=2.0**-59.5)
    layers = {f"module.transformer.encoder.layers.{n}.attention.projection.weight": census for n in range(300)}
    text = page(make_run(steps=steps, layers=[make_sample(1, layers)]))
    assert len(text.encode()) < 1_000_000
    curve = re.search(r'aria-label="Loss over steps".*?class="band line0" d="([^"]*)"', text).group(1)
    heights = [float(spot.split()[1]) for spot in re.split("[MLZ]", curve) if spot]
    assert min(heights) < 25  # the spike, near the top
    assert sorted(heights)[1] > 100  # and nothing else is


def test_a_chart_of_nothing_is_nothing_and_of_nans_says_so():
    unknown = [Bucket.of(StepRow(step=n)) for n in range(1, 5)]
    assert chart("Loss", "loss", unknown) == ""
    assert chart("Loss", "loss", []) == ""
    broken = [Bucket.of(StepRow(step=n, loss=float("nan"))) for n in range(1, 5)]
    assert "At no step was this a finite number." in chart("Loss", "loss", broken)


def test_a_line_is_broken_where_nothing_was_measured():
    rows = [StepRow(step=n, loss=None if n == 3 else 1.0 * n) for n in range(1, 6)]
    drawn = chart("Loss", "loss", [Bucket.of(row) for row in rows])
    assert re.search(r'class="line line0" d="([^"]*)"', drawn).group(1).count("M") == 2


def test_each_optimizer_has_a_line():
    rows = [StepRow(optimizer=optimizer, step=n, loss=1.0) for optimizer in range(8) for n in (1, 2)]
    drawn = chart("Loss", "loss", [Bucket.of(row) for row in rows])
    assert drawn.count('class="line ') == 6
    assert "optimizer 5" in drawn
    assert "2 more not drawn" in drawn
    named = chart("Loss", "loss", [Bucket.of(row) for row in rows], names={5: "Adam of <Generator>"})
    assert "optimizer 4" in named
    assert "Adam of &lt;Generator&gt;" in named
    assert "optimizer 5" not in named


def test_a_failure_is_no_good_news(make_run):
    text = page(make_run(findings=[], manifest={"status": "failed", "exit_code": 1}))
    assert '<h1 class="error">The script failed (exit code 1).</h1>' in text
    assert '<p class="soft">No findings in 120 steps of train.py (fp16, scaler).</p>' in text


def test_a_run_in_bf16_has_no_columns_of_fp16(make_run):
    found = Outline(page(make_run({"precision": "bf16"}))).text
    assert "share" in found
    assert "lost" not in found
    assert "subnormal" not in found


def test_names_stay_in_sight_while_numbers_scroll(make_run):
    text = page(make_run())
    assert re.search(r"td\.name \{[^}]*position: sticky", text)
    heads = re.findall(r"<th(?: [^>]*)?>(.*?)</th>", text)
    assert heads[heads.index("layer") :][:6] == ["layer", "share", "norm", "largest", "lost, est.", "subnormal"]


@given(st.lists(st.none() | st.floats(), min_size=1, max_size=30), st.booleans())
def test_every_chart_can_be_drawn(values, powers):
    buckets = thinned([Bucket.of(StepRow(step=n, norm=value)) for n, value in enumerate(values, 1)], 7)
    drawn = chart("Norm", "norm", buckets, powers_of_two=powers, skips=True)
    assert not re.search(r"nan|inf(?! or NaN)", drawn.replace("inf or NaN", ""))
    for number in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", drawn):
        assert -1 <= float(number[0]) <= 481
        assert -1 <= float(number[1]) <= 191
