"""A comparison in the terminal and in a notebook."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ampwise.finding import Place
from ampwise.numbers.census.algebra import Census
from ampwise.report.comparison.comparison import Comparison
from ampwise.report.comparison.comparison_text import comparison_text, how_often
from ampwise.report.notebook import run_html
from ampwise.runs.rows import CountedFinding

HOSTILE = "<script>alert(1)</script>\x1b[2J\u202egpj.exe\n'\"[red]\udc80"

GOLDEN = """\
runs/two has 1 finding where runs/one had 2: 1 gone, none new; loss after 100
steps 0.04192 against 0.04192.
before  runs/one
after   runs/two

Still there (1)
  error[AMP101] clip-scaled-grads: `clip_grad_norm_` sees gradients multiplied
    by 65536
    train.py:31, at 100% of the steps before, at 3.0% now

Gone (1)
  warning[AMP204] scaler-not-checkpointed: The state of the scaler is not saved
    train.py:40

Differences in setup
  precision: fp16 → bf16
  device: unknown → cuda

Numbers
  The loss at the end is the mean over steps 91 to 100, the last that both runs
  have.
                              before    after
  steps                          120      100  −17%
  loss at the end            0.04192  0.04192  same
  lowest loss                   0.04     0.04  same
  median gradient norm           1.4      1.4  same
  last loss scale             32,768   32,768  same
  losses not finite                1        1  same
  skipped steps, whole run         2        2  same
  skip rate, common steps       2.0%     2.0%  same
  lost in FP16, worst layer    27.3%        –
  lost in FP16, all layers     20.9%        –
  matmuls in half precision    87.3%    95.0%  +7.7 points, better
  device syncs per step            1        –
"""


@pytest.fixture
def two(make_run, make_steps):
    """Two runs, the later of which has one finding less and came not as far."""
    before = make_run()
    clip = before.findings[1]
    rarer = CountedFinding(finding=clip.finding, count=3, first_step=1, last_step=3, excerpt=clip.excerpt, ranks=[0])
    facts = {"precision": "bf16", "timing": {"half_share": 0.95, "device": "cuda"}, "steps": 100}
    return before, make_run(facts, folder=Path("runs/two"), findings=[rarer], steps=make_steps(100))


def plain(compared, width=80):
    return comparison_text(compared, colour=False, width=width)


def test_the_text(two):
    assert plain(Comparison.of(*two)) == GOLDEN


def test_colour_changes_nothing_but_colour(two):
    compared = Comparison.of(*two)
    coloured = comparison_text(compared, colour=True, width=80)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain(compared)
    assert "\x1b[32m+7.7 points, better\x1b[0m" in coloured
    assert "\x1b[1;31merror[AMP101]\x1b[0m" in coloured


@pytest.mark.parametrize("width", [2, 60, 80, 120])
def test_it_keeps_to_the_width(two, make_run, make_sample, width):
    name = "module.transformer.encoder.layers.11.attention.projection.weight"
    layers = [{"layers": [make_sample(1, {name: Census(binades={n: 9}, sum_squares=4.0**n)})]} for n in (-8, -2)]
    compared = Comparison.of(make_run(**layers[0]), make_run(**layers[1], folder=Path("b")))
    assert "projection.weight" in plain(compared) or "…" in plain(compared)
    for text in (plain(compared, width), plain(Comparison.of(*two), width)):
        assert max(map(len, text.splitlines())) <= max(width, 80)


def test_two_clean_runs_are_calm(make_run):
    text = plain(Comparison.of(make_run(findings=[]), make_run(findings=[], folder=Path("b"))))
    assert text.startswith("Neither runs/one nor b has findings; ")
    for title in ("New", "Gone", "Still", "different", "Layers"):
        assert title not in text


def test_a_loss_that_is_better_comes_with_a_caution(make_run, make_steps):
    from dataclasses import replace

    from ampwise.report.comparison.numbers import SEED_WARNING
    from ampwise.runs.rows import NumberStats

    worse = [replace(one, loss=NumberStats.of(9.0)) for one in make_steps(120)]
    compared = Comparison.of(make_run(), make_run(steps=worse, folder=Path("b")))
    assert compared.caution == compared.as_dict()["caution"] == SEED_WARNING
    assert SEED_WARNING in " ".join(plain(compared).split())
    assert SEED_WARNING in compared._repr_html_()
    same = Comparison.of(make_run(), make_run(folder=Path("b")))
    assert same.caution == ""
    assert "seed" not in plain(same) + same._repr_html_()


def test_findings_that_could_not_be_read_are_neither_new_nor_gone(make_run):
    known, unknown = make_run(), make_run(findings=[], findings_known=False, folder=Path("b"))
    for pair, told in [
        ((known, unknown), "runs/one has 2 findings; the findings of b could not be read; "),
        ((unknown, known), "the findings of b could not be read; runs/one has 2 findings; "),
    ]:
        compared = Comparison.of(*pair)
        assert not compared.new
        assert not compared.gone
        assert compared.verdict.startswith(told)
        assert compared.mood == "warning"
        assert compared.notes == ("Some findings could not be read, so none is called new or gone.",)
        assert [one["code"] for one in compared.as_dict()["open"]] == ["AMP101", "AMP204"]
        text = plain(compared)
        assert text[0] == ("T" if pair[0] is unknown else "r")  # a sentence of ours, or the name of a folder
        assert "In one run, unknown for the other (2)" in text
        assert "AMP101" in text[text.index("unknown for the other") :]
        assert "unknown for the other" in compared._repr_html_()


def test_what_is_known_of_findings_read_in_part(make_run):
    whole = make_run()
    part = make_run(findings=whole.findings[:1], findings_known=False, folder=Path("b"))
    there, back = Comparison.of(whole, part), Comparison.of(part, whole)
    assert [one.status for one in there.findings] == [one.status for one in back.findings] == ["open", "still"]
    assert "the findings of b could not all be read" in there.verdict
    # What the run that is known as a whole does not have is gone, or new, in spite of the other.
    clean = make_run(findings=[], folder=Path("c"))
    assert [one.status for one in Comparison.of(part, clean).findings] == ["gone"]
    assert [one.status for one in Comparison.of(clean, part).findings] == ["new"]


def test_many_are_cut_and_counted(make_run, make_sample, rules):
    many = [CountedFinding(finding=rules["clip"].at(Place(file="t.py", line=n), "m")) for n in range(1, 31)]
    layers = [{f"l{n}": Census(binades={-8: 9}, sum_squares=norm) for n in range(40)} for norm in (1.0, 9.0)]
    compared = Comparison.of(
        make_run(findings=[], layers=[make_sample(1, layers[0])]),
        make_run(findings=many, layers=[make_sample(1, layers[1])], folder=Path("b")),
    )
    text = plain(compared)
    assert text.count("error[AMP101]") == 20
    assert "New (30)" in text
    assert "  … and 10 more\n" in text
    assert text.count("norm\n") == 10
    assert "  … and 30 more\n" in text


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ((120, 3), "at 100% of the steps before, at 2.5% now"),
        ((120, 120), "at 100% of the steps"),
        ((240, 60), "2 times per step before, 0.5 now"),
        ((1, 1), ""),
    ],
)
def test_how_often(make_run, counts, told):
    runs = []
    for count in counts:
        run = make_run()
        run.findings[1].count = count
        runs.append(run)
    assert how_often(next(one for one in Comparison.of(*runs).still if one.seen.finding.rule.code == "AMP101")) == told


@pytest.fixture
def hostile(make_run, make_sample, rules):
    """Two runs in which everything that can have a name has a bad one."""

    def make(number):
        finding = rules["clip"].at(Place(file=HOSTILE, line=2 + 900 * number), HOSTILE, fix=HOSTILE)
        other = rules["save"].at(Place(parameter=HOSTILE), HOSTILE, evidence={HOSTILE: HOSTILE})
        kept = {"first_line": 1 + 900 * number, "lines": [HOSTILE, f"{HOSTILE} {number}"]}
        return make_run(
            findings=[CountedFinding(finding=finding, excerpt=kept), CountedFinding(finding=other, count=9)],
            layers=[make_sample(1, {HOSTILE: Census(binades={-3: 2}, sum_squares=9.0**number)})],
            folder=Path(f"{HOSTILE}{number}"),
            trouble=[HOSTILE],
            manifest={
                "script": f"{number}{HOSTILE}",
                "status": "failed",
                "error": {"type": HOSTILE, "message": HOSTILE},
                "command": [f"{HOSTILE}{number}"],
            },
            facts={
                "precision": f"{number}{HOSTILE}",
                "settings": [{"name": HOSTILE, "value": f"{number}{HOSTILE}", "reason": HOSTILE}],
                "timing": {"device": f"{number}{HOSTILE}"},
                "torch": {"torch": f"{number}{HOSTILE}", "devices": [f"{number}{HOSTILE}"]},
                "optimizers": [{"index": 0, "name": HOSTILE, "model": HOSTILE}],
            },
        )

    return make(0), make(1)


def test_hostile_names_cannot_reach_the_terminal(hostile):
    text = plain(Comparison.of(*hostile))
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e\udc80]", text)
    assert text.count("\\x1b[2J") > 12


class Tags(HTMLParser):
    """The tags and attributes that a browser would see."""

    def __init__(self, markup):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.words = set(), set(), []
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.parametrize("of", ["comparison", "run"])
def test_hostile_names_are_no_markup_in_a_notebook(hostile, of):
    markup = Comparison.of(*hostile)._repr_html_() if of == "comparison" else run_html(hostile[0])
    page = Tags(markup)
    assert page.tags <= {"div", "p", "b", "span", "code", "pre", "br", "table", "thead", "tbody", "tr", "th", "td"}
    assert page.attributes <= {"style", "title"}
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e\udc80]", markup)
    assert "<script>alert(1)</script>\\x1b[2J\\u202egpj.exe" in "".join(page.words)


def test_a_comparison_in_a_notebook(two):
    page = Tags(Comparison.of(*two)._repr_html_())
    words = "".join(page.words)
    for told in ("runs/two has 1 finding where runs/one had 2", "Gone (1)", "Still there (1)", "fp16", "bf16"):
        assert told in words
    assert "at 100% of the steps before, at 3.0% now" in words
    assert "+7.7 points, better" in words
    assert "clip_grad_norm_(model.parameters(), 1.0)" in words  # the line


def test_a_run_in_a_notebook(make_run, rules):
    words = "".join(Tags(run_html(make_run(trouble=["steps.jsonl is missing."]))).words)
    assert "2 problems in 120 steps of train.py (fp16, scaler): 1 error, 1 warning" in words
    assert words.index("AMP101") < words.index("AMP204")
    assert "120 times, steps 1 to 120" in words
    assert "steps.jsonl is missing." in words
    many = [CountedFinding(finding=rules["clip"].at(Place(file="t.py", line=n), "m")) for n in range(1, 31)]
    assert "… and 10 more findings" in run_html(make_run(findings=many))
    assert "No findings in 120 steps" in run_html(make_run(findings=[]))
