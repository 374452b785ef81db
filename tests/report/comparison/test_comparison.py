"""Two runs beside each other: which findings are the same, which differences are ones."""

import itertools
import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.finding import Place
from ampwise.finding.strict_json import dumps
from ampwise.numbers.census.algebra import Census
from ampwise.report.comparison.comparison import Comparison
from ampwise.report.comparison.numbers import TOO_FEW, UNCLEAR, ComparedNumber
from ampwise.runs.reader import Run
from ampwise.runs.rows import CountedFinding, LayerSample, StepBucket, StepRow, merge_buckets

from ...for_each import for_each
from ..conftest import CLIP


def losses(values, optimizer=0, **parts):
    return [
        StepBucket.of(StepRow(optimizer=optimizer, step=step, loss=value, **parts))
        for step, value in enumerate(values, 1)
    ]


def noisy(level, count=400, spread=0.1, seed=0):
    draw = random.Random(seed)
    return losses([level + draw.gauss(0, spread) for _ in range(count)])


def numbers(compared):
    return {one.key: one for one in compared.numbers}


# --- findings ------------------------------------------------------------------------------------------------------


@pytest.fixture
def found(rules):
    """A finding of AMP101 at a line, with the text of that line where it is given."""

    def make(line, text=None, *, file="train.py", rule="clip", message="m", count=1, ranks=(), **place):
        excerpt = {} if text is None else {"first_line": line, "lines": [text]}
        finding = rules[rule].at(Place(file=file, line=line, **place), message)
        return CountedFinding(finding=finding, count=count, excerpt=excerpt, ranks=list(ranks))

    return make


@pytest.fixture
def compare(make_run):
    def make(olds, news, before=None, after=None):
        one = make_run(findings=olds, folder=Path("runs/a"), **(before or {}))
        other = make_run(findings=news, folder=Path("runs/b"), **(after or {}))
        return Comparison.of(one, other)

    return make


def statuses(compared):
    return sorted((one.status, one.seen.finding.place.line) for one in compared.findings)


def test_a_line_that_moved_is_the_same_finding(compare, found):
    compared = compare([found(31, "    clip(model)")], [found(431, "  clip(model)  ", message="by 32768")])
    assert statuses(compared) == [("still", 431)]


def test_a_fixed_line_is_gone_and_another_is_new(compare, found):
    compared = compare([found(31, "clip(generator)")], [found(431, "clip(critic)")])
    assert statuses(compared) == [("gone", 31), ("new", 431)]


def test_an_edited_line_nearby_is_the_same(compare, found):
    assert statuses(compare([found(31, "clip(model, 1.0)")], [found(51, "clip(model, 0.5)")])) == [("still", 51)]
    assert len(statuses(compare([found(31, "clip(model, 1.0)")], [found(52, "clip(model, 0.5)")]))) == 2


def test_where_the_text_is_not_known_the_nearest_line_is_the_same(compare, found):
    compared = compare([found(30), found(90)], [found(95), found(300)])
    pairs = {one.seen.finding.place.line: one.before and one.before.finding.place.line for one in compared.findings}
    assert pairs == {95: 90, 300: 30}


def test_the_text_counts_more_than_the_line(compare, found):
    compared = compare([found(10, "clip(a)"), found(12, "clip(b)")], [found(12, "clip(a)"), found(14, "clip(b)")])
    pairs = [(one.before.finding.place.line, one.after.finding.place.line) for one in compared.still]
    assert sorted(pairs) == [(10, 12), (12, 14)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rule": "clip"}, {"rule": "save"}),
        ({"file": "a.py"}, {"file": "b.py"}),
        ({"parameter": "head.weight"}, {"parameter": "stem.weight"}),
        ({"module": "head"}, {"module": "stem"}),
        ({"device": "cuda:0"}, {"device": "cuda:1"}),
    ],
)
def test_what_makes_another_finding(compare, found, old, new):
    assert statuses(compare([found(31, "x", **old)], [found(31, "x", **new)])) == [("gone", 31), ("new", 31)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"file": "/home/a/train.py"}, {"file": "C:\\work\\train.py"}),
        ({"file": "/home/a/model.py"}, {"file": "model.py"}),
        ({"step": 3, "rank": 0}, {"step": 70, "rank": 1}),
        ({"parameter": "module.head.weight"}, {"parameter": "_orig_mod.head.weight"}),
        ({"message": "scaled by 65536", "count": 120}, {"message": "scaled by 1024", "count": 3}),
    ],
)
def test_what_does_not(compare, found, old, new):
    assert statuses(compare([found(31, "x", **old)], [found(31, "x", **new)])) == [("still", 31)]


def test_a_copy_of_the_script_under_another_name_is_the_script(compare, found):
    compared = compare(
        [found(31, "clip()", file="fp16.py")],
        [found(33, "clip()", file="bf16.py")],
        {"manifest": {"script": "old/fp16.py"}},
        {"manifest": {"script": "bf16.py"}},
    )
    assert statuses(compared) == [("still", 33)]
    assert compared.notes == ("The two runs used different scripts.",)  # of one model: layers have the same names
    assert compared.alike


def test_findings_without_any_place(compare, rules):
    nowhere = CountedFinding(finding=rules["clip"].at(Place(), "m"))
    assert [one.status for one in compare([nowhere], [nowhere]).findings] == ["still"]


def test_rates_are_of_a_step_on_a_rank(compare, found):
    compared = compare([found(31, count=240, ranks=(0, 1))], [found(31, count=3)])
    assert (compared.still[0].rate_before, compared.still[0].rate_after) == (1.0, 3 / 120)
    idle = compare([found(31)], [], before={"steps": [], "facts": {"steps": 0}})
    assert idle.gone[0].rate_before is None


def a_finding(line, text):
    excerpt = {} if text is None else {"first_line": line, "lines": [text]}
    return CountedFinding(finding=CLIP.at(Place(file="train.py", line=line), "m"), excerpt=excerpt)


def a_run(name, findings):
    return Run(folder=Path(name), manifest={"script": "train.py", "status": "finished"}, findings=findings)


PLACES = st.lists(st.tuples(st.integers(1, 40), st.sampled_from([None, "a()", "b()"])), max_size=6)


@given(olds=PLACES, news=PLACES)
def test_every_finding_is_reported_once(olds, news):
    one, other = a_run("a", [a_finding(*spot) for spot in olds]), a_run("b", [a_finding(*spot) for spot in news])
    compared = Comparison.of(one, other)
    before, after = one.merged_findings(), other.merged_findings()
    told = (
        [found.before for found in compared.findings if found.before],
        [found.after for found in compared.findings if found.after],
    )
    assert sorted(map(repr, told[0])) == sorted(map(repr, before))
    assert sorted(map(repr, told[1])) == sorted(map(repr, after))
    back = Comparison.of(other, one)
    assert (len(back.new), len(back.gone), len(back.still)) == (
        len(compared.gone),
        len(compared.new),
        len(compared.still),
    )
    assert not Comparison.of(one, a_run("b", one.findings)).new


# --- numbers -------------------------------------------------------------------------------------------------------


def test_losses_are_compared_at_equal_steps(compare):
    falling = [4.0 - step / 1000 for step in range(1, 1001)]
    compared = compare([], [], {"steps": losses(falling)}, {"steps": losses(falling[:400])})
    loss = numbers(compared)["loss_at_end"]
    assert loss.before == loss.after == pytest.approx(sum(falling[380:400]) / 20)
    assert loss.meaning == "mean over steps 381 to 400, the last that both runs have"
    assert loss.judged == "same"
    assert compared.shared_steps == 400
    assert numbers(compared)["lowest_loss"].judged == "same"  # though the longer run went on to a lower one


def test_a_merged_record_of_the_same_steps_gives_the_same_loss(compare):
    rows = noisy(2.0, 6400)
    merged = [merge_buckets(rows[at : at + 64]) for at in range(0, 6400, 64)]
    compared = compare([], [], {"steps": rows}, {"steps": merged})
    loss = numbers(compared)["loss_at_end"]
    assert loss.after == pytest.approx(loss.before, abs=0.01)
    assert loss.judged == UNCLEAR


def test_a_stretch_inside_one_merged_bucket(compare):
    rows = noisy(2.0, 640)
    loss = numbers(compare([], [], {"steps": rows[:40]}, {"steps": [merge_buckets(rows)]}))["loss_at_end"]
    assert loss.after == pytest.approx(2.0, abs=0.05)
    assert loss.judged == UNCLEAR


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_difference_and_a_difference_is_one(compare, seed):
    for level, expected in [(2.0, {UNCLEAR}), (1.5, {"better"}), (2.5, {"worse"})]:
        steps = {"steps": noisy(2.0, seed=seed)}, {"steps": noisy(level, seed=seed + 100)}
        assert numbers(compare([], [], *steps))["loss_at_end"].judged in expected


def test_of_two_steps_nobody_can_tell(compare):
    loss = numbers(compare([], [], {"steps": losses([3.0, 2.0])}, {"steps": losses([3.0, 1.0])}))["loss_at_end"]
    assert loss.judged == loss.change == TOO_FEW


def test_a_loss_that_is_no_number_is_worse_than_any(compare):
    nan = losses([math.nan] * 30)
    there = compare([], [], {"steps": noisy(9.0, 30)}, {"steps": nan})
    assert math.isnan(numbers(there)["loss_at_end"].after)
    assert numbers(there)["loss_at_end"].judged == numbers(there)["losses_not_finite"].judged == "worse"
    assert numbers(compare([], [], {"steps": nan}, {"steps": noisy(9.0, 30)}))["loss_at_end"].change == "better"
    assert numbers(compare([], [], {"steps": nan}, {"steps": nan}))["loss_at_end"].judged == "same"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("last", [1, 8])
def test_a_run_that_ended_in_nan_is_never_the_better_one(compare, bad, last):
    healthy, diverged = noisy(2.0), losses([2.0 - step / 250 for step in range(400 - last)] + [bad] * last)
    compared = compare([], [], {"steps": healthy}, {"steps": diverged})
    found = numbers(compared)
    assert math.isnan(found["loss_at_end"].after)
    assert found["loss_at_end"].judged == "worse"
    assert found["lowest_loss"].after < found["lowest_loss"].before
    assert found["lowest_loss"].judged == ""  # it was lower once, and is of no use
    assert found["losses_not_finite"].judged == "worse"
    assert "steps NaN against 1.97" in compared.verdict
    assert compared.mood == "warning"
    assert compared.caution == ""  # no seed makes that
    assert numbers(compare([], [], {"steps": diverged}, {"steps": healthy}))["loss_at_end"].judged == "better"


def test_a_loss_that_came_back_is_a_number_again(compare):
    recovered = losses([2.0, 2.01] * 100 + [math.nan] + [1.0, 1.01] * 100)
    found = numbers(compare([], [], {"steps": noisy(2.0, 401)}, {"steps": recovered}))
    assert found["loss_at_end"].judged == "better"
    assert found["losses_not_finite"].judged == "worse"


def test_what_came_after_the_shared_steps_is_shown_and_not_judged(compare):
    """The same run, once stopped early: skips and NaNs come at the beginning, and are no rarer in the longer one."""

    def steps(count):
        rows = [(math.nan if step % 40 == 0 else 2.0, step <= 24) for step in range(1, count + 1)]
        return [StepBucket.of(StepRow(step=n, loss=loss, skipped=skip)) for n, (loss, skip) in enumerate(rows, 1)]

    found = numbers(compare([], [], {"steps": steps(60)}, {"steps": steps(900)}))
    assert (found["skip_rate"].before, found["skip_rate"].after) == (0.4, 0.4)
    assert found["skip_rate"].judged == found["losses_not_finite"].judged == "same"
    assert (found["losses_not_finite"].before, found["losses_not_finite"].after) == (1, 1)
    whole = found["losses_not_finite_in_all"]
    assert (whole.before, whole.after, whole.judged) == (1, 22, "")
    assert (found["skipped"].before, found["skipped"].after) == (24, 24)
    assert "losses_not_finite_in_all" not in numbers(compare([], [], {"steps": steps(60)}, {"steps": steps(60)}))


def test_a_skip_rate_is_of_the_steps_of_all_optimizers(compare):
    def steps(skips):
        return [StepBucket.of(StepRow(optimizer=o, step=n, skipped=n <= skips)) for o in (0, 1) for n in range(1, 41)]

    found = numbers(compare([], [], {"steps": steps(16), "facts": {"steps": 40}}, {"steps": steps(0)}))
    assert (found["steps"].before, found["skipped"].before, found["skip_rate"].before) == (40, 32, 0.4)
    assert found["skip_rate"].judged == "better"


def timed(seconds, seed=0, noise=0.0):
    draw, at, rows = random.Random(seed), 0.0, []
    for step in range(1, 201):
        at += seconds + (noise if (step // 20) % 2 else 0.0) + draw.random() * seconds / 50
        rows.append(StepBucket.of(StepRow(step=step, seconds=at, loss=2.0)))
    return {"steps": rows, "facts": {"timing": {"seconds_per_step": at / 200}}}


def test_a_busy_machine_is_no_slower_run(compare):
    quiet, slower, busy = timed(0.1), timed(0.13, 1), timed(0.08, 2, noise=0.1)
    assert numbers(compare([], [], quiet, slower))["seconds_per_step"].judged == "worse"
    assert numbers(compare([], [], slower, quiet))["seconds_per_step"].judged == "better"
    assert numbers(compare([], [], quiet, busy))["seconds_per_step"].judged == UNCLEAR
    assert numbers(compare([], [], quiet, timed(0.104, 3)))["seconds_per_step"].judged == UNCLEAR  # within 5%
    few = {"steps": quiet["steps"][:3], "facts": quiet["facts"]}
    assert numbers(compare([], [], few, slower))["seconds_per_step"].judged == TOO_FEW


def test_time_does_not_colour_the_verdict(compare):
    compared = compare([], [], timed(0.1), timed(0.2))
    assert numbers(compared)["seconds_per_step"].judged == "worse"
    assert compared.mood == "ok"


def test_few_pairs_of_seeds_are_judged(compare):
    """Losses that wander as those of seeds do: each around a level of its own, which is no difference of the runs."""
    draw = random.Random(5)
    runs = [noisy(0.09 + draw.gauss(0, 0.025), spread=0.03, seed=seed) for seed in range(12)]
    judged = [
        numbers(compare([], [], {"steps": one}, {"steps": other}))["loss_at_end"].judged
        for one, other in itertools.combinations(runs, 2)
    ]
    clear = sum(one in ("better", "worse") for one in judged)
    assert clear / len(judged) < 0.15


def test_what_is_not_known_is_none_and_never_judged(compare):
    empty = {"steps": [], "layers": [], "manifest": {"facts": {}}}
    compared = compare([], [], {}, empty)
    for one in compared.numbers:
        if one.key != "steps":
            assert one.after is None, one.key
            assert one.judged == one.change == ""
            assert one.written(one.after) == "–"
    assert numbers(compared)["half_share"].before == 0.873
    assert "cast_share" not in numbers(compared)  # which neither knows
    assert not [one for one in compare([], [], empty, empty).numbers if one.key != "steps"]


def test_bf16_has_no_share_lost_in_fp16(compare):
    lost = numbers(compare([], [], {}, {"facts": {"precision": "bf16"}}))["worst_lost"]
    assert lost.before == pytest.approx(0.273, abs=0.001)
    assert lost.after is None


def test_the_overall_share_counts_values_and_not_layers(compare, make_run):
    from ampwise.report.layers import layers_of

    layers = [layer.underflow for layer in layers_of(make_run())]
    expected = sum(one.lost for one in layers) / sum(one.values for one in layers)
    assert numbers(compare([], []))["lost"].before == pytest.approx(expected)
    assert 0 < expected < numbers(compare([], []))["worst_lost"].before


@pytest.mark.parametrize(
    ("skips", "judged"),
    [((0, 0), "same"), ((0, 1), UNCLEAR), ((3, 4), UNCLEAR), ((2, 40), "worse"), ((40, 2), "better")],
)
def test_a_skip_more_is_chance_and_many_are_not(compare, skips, judged):
    old, new = ([StepBucket.of(StepRow(step=n, skipped=n <= some)) for n in range(1, 201)] for some in skips)
    assert numbers(compare([], [], {"steps": old}, {"steps": new}))["skip_rate"].judged == judged


def test_memory_and_time(compare):
    def facts(allocated, host, seconds):
        devices = {"cuda:0": {"peak_allocated": allocated, "total": 1}, "cuda:1": {"peak_allocated": 5}}
        return {"facts": {"memory": {"devices": devices, "host_peak": host}, "timing": {"seconds_per_step": seconds}}}

    found = numbers(compare([], [], facts(8 * 2**30, 10**9, 0.100), facts(4 * 2**30, 10**9 + 1, 0.103)))
    assert found["peak_memory"].change == "−50%, better"
    assert found["peak_memory"].written(found["peak_memory"].after) == "4 GiB"
    assert found["host_peak"].judged == found["seconds_per_step"].judged == UNCLEAR
    assert "half_share" not in found


@pytest.mark.parametrize("memory", [None, 3, {"devices": 3}, {"devices": {"cuda:0": None}}, {"host_peak": "many"}])
def test_facts_of_another_shape_are_no_crash(compare, memory):
    facts = {"facts": {"memory": memory, "timing": [1], "settings": 3, "precision": [], "torch": 3}}
    assert "peak_memory" not in numbers(compare([], [], facts, facts))


def test_each_optimizer_has_its_own(compare):
    two = {"steps": [*losses([2.0] * 20), *losses([1.0] * 30, optimizer=1)]}
    names = {"facts": {"optimizers": [{"index": 1, "name": "Adam", "model": "Critic"}]}}
    told = [one.name for one in compare([], [], two, two | names).numbers if one.key == "loss_at_end"]
    assert told == ["loss at the end (optimizer 0)", "loss at the end (Adam of Critic)"]


@for_each(
    ("unit", "before", "after", "change"),
    [
        ("", 100.0, 88.0, "−12%"),
        ("", 100.0, 100.4, "+0.4%"),
        ("", 1.0, 1.0001, "up by less than 0.1%"),
        ("", 1.0, 0.9999, "down by less than 0.1%"),
        ("share", 0.5, 0.5001, "up by less than 0.1 points"),
        ("", 2.0, 90.0, "×45"),
        ("", 90.0, 2.0, "÷45"),
        ("", -1.0, 1.5, "+2.5"),
        ("share", 0.5, 0.25, "−25 points"),
        ("share", 0.5, 0.531, "+3.1 points"),
        ("scale", 65536.0, 32768.0, "÷2"),
        ("count", 0.0, 5.0, "+5"),
        ("", math.inf, 1.0, ""),
        ("", 5e-324, 1e308, "×inf"),
    ],
)
def test_changes_in_words(unit, before, after, change):
    assert ComparedNumber(key="k", name="n", unit=unit, before=before, after=after).change == change


@given(
    st.sampled_from(["lower", "higher"]),
    st.floats() | st.none(),
    st.floats() | st.none(),
    st.floats(0, 10) | st.none(),
)
def test_what_is_better_one_way_is_worse_the_other(better, one, other, chance):
    there = ComparedNumber(key="k", name="n", better=better, before=one, after=other, chance=chance)
    back = ComparedNumber(key="k", name="n", better=better, before=other, after=one, chance=chance)
    turned = {"better": "worse", "worse": "better"}
    assert back.judged == turned.get(there.judged, there.judged)
    assert isinstance(there.change, str)


# --- set-up, layers, verdict ---------------------------------------------------------------------------------------


def test_only_what_differs_is_reported(compare):
    assert compare([], []).setup == ()
    command = ["python", "ampwise", "run", "-o", "runs/a", "train.py", "--lr", "1e-3"]
    compared = compare(
        [],
        [],
        {"manifest": {"command": command, "world_size": 1, "ampwise": "0.1"}},
        {
            "manifest": {"command": [*command[:4], "runs/b", *command[5:7], "3e-4"], "world_size": 2, "ampwise": "0.1"},
            "facts": {"precision": "bf16", "settings": [], "torch": {"devices": ["H200", "H200"], "torch": "2.6"}},
        },
    )
    assert {one.what: (one.before, one.after) for one in compared.setup} == {
        "arguments": ("--lr 1e-3", "--lr 3e-4"),  # and not the folder of the record
        "precision": ("fp16", "bf16"),
        "device": (None, "2 × H200"),
        "processes": ("1", "2"),
        "torch": ("2.13.0", "2.6"),
        "suggested init_scale": ("32768", "none"),
    }


def test_layers_by_how_much_they_changed(compare, make_sample):
    def layers(**norms):
        censuses = {
            name: Census(binades={-8: 10}, amax=2**-7.5, amin=2**-7.5, sum_squares=norm**2)
            for name, norm in norms.items()
        }
        return {"layers": [make_sample(1, censuses)]}

    compared = compare(
        [], [], layers(calm=1.0, grown=1.0, shrunk=4.0, lost=1.0), layers(calm=1.2, grown=2.0, shrunk=1.0, won=1.0)
    )
    assert [(layer.name, layer.changed) for layer in compared.layers] == [
        ("shrunk", True),
        ("grown", True),
        ("calm", False),
    ]
    assert (compared.only_before, compared.only_after) == (("lost",), ("won",))


def test_what_is_lost_comes_before_norms(make_run, make_sample, compare):
    from dataclasses import replace

    lossy = make_run().layers[0].layers["blocks.0.weight"]
    calm = replace(lossy, binades={-20: lossy.count}, zeros=0)
    louder = replace(calm, sum_squares=1.0)
    compared = compare(
        [],
        [],
        {"layers": [make_sample(1, {"a": calm, "b": calm})]},
        {"layers": [make_sample(1, {"a": louder, "b": lossy})]},
    )
    assert [layer.name for layer in compared.layers] == ["b", "a"]
    assert compared.layers[0].more_lost > 0.2


def sized(**sizes):
    """Layers of so many values, at two samples."""
    censuses = {name: Census(binades={-8: size}, amax=2**-7.5, amin=2**-7.5) for name, size in sizes.items()}
    return [LayerSample(first=n, last=n, scale=65536.0, layers=censuses) for n in (1, 50)]


@pytest.mark.parametrize(
    ("old", "new", "alike", "note"),
    [
        ({"a": 64, "b": 8}, {"a": 64, "b": 8}, True, ""),
        ({"a": 64, "b": 8}, {"a": 64, "c": 8}, True, ""),  # half of them
        ({"a": 64, "b": 8}, {"c": 64, "d": 8}, False, "no layer in common"),
        ({"a": 64, "b": 8}, {"a": 128, "b": 16}, False, "no layer in common"),  # a wider model with the same names
        ({"a": 5025700, "b": 8}, {"a": 5030400, "b": 16}, True, ""),  # a vocabulary filled up
        ({"a": 64}, {"a": 64, "b": 8, "c": 8}, False, "only 1 of 3 layers in common"),
    ],
)
def test_two_models_are_alike_by_half_of_their_layers(compare, old, new, alike, note):
    """Both scripts are called train.py, as most are."""
    compared = compare([], [], {"layers": sized(**old)}, {"layers": sized(**new), "steps": noisy(99.0)})
    assert compared.alike is alike
    assert compared.notes == ((f"The two runs have {note}: no number is judged.",) if note else ())
    assert ("worse" in {one.judged for one in compared.numbers}) is alike
    back = compare([], [], {"layers": sized(**new)}, {"layers": sized(**old)})
    assert back.alike is alike


def test_a_layer_of_another_size_is_another_layer(compare):
    compared = compare([], [], {"layers": sized(a=64, b=8)}, {"layers": sized(a=128, b=8)})
    assert [layer.name for layer in compared.layers] == ["b"]
    assert (compared.only_before, compared.only_after) == (("a (64 values)",), ("a (128 values)",))


@pytest.mark.parametrize(("script", "alike"), [("train.py", True), ("gan.py", False)])
def test_a_run_without_layers_is_known_by_its_script(compare, script, alike):
    compared = compare([], [], {}, {"layers": [], "manifest": {"script": script}})
    assert compared.alike is alike
    assert compared.notes == (
        ()
        if alike
        else ("The two runs used different scripts and do not both have layers in their records: no number is judged.",)
    )


def test_different_models_are_shown_and_not_judged(compare, make_sample):
    others = {"layers": [make_sample(1, {"other": Census(zeros=1)})], "manifest": {"script": "gan.py"}}
    compared = compare([], [], {}, {**others, "steps": noisy(0.1)})
    assert not compared.alike
    assert compared.notes == ("The two runs used different scripts and have no layer in common: no number is judged.",)
    assert {one.judged for one in compared.numbers} <= {"", "same"}
    assert "loss" not in compared.verdict
    assert numbers(compared)["loss_at_end"].after == pytest.approx(0.1, abs=0.1)


def test_the_verdict_says_whose_loss(compare):
    two = {"steps": [*losses([2.0] * 20), *losses([1.0] * 20, optimizer=1)]}
    names = {"facts": {"optimizers": [{"index": 0, "name": "Adam", "model": "Critic"}]}}
    compared = compare([], [], two | names, two | names)
    assert compared.verdict.endswith("; loss of Adam of Critic after 20 steps 2 against 2")
    told = next(one for one in compared.as_dict()["numbers"] if one["key"] == "loss_at_end")
    assert told["owner"] == "Adam of Critic"


def test_verdicts(compare, found):
    steps = {"steps": losses([2.44, 2.46] * 300)}, {"steps": losses([2.3, 2.32] * 200)}
    three = [found(1, "a"), found(2, "b", rule="save"), found(300, "c", file="other.py")]
    assert compare(three, three[:1], *steps).verdict == (
        "runs/b has 1 finding where runs/a had 3: 2 gone, none new; loss after 400 steps 2.31 against 2.45"
    )
    assert compare([], [], {"steps": noisy(2.0)}, {"steps": noisy(2.0, seed=3)}).verdict.endswith(
        ", no clear difference"
    )
    assert compare([], []).verdict.startswith("neither runs/a nor runs/b has findings; ")
    assert compare(three, three).verdict.startswith("runs/b has the 3 findings that runs/a has; ")
    assert compare([], three[:2]).verdict.startswith("runs/b has 2 findings where runs/a had none: none gone, 2 new; ")
    assert compare(three, []).verdict.startswith("runs/b has no findings where runs/a had 3: 3 gone, none new; ")


def test_a_run_that_failed_says_so_first(compare, found):
    failed = {"manifest": {"status": "failed", "exit_code": 1, "error": {"type": "ValueError", "message": "no data"}}}
    short = {"steps": losses([2.0] * 3), "facts": {"steps": 3}}
    compared = compare([found(1)], [], {}, failed | short)
    assert compared.verdict.startswith("runs/b failed after 3 steps; runs/b has no findings where runs/a had 1")
    assert compared.mood == "error"
    assert compared.notes == ("runs/b: The script failed with ValueError: no data (exit code 1).",)


@pytest.mark.parametrize(
    ("manifest", "told"),
    [
        ({"status": "interrupted"}, "runs/a was interrupted after 120 steps; "),
        ({"status": "running"}, "runs/a is still going, or was killed, after 120 steps; "),
        ({"exit_code": 3}, "runs/a ended with exit code 3 after 120 steps; "),
        ({"status": "odd"}, "runs/a ended with the status 'odd' after 120 steps; "),
        ({"status": "unknown"}, "runs/a ended in an unknown way after 120 steps; "),
    ],
)
def test_endings(compare, manifest, told):
    assert compare([], [], {"manifest": manifest}).verdict.startswith(told)


def test_one_record_twice(make_run):
    compared = Comparison.of(make_run(trouble=["steps.jsonl is missing."]), make_run())
    assert compared.one_record
    assert compared.verdict == "runs/one is compared with itself; it has 2 findings"
    assert {one.judged for one in compared.numbers} == {"same"}
    assert not compared.setup
    assert not any(layer.changed for layer in compared.layers)


def test_moods(compare, found):
    assert compare([found(1)], []).mood == "ok"
    assert compare([], [found(1), found(2, rule="save")]).mood == "error"
    assert compare([], [found(2, rule="save")]).mood == "warning"
    assert compare([], [], {"steps": noisy(1.0)}, {"steps": noisy(2.0)}).mood == "warning"


def test_json(compare, found):
    nan = {"steps": losses([math.nan] * 20)}
    data = json.loads(dumps(compare([found(31, "x", count=120)], [found(33, "x", count=3)], nan, nan).as_dict()))
    assert data["version"] == 1
    assert (data["mood"], data["statuses"], data["endings"]) == ("ok", ["finished"] * 2, ["", ""])
    assert [one["code"] for one in data["still"]] == ["AMP101"]
    assert data["still"][0]["before"]["per_step"] == 1.0
    assert data["still"][0]["after"] | {"count": 3, "per_step": 0.025} == data["still"][0]["after"]
    assert data["new"] == data["gone"] == data["setup"] == []
    loss = next(one for one in data["numbers"] if one["key"] == "loss_at_end")
    assert (loss["before"], loss["better"], loss["judged"]) == ("NaN", "lower", "same")
    assert loss["meaning"].startswith("mean over steps 11 to 20")
