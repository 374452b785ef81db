"""The page as text: well formed, quiet, small, and deaf to what a record tries to say to a browser."""

import base64
import gzip
import hashlib
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.finding import Place
from ampwise.finding.terminal import printable
from ampwise.numbers.census.algebra import Census
from ampwise.report.page import GENERATOR_MARK, comparison_page, page, update
from ampwise.report.page.run_view import finding_card
from ampwise.report.page.syntax import coloured
from ampwise.report.page.templates import template
from ampwise.report.verdict import setup_of
from ampwise.runs.events import LoggedEvent
from ampwise.runs.reader import Run
from ampwise.runs.rows import CountedFinding, StepBucket, StepRow

from ...night import NIGHTLY

VOID = {"meta", "br", "input"}
TAGS = """html head meta title style script body main header section a p h1 h2 h3 code pre span i b article figure
    figcaption svg sup div table thead tbody tr th td ul ol li dl dt dd details summary footer br canvas label select
    input output button noscript nav"""
NAMES = ("timing", "memory", "dtype_flow", "activations", "optimizers")
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x1b[2J\u202e\udc80\n</style>"


class Outline(HTMLParser):
    """Every tag closed in order, every tag one of ours, no attribute that runs anything; and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.links, self.ids, self.scripts = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag in TAGS.split(), tag
        given = dict(attrs)
        assert not any(name.startswith("on") for name in given), attrs
        assert not given.keys() & {"src", "action", "srcdoc", "formaction"}, attrs
        self.links += [given["href"]] if "href" in given else []
        self.ids += [given["id"]] if "id" in given else []
        self.scripts += [given.get("type")] if tag == "script" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self):
        return "".join(self.words)


def data_of(text):
    packed = re.search(r'<script type="application/octet-stream" id="data">([^<]*)<', text).group(1)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


FACTS = {
    "torch": {"torch": "2.13.0+cu130", "devices": ["A100", "H200"], "cuda": None},
    "timing": {
        "seconds_per_step": 0.01184,
        "half_share": 0.873,
        "time_by_kind": {"matrix": 3.0, "casts": 1.0},
        "flops_by_precision": {"fp16": 87.3, "fp32": 12.7},
        "matrix_products": [
            {"op": "mm", "shape": "8×8 @ 8×7", "precision": "fp16", "flops": 9.0, "count": 2, "aligned": False}
        ],
        "syncs": {"train.py:9": 12},
    },
    "memory": {
        "parameters": {"fp32": 4 * 2**20},
        "gradients": {"fp32": 4 * 2**20},
        "optimizer": {"fp32": 8 * 2**20},
        "devices": {
            "cuda:0": {"peak_allocated": 48 * 2**20, "peak_reserved": 64 * 2**20, "total": 2**30, "rest": 32 * 2**20}
        },
        "host_peak": 2**29,
    },
    "dtype_flow": [
        {"module": "Net", "kind": "Net", "model": "Net", "takes": ["fp32"], "gives": ["fp16"], "calls": 1},
        {
            "module": "stem.0",
            "kind": "Linear",
            "model": "Net",
            "takes": ["fp32"],
            "gives": ["fp16"],
            "parameters": ["fp32"],
            "autocast": "fp16",
            "calls": 1,
        },
        {
            "module": "stem.1",
            "kind": "LayerNorm",
            "model": "Net",
            "takes": ["fp16"],
            "gives": ["fp32"],
            "parameters": ["fp32"],
            "autocast": "fp16",
            "calls": 3,
        },
    ],
    "activations": {"backbone": {"dtype": "float16", "largest": 32752.0}},
}


def test_events_are_in_the_page_and_in_its_updates(make_run):
    rolled = LoggedEvent(
        name="rolled-back", level="warning", message="went <b>back</b>", step=1200, advice="Look at it."
    )
    run = make_run(events=[rolled])
    for text in (page(run), update(run)["parts"]["events"]):
        assert "rolled-back" in text
        assert "1,200" in text
        assert "went &lt;b&gt;back&lt;/b&gt;" in text
        assert "Look at it." in text
    assert update(make_run())["parts"]["events"].strip() == ""


def test_all_is_there(make_run):
    text = page(make_run(FACTS, {"ampwise": "0.1.0"}, trouble=["steps.jsonl is missing."]))
    outline = Outline(text)
    for expected in [
        "Gradients are clipped while still scaled",
        "1 error1 warning",
        "train.py --epochs 3",
        "clip-scaled-grads",
        "train.py:31",
        "    clip_grad_norm_(model.parameters(), 1.0)",
        "120 times, steps 1 to 120",
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
        "11.8 ms",
        "backbone",
        "steps.jsonl is missing.",
        "runs/one",
        "matmuls 75.0%",
        "not aligned",
        "12 × device sync",
        "optimizer state 16.7% fp32 8 MiB",
        "activations and other 66.7%",
        "cuda:0: peak of 48 MiB in use, 64 MiB reserved by torch, of 1 GiB.",
        "1 in fp16, 1 in fp32",
        "stem.1",
        "The threshold is 65536 times too small.",
    ]:
        assert expected in outline.text
    assert outline.text.index("AMP101") < outline.text.index("AMP204")
    assert "cuda\n" not in outline.text


def test_every_link_leads_somewhere_and_every_place_is_one(make_run):
    outline = Outline(page(make_run(FACTS)))
    assert len(outline.ids) == len(set(outline.ids))
    assert {link.removeprefix("#") for link in outline.links} <= set(outline.ids)
    assert {"#rule-AMP101", "#finding-1", "#findings", "#environment"} <= set(outline.links)


def test_names_between_backquotes_are_code(make_run, rules):
    seen = CountedFinding(finding=rules["clip"].at(Place(), "`clip<b>` sees ` alone", fix="`a` then `b`"))
    text = page(make_run(findings=[seen]))
    assert "<code>clip&lt;b&gt;</code> sees ` alone" in text
    assert "<code>a</code> then <code>b</code>" in text


def test_lines_of_code_in_a_fix_are_code_as_it_stands(make_run, rules):
    fix = "Clamp it:\n    x = `a`<b>\nIn general: `c`"
    text = page(make_run(findings=[CountedFinding(finding=rules["clip"].at(Place(), "m", fix=fix))]))
    assert 'Clamp it:<br><code class="indented">    x = `a`&lt;b&gt;</code><br>In general: <code>c</code>' in text


DIFF = "--- train.py\n+++ train.py\n@@ -30,2 +30,3 @@\n     scale()\n+    unscale_()\n-    clip()"


def test_a_fix_is_a_diff_its_own_where_there_is_one(make_run, rules):
    place = Place(file="train.py", line=31)
    own, other = (CountedFinding(finding=rules["clip"].at(place, "m"), diff=text) for text in (DIFF, ""))
    text = page(make_run(findings=[own]))
    shown = re.sub(r"</?b[^>]*>", "", text)  # the colours of the syntax
    assert '<span><i>30</i><i class="sign"></i>    scale()</span>' in shown
    assert '<span class="added"><i></i><i class="sign">+</i>    unscale_()</span>' in shown
    assert '<span class="here removed"><i>31</i><i class="sign">-</i>    clip()</span>' in shown
    assert "Example of the fix" not in text
    assert "review it before you apply it" not in text
    assert "ampwise check --fix train.py</code>" in text
    own.diff_is_safe = False
    text = page(make_run(findings=[own]))
    assert "review it before you apply it" in text
    assert "ampwise check --fix" not in text, "the fix is not a safe one"
    shown = re.sub(r"</?b[^>]*>", "", page(make_run(findings=[other])))
    assert '<i class="sign">-</i>clip()</span>' in shown
    assert '<i class="sign">+</i>unscale(); clip()</span>' in shown


@pytest.mark.parametrize(
    ("file", "folder", "address"),
    [
        ("train.py", "/home/a b", "vscode://file/home/a%20b/train.py:31"),
        ("/x/train.py", "/home/a", "vscode://file/x/train.py:31"),
        ("C:\\x\\train.py", "", "vscode://file/C:/x/train.py:31"),
        ("train.py", "", ""),
        ("<ipython-input-1>", "/home/a", ""),
        ('/x/"><script>.py', "/home/a", "vscode://file/x/%22%3E%3Cscript%3E.py:31"),
    ],
)
def test_a_place_opens_in_an_editor(make_run, rules, file, folder, address):
    finding = CountedFinding(finding=rules["clip"].at(Place(file=file, line=31), "m"))
    text = page(make_run(findings=[finding], manifest={"environment": {"folder": folder} if folder else {}}))
    assert [link for link in Outline(text).links if not link.startswith("#")] == ([address] if address else [])


def test_what_a_finding_cost_is_said_in_the_title_the_overview_and_its_card(make_run, rules):
    clip = CountedFinding(
        finding=rules["clip"].at(Place(file="train.py", line=31), "m", evidence={"limit": 1.0}),
        count=120,
        first_step=1,
        last_step=120,
    )
    skips = rules["save"].but(code="AMP609", name="skip-rate").at(Place(step=120), "m")
    ahead = rules["save"].but(code="AMP114", name="sched-step-unconditional").at(Place(file="train.py", line=9), "m")
    found = [clip, CountedFinding(finding=skips), CountedFinding(finding=ahead, count=7)]
    text = Outline(page(make_run(findings=found))).text
    assert text.count("effective clip 1.5e-05 to 3.1e-05 instead of 1") == 3  # at loss scales of 65536 and 32768
    assert "skipped 1.7% of steps: +1.7% time" in text
    assert "7 scheduler steps ahead of the optimizer" in text
    text = Outline(page(make_run())).text
    assert "about 1 skipped step at each resume" in text


def test_consequences_are_folded_below_their_cause(make_run, rules):
    messages = ("the <b>loss</b> is NaN", "and `more`")
    consequences = [CountedFinding(finding=rules["save"].at(Place(), message)) for message in messages]
    counted = CountedFinding(finding=rules["clip"].at(Place(), "m"))
    assert finding_card(counted, "finding-1").consequences == []
    card = finding_card(replace(counted, consequences=consequences), "finding-1")
    text = str(template("parts.html").module.card(card))
    assert "2 consequences of it</summary>" in text
    assert "AMP204 scaler-not-checkpointed: the &lt;b&gt;loss&lt;/b&gt; is NaN" in text
    assert "and <code>more</code>" in text


def test_code_stays_on_its_lines(make_run, rules):
    rule = rules["clip"].but(bad="one(1)\n    two()", good="one(1)\n\n    three()")
    text = page(make_run(findings=[CountedFinding(finding=rule.at(Place(), "m"))]))
    one = '<b class="f">one</b>(<b class="n">1</b>)'
    assert f'>{one}\n    <b class="f">two</b>()</pre>' in text
    assert f'>{one}\n\n    <b class="f">three</b>()</pre>' in text
    assert "\\n" not in "".join(re.findall(r"<pre.*?</pre>", text, re.DOTALL))


@given(st.lists(st.text(), max_size=4))
def test_any_lines_are_coloured_and_keep_their_text(lines):
    shown = [html.unescape(re.sub(r"</?b[^>]*>", "", line)) for line in coloured(lines)]
    assert shown == [printable(line.expandtabs(4)[:400]) for line in lines]


def test_a_line_that_contains_the_end_of_one_stays_one_line():  # in a forged record
    assert coloured(["'''a\n\n\n\r\n", "'''"])[0].endswith(r"a\n\n\n\r\n</b>")


def test_half_a_string_is_coloured_line_by_line():
    assert coloured(["    '''open", "if x:"]) == ["    &#39;&#39;&#39;open", '<b class="k">if</b> x:']
    assert coloured(["f(", "'a'", ") # b"]) == [
        '<b class="f">f</b>(',
        '<b class="s">&#39;a&#39;</b>',
        ') <b class="c"># b</b>',
    ]


def test_a_power_of_two_stays_one(make_run):
    run = make_run(steps=[StepBucket.of(StepRow(step=1, loss=1.23456789, scale=2.0**27))])
    (line,) = data_of(page(run))["curves"]
    assert line["scale"]["mean"] == [2.0**27]
    assert line["loss"]["mean"] == [1.23457]
    assert "<dd>2<sup>27</sup>" in page(run)


def test_every_optimizer_has_room_for_its_worst_layers(make_run, make_sample):
    census = Census(binades={-3: 5}, amax=2**-2.5, amin=2**-2.5)
    many = make_sample(1, {f"a{n}": census for n in range(450)})
    run = make_run(layers=[many, make_sample(1, {"b": census}, optimizer=1)])
    text = page(run)
    names = [layer["name"] for layer in data_of(text)["layers"]]
    assert len(names) == 201
    assert "b (optimizer 1)" in names
    assert len(re.findall("data-layer=", text.split("<script>")[0])) == 201
    assert "… and 250 more layers" in text


def test_the_skip_rate_says_of_what(make_run, make_steps):
    assert data_of(page(make_run()))["titles"]["skip_rate"] == "Skipped, of the last 100 steps"
    long = [StepBucket(first=1 + n * 1000, last=1000 + n * 1000, count=1000) for n in range(5)]
    assert data_of(page(make_run(steps=long)))["titles"]["skip_rate"].endswith("or the point's own steps")


def test_it_needs_nothing_and_runs_only_what_is_ours(make_run):
    for text in (page(make_run()), comparison_page(make_run(), make_run())):
        assert GENERATOR_MARK in text[:500]
        assert Outline(text).scripts == ["application/octet-stream", None]
        script = re.search(r"<script>(.*?)</script>", text, re.DOTALL).group(1)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src &#39;sha256-{digest}&#39;" in text
        assert "default-src &#39;none&#39;" in text
        assert "connect-src" not in text
        plain = text.replace(script, "")
        assert not re.search(r"https?:|url\(|@import|<link|<img|javascript:", plain)
        assert "prefers-color-scheme: dark" in text


def test_only_a_live_page_may_ask_and_only_its_own_server(make_run):
    text = page(make_run(), live=True)
    assert "connect-src &#39;self&#39;" in text
    assert '<html lang="en" data-live="2.0">' in text


def test_the_library_has_its_licence():
    import ampwise.report.page

    folder = Path(ampwise.report.page.__file__).parent / "vendor"
    assert "MIT" in (folder / "uPlot.LICENSE").read_text()
    assert "v1.6.32" in (folder / "uPlot.iife.min.js").read_text()[:100]


def hostile_run(make_run, make_sample, rules):
    finding = rules["clip"].at(Place(file=HOSTILE, line=2), HOSTILE, evidence={HOSTILE: HOSTILE}, fix=HOSTILE)
    return make_run(
        findings=[
            CountedFinding(finding=finding, excerpt={"first_line": 1, "lines": [HOSTILE, HOSTILE]}, diff=f"+{HOSTILE}")
        ],
        layers=[
            make_sample(
                1, {HOSTILE: Census(zeros=1), f"{HOSTILE}2": Census(binades={-9: 4}, amax=2**-8.5, amin=2**-8.5)}
            )
        ],
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
            "timing": {
                HOSTILE: HOSTILE,
                "seconds_per_step": HOSTILE,
                "time_by_kind": {HOSTILE: 1.0},
                "data_waits": {HOSTILE: 1.0},
                "matrix_products": [{"op": HOSTILE, "shape": HOSTILE, "flops": 1}],
            },
            "memory": {
                "parameters": {HOSTILE: 7},
                "devices": {HOSTILE: {"peak_allocated": HOSTILE}},
                "host_peak": HOSTILE,
            },
            "dtype_flow": [
                {"module": HOSTILE, "kind": HOSTILE, "takes": [HOSTILE], "gives": [HOSTILE], "autocast": HOSTILE}
            ],
            "activations": {HOSTILE: {"dtype": HOSTILE, "largest": 1.0}},
            "optimizers": [{"index": 0, "name": HOSTILE, "model": HOSTILE}],
            "torch": {HOSTILE: HOSTILE},
        },
    )


def test_hostile_names(make_run, make_sample, rules):
    run = hostile_run(make_run, make_sample, rules)
    for text in (page(run), comparison_page(run, run)):
        outline = Outline(text)  # which knows no img and no handler
        assert outline.scripts == ["application/octet-stream", None]
        assert outline.text.count("<script>alert(1)</script>") > 4
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e\udc80]", text)
        assert not re.search("[\x00-\x1f\u202e\udc80]", json.dumps(data_of(text), ensure_ascii=False))
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
        ({"findings": []}, "No findings"),
        ({"findings": [], "manifest": {"status": "failed", "exit_code": 1}}, "The script failed (exit code 1)"),
        ({"manifest": {"command": "text", "created": None, "environment": 3}}, "1 error"),
        ({"facts": dict.fromkeys(NAMES, 7)}, "1 error"),
        ({"facts": {name: [7] for name in NAMES}}, "1 error"),
        ({"facts": {"memory": {"parameters": 3, "devices": 4}, "timing": {"time_by_kind": "x"}}}, "1 error"),
    ],
)
def test_other_runs(make_run, changed, told):
    text = page(make_run(**changed))
    assert told in Outline(text).text
    assert bool(data_of(text)["curves"]) == (changed.get("steps") != [])


@pytest.mark.nightly
def test_a_week_long_run_is_a_small_page_with_its_extremes(make_run, make_sample):
    """A hundred thousand points at night, three hundred layers; a spike of one step is still there."""
    last, spike = (100_000, 54_321) if NIGHTLY else (20_000, 4_321)
    steps = [
        StepBucket.of(
            StepRow(step=n, loss=1.0 + (n == spike) * 40, scale=2.0 ** (n % 24), norm=1.0, skipped=n % 9 == 0)
        )
        for n in range(1, last + 1)
    ]
    census = Census(binades={e: abs(e) for e in range(-60, -1)}, amax=0.4, amin=2.0**-59.5)
    layers = {f"module.transformer.encoder.layers.{n}.attention.projection.weight": census for n in range(300)}
    text = page(make_run(steps=steps, layers=[make_sample(n * last // 200, layers) for n in range(1, 201)]))
    assert len(text.encode()) < 1_500_000
    (line,) = data_of(text)["curves"]
    assert len(line["first"]) <= 3000
    assert max(line["loss"]["high"]) == 41.0
    assert min(line["loss"]["low"]) == 1.0
    assert sum(line["skipped"]) == last // 9
    at = line["loss"]["high"].index(41.0)
    assert line["first"][at] <= spike <= line["last"][at]


def test_a_failure_is_no_good_news(make_run):
    text = page(make_run(findings=[], manifest={"status": "failed", "exit_code": 1}))
    assert '<h1 class="error">The script failed (exit code 1)</h1>' in text
    assert '<p class="lead">No findings in 120 steps of <code>train.py</code> (fp16, scaler).</p>' in text


def test_a_run_in_bf16_has_no_columns_of_what_fp16_lost(make_run):
    text = page(make_run({"precision": "bf16"}))
    heads = re.findall(r'<table class="layers">\s*<thead>(.*?)</thead>', text)
    assert all(">share<" in head for head in heads)
    assert "lost" not in "".join(heads)


def test_layers_with_nothing_wrong_are_folded(make_run, make_sample):
    shown, folded = page(make_run()).split('<details id="layers-right">')
    assert "Layers with something wrong" in shown
    assert "<code>blocks.1.bias</code>" in shown
    assert "<summary>1 other layer: FP16 holds its gradients</summary>" in folded
    assert "<code>head.weight</code>" in folded
    healthy = Census(binades={-3: 5}, amax=2**-2.5, amin=2**-2.5)
    text = page(make_run(layers=[make_sample(1, {"a": healthy, "b": healthy})]))
    assert "something wrong" not in text
    assert "<summary>2 layers: FP16 holds their gradients</summary>" in text


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["/opt/bin/python", "/opt/bin/ampwise", "run", "a b.py"], ">ampwise run &#39;a b.py&#39;</code>"),
        (["python", "-m", "ampwise", "run", "x.py"], ">ampwise run x.py</code>"),
        (["python", "x.py", "ampwise"], ">python x.py ampwise</code>"),
    ],
)
def test_the_command_is_as_one_types_it(make_run, command, told):
    assert told in page(make_run(manifest={"command": command}))


def test_places_are_distinguished_from_where_the_script_ran(make_run, rules):
    inside, outside = (
        CountedFinding(finding=rules["clip"].at(Place(file=file, line=3), "m"))
        for file in ("/home/a/b/train.py", "/usr/x.py")
    )
    text = page(make_run(findings=[inside, outside], manifest={"environment": {"folder": "/home/a"}}))
    assert ">b/train.py:3</code>" in text
    assert ">/usr/x.py:3</code>" in text


def test_the_same_record_gives_the_same_page(make_run):
    assert page(make_run()) == page(make_run())


def test_news_are_the_parts_of_the_page_itself(make_run):
    run = make_run(FACTS)
    news, text = update(run), page(run)
    assert json.loads(json.dumps(news["data"], allow_nan=False)) == data_of(text)
    for name, markup in news["parts"].items():
        assert f'data-part="{name}"' in text
        assert markup in text
    assert news["title"] == "Gradients are clipped while still scaled · train.py"
    assert news["state"] == {"name": "ended", "words": "ended: finished"}


def test_two_runs(make_run, rules):
    before = make_run(folder=Path("runs/a"))
    after = make_run(folder=Path("runs/b"), findings=[])
    text = comparison_page(before, after)
    outline = Outline(text)
    assert "All 2 findings are gone" in outline.text
    assert "Loss after 120 steps: " in outline.text
    assert "Gone (2)" in outline.text
    assert "2 new findings: Gradients are clipped while still scaled" in Outline(comparison_page(after, before)).text
    assert "The same 2 findings in both runs" in Outline(comparison_page(before, make_run(folder=Path("b")))).text
    assert [line["name"] for line in data_of(text)["curves"]] == ["before", "after"]


def test_a_loss_that_is_a_sum_says_so(make_run):
    def title(passes):
        run = make_run({"backward_passes": passes, "steps": 10})
        assert ("4 backward passes per step, whose losses are added up" in setup_of(run)) == (passes == 40)
        return data_of(page(run))["titles"].get("loss")

    assert [title(passes) for passes in (40, 10, 37)] == ["Loss, sum of 4 backward passes", None, None]
