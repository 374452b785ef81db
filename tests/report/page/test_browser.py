"""The page in a browser: what one sees, points at and types. The fixture `shown` lets no error and no request pass."""

import math
import random
import re

import pytest

from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.underflow import underflow
from ampwise.numbers.formats import find_scalar_format
from ampwise.report.formatting import format_percent
from ampwise.report.layers import layers_of
from ampwise.report.page import comparison_page, page
from ampwise.runs.rows import StepBucket, StepRow

from ...night import NIGHTLY, by_night
from .conftest import Ears
from .test_page import FACTS, HOSTILE, hostile_run

FORMATS = ("fp16", "bf16", "e4m3", "e5m2")
FATES = ("lost", "subnormal", "normal", "overflow")


def spread(seed):
    """A census with values at the edges of binades, where rounding decides."""
    chance = random.Random(seed)
    low = chance.randint(-60, -12)
    binades = {exponent: chance.randint(1, 5000) for exponent in range(low, low + chance.randint(1, 40))}
    top, bottom = max(binades), min(binades)
    amax = chance.choice([2.0 ** (top + 1), 2.0 ** (top + 0.5), math.nextafter(2.0**top, math.inf)])
    amin = min(amax, chance.choice([2.0 ** (bottom + 1), 2.0 ** (bottom + 0.3)]))
    return Census(binades=binades, zeros=chance.randint(0, 99), amax=amax, amin=amin, sum_squares=1.0)


@pytest.mark.nightly
def test_nothing_passes_unheard(one_page):
    ears = Ears()
    ears.listen(one_page)
    one_page.set_content(
        "<script>console.log('a word'); alert('a question'); fetch('http://localhost:1/').catch(() => {});"
        "setTimeout(() => { document.title = 'done'; missing(); })</script>"
    )
    one_page.wait_for_function("document.title === 'done'")
    one_page.goto("about:blank")
    ears.close()
    told = "\n".join(ears.heard)
    for part in (
        "console: a word",
        "dialog: a question",
        "request: http://localhost:1/",
        "error: missing is not defined",
    ):
        assert part in told


@pytest.mark.half_by_day
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 380])
def test_it_is_drawn_without_a_word_on_the_console(make_run, shown, looked_at, scheme, width):
    view = shown(page(make_run(FACTS)), scheme=scheme, width=width)
    assert view.locator("figure.chart canvas").count() == 4
    assert view.inner_text("#constant") == "Learning rate: 0.001 at every step."
    assert view.locator("figure.chart[data-metric=loss] .key.bad").inner_text() == "inf or NaN"
    assert view.inner_text("#markers") == "1clip-scaled-grads, from step 1"
    assert view.evaluate("document.documentElement.scrollWidth <= innerWidth")  # nothing sticks out
    looked_at(view, f"page-{scheme}-{width}")


def test_light_and_dark_differ_and_change_while_one_looks(make_run, shown):
    view = shown(page(make_run()))
    ground = "getComputedStyle(document.body).backgroundColor"
    pixels = "document.querySelector('#heat-map').toDataURL()"
    light = view.evaluate(ground), view.evaluate(pixels)
    view.emulate_media(color_scheme="dark")
    view.wait_for_function(f"before => {pixels} !== before", arg=light[1])
    assert view.evaluate(ground) != light[0]


def test_the_slider_says_what_python_says(make_run, make_sample, shown):
    censuses = {f"layer{seed}": spread(seed) for seed in range(8)}
    for limit in (65520.0, 464.0, 61440.0):  # where FP16, E4M3 and E5M2 begin to overflow, or just do not
        top = math.frexp(limit)[1] - 1
        censuses[f"limit{limit}"] = Census(binades={top: 9}, amax=limit, amin=2.0**top * 1.1, sum_squares=1.0)
    run = make_run(layers=[make_sample(1, censuses)])
    view = shown(page(run))
    order = [layer.name for layer in layers_of(run)]
    read = """([place, k]) => {
        const set = (id, value, event) => { const box = document.querySelector(id); box.value = value; box.dispatchEvent(new Event(event)); };
        set('#layer', place, 'change'); set('#scale', k, 'input');
        return [...document.querySelectorAll('#fates tbody tr')].map(row => [row.dataset.format, [...row.querySelectorAll('[data-fate-of]')].map(
            cell => [cell.dataset.fateOf, Number(cell.dataset.low), Number(cell.dataset.high), cell.textContent])]);
    }"""  # noqa: E501
    for place, name in enumerate(order):
        for k in (-16, -3, 0, 5, 16, 24, 40):
            found = dict(view.evaluate(read, [place, k]))
            assert tuple(found) == FORMATS
            for fmt, cells in found.items():
                census = censuses[name]
                lost, small = census.flushed(fmt, k), census.subnormal(fmt, k)
                large, total = census.overflowed(fmt, k), census.nonzeros
                expected = {
                    "lost": (lost.low, lost.high),
                    "subnormal": (small.low, small.high),
                    "normal": (
                        total - lost.high - small.high - large.high,
                        total - lost.low - small.low - large.low,
                    ),
                    "overflow": (large.low, large.high),
                }
                for fate, low, high, text in cells:
                    assert (low, high) == expected[fate], (name, k, fmt, fate)
                    assert text == " to ".join(
                        dict.fromkeys((format_percent(low / total), format_percent(high / total)))
                    )


def test_the_largest_scale_that_fits_is_that_of_the_census(make_run, make_sample, shown):
    censuses = {f"layer{seed}": spread(seed) for seed in (3, 4)}
    view = shown(page(make_run(layers=[make_sample(1, censuses)])))
    view.click("#histogram-fold summary")
    for fmt in ("fp16", "e4m3", "e5m2"):
        view.check(f"input[name=format][value={fmt}]")
        view.click("#scale-best")
        k = int(view.input_value("#scale"))
        assert not any(census.overflowed(fmt, k).high for census in censuses.values())
        assert any(census.overflowed(fmt, k + 1).high for census in censuses.values()) or k == 40
    view.click("#scale-run")
    assert view.inner_text("#scale-value") == "2¹⁵ = 32,768, as at the end of the run"
    view.check("input[name=format][value=bf16]")
    view.click("#scale-best")
    assert view.inner_text("#scale-value").endswith("would fit")


def test_the_slider_moves_with_the_keyboard_and_the_table_with_it(make_run, shown):
    view = shown(page(make_run()))
    view.focus("#scale")
    view.keyboard.press("ArrowLeft")
    assert view.inner_text("#scale-value") == "2¹⁴ = 16,384"
    assert view.inner_text("[data-fate-heading]") == "in FP16 at 2¹⁴"
    place = [layer.name for layer in layers_of(make_run())].index("blocks.0.weight")
    census = layers_of(make_run())[place].census
    share = census.flushed("fp16", 14).low / census.nonzeros
    assert view.inner_text(f"[data-fate='{place}']") == f"lost {format_percent(share)}"


def test_findings_lead_to_their_code_and_their_rule(make_run, shown):
    view = shown(page(make_run()))
    view.click(".overview a")
    assert view.url.endswith("#finding-1")
    assert "clip_grad_norm_" in view.locator("#finding-1-code .here").inner_text()
    rule = view.locator("#rule-AMP101")
    assert rule.get_attribute("open") is None
    view.click("#finding-1 a.rule")
    view.locator("#rule-AMP101[open]").wait_for()  # by an event, a moment after the click
    assert "65536 times too small" in rule.inner_text()


def test_a_button_copies_the_place(make_run, shown):
    view = shown(page(make_run()), permissions=["clipboard-read", "clipboard-write"])
    view.click("#finding-1 .place .copy")
    view.locator("#finding-1 .place .copy >> text=copied").wait_for()
    assert view.evaluate("navigator.clipboard.readText()") == "train.py:31"


def test_the_navigation_stays_on_a_wide_screen_and_marks_where_one_is(make_run, shown):
    view = shown(page(make_run(FACTS)), width=1300)
    view.click("nav >> text=Memory")
    view.locator("nav a[aria-current] >> text=Memory").wait_for()
    assert view.locator("nav").bounding_box()["y"] == 0
    view.set_viewport_size({"width": 390, "height": 800})
    view.wait_for_function("document.querySelector('nav').getBoundingClientRect().y < 0")


def test_the_histogram_can_be_read_on_a_phone(make_run, shown):
    view = shown(page(make_run()), width=390)
    sizes = view.eval_on_selector_all(
        "#bars text", "all => all.map(one => one.getBoundingClientRect()).map(box => [box.left, box.right, box.height])"
    )
    assert all(left >= 0 and right <= 390 and height > 9 for left, right, height in sizes)


def test_a_layer_of_the_table_leads_to_its_histogram(make_run, shown):
    view = shown(page(make_run()))
    view.click("#layers-right summary")
    view.click("a[data-layer] >> text=head.weight")
    assert view.evaluate("document.activeElement.id") == "scale"
    assert "head.weight" in view.get_attribute("#bars", "aria-label")
    assert view.locator("tr[aria-current]").inner_text().startswith("head.weight")


def test_all_curves_zoom_together(make_run, shown):
    view = shown(page(make_run()))
    assert view.inner_text("#range") == "steps 1 to 120"
    view.locator("figure.chart[data-metric=loss]").scroll_into_view_if_needed()
    box = view.locator("figure.chart[data-metric=loss] .u-over").bounding_box()
    middle = box["y"] + box["height"] / 2
    before = view.evaluate("[...document.querySelectorAll('figure.chart canvas, #heat-map')].map(c => c.toDataURL())")
    view.mouse.move(box["x"] + box["width"] * 0.25, middle)
    view.mouse.down()
    view.mouse.move(box["x"] + box["width"] * 0.5, middle, steps=5)
    view.mouse.up()
    first, last = map(int, re.findall(r"\d+", view.inner_text("#range")))
    assert (abs(first - 31) <= 2, abs(last - 60) <= 2) == (True, True)
    view.mouse.move(0, 0)
    after = view.evaluate("[...document.querySelectorAll('figure.chart canvas, #heat-map')].map(c => c.toDataURL())")
    assert all(one != other for one, other in zip(before, after, strict=True))
    view.click("[data-zoom=all]")
    assert view.inner_text("#range") == "steps 1 to 120"
    view.focus("figure.chart[data-metric=norm]")
    view.keyboard.press("+")
    assert view.inner_text("#range") == "steps 31 to 90"
    view.keyboard.press("0")
    assert view.inner_text("#range") == "steps 1 to 120"


@pytest.mark.nightly
def test_no_range_is_too_small_to_come_back_from(make_run, make_steps, shown):
    view = shown(page(make_run()))
    view.locator("figure.chart[data-metric=loss]").scroll_into_view_if_needed()
    box = view.locator("figure.chart[data-metric=loss] .u-over").bounding_box()
    for _ in range(4):
        view.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20)
        view.mouse.down()
        view.mouse.move(box["x"] + box["width"] * 0.52, box["y"] + 20, steps=3)
        view.mouse.up()
    first, last = map(int, re.findall(r"\d+", view.inner_text("#range")))
    assert 0 < last - first <= 3
    for button in ("in", "left", "right", "out"):
        view.click(f"[data-zoom={button}]")
    assert view.inner_text("#range") != f"steps {first} to {last}"
    view.click("[data-zoom=all]")
    assert view.inner_text("#range") == "steps 1 to 120"
    for steps, told in ((make_steps(1), "step 1"), (make_steps(2), "steps 1 to 2")):
        view = shown(page(make_run(steps=steps)))
        for button in ("out", "in", "left", "right", "all"):
            view.click(f"[data-zoom={button}]")
            assert view.inner_text("#range") == told


def test_the_keyboard_begins_with_what_is_in_sight(make_run, shown):
    view = shown(page(make_run()))
    figure = view.locator("figure.chart[data-metric=norm]")
    figure.focus()
    view.keyboard.press("+")
    view.keyboard.press("ArrowRight")
    assert figure.locator(".readout").inner_text().startswith("step 31: ")
    view.keyboard.press("ArrowLeft")
    assert figure.locator(".readout").inner_text().startswith("step 31: ")


@pytest.mark.half_by_day
@pytest.mark.parametrize("width", [1100, 700])
def test_charts_fit_their_frames_also_when_drawn_again(make_run, shown, width):
    view = shown(page(make_run()), width=width)
    fits = """() => [...document.querySelectorAll('figure.chart')].every(figure =>
        Math.abs(figure.querySelector('.uplot').offsetWidth - figure.querySelector('.plot').clientWidth) < 2)"""
    assert view.evaluate(fits)
    view.emulate_media(color_scheme="dark")
    view.wait_for_timeout(100)
    assert view.evaluate(fits)
    view.set_viewport_size({"width": 500, "height": 800})
    view.wait_for_function(fits)


def test_a_curve_is_read_step_by_step_with_the_keyboard(make_run, shown):
    view = shown(page(make_run()))
    figure = view.locator("figure.chart[data-metric=loss]")
    assert "lowest 0.03333, highest 4" in figure.get_attribute("aria-label")
    figure.focus()
    view.keyboard.press("ArrowRight")
    assert figure.locator(".readout").inner_text() == "step 1: 4"
    for _ in range(7):
        view.keyboard.press("ArrowRight")
    assert figure.locator(".readout").inner_text() == "step 8: 0.5"
    assert figure.locator(".readout").get_attribute("aria-live") == "polite"
    view.keyboard.press("ArrowLeft")
    assert figure.locator(".readout").inner_text() == "step 7: inf or NaN"


def drawn_in_the_middle(view, metric):
    """Whether a curve goes through the middle of its chart, from left to right."""
    return view.evaluate(
        """metric => {
            const canvas = document.querySelector(`[data-metric=${metric}] canvas`);
            const at = Math.round(canvas.width * 0.55);
            const pixels = canvas.getContext('2d').getImageData(at, 0, 1, canvas.height).data;
            for (let p = 0; p < pixels.length; p += 4)
                if (pixels[p + 3] > 128 && pixels[p + 2] - pixels[p] > 60) return true;
            return false;
        }""",
        metric,
    )


def test_a_curve_goes_on_where_nothing_was_measured_and_breaks_where_it_was_not_finite(make_run, shown):
    known = {1: 1.0, 2: 1.1, 99: 1.0, 100: 1.1}
    rows = [StepRow(step=n, norm=known.get(n), loss=known.get(n, math.nan)) for n in range(1, 101)]
    view = shown(page(make_run(steps=[StepBucket.of(row) for row in rows])))
    assert drawn_in_the_middle(view, "norm")
    assert not drawn_in_the_middle(view, "loss")


def test_the_heat_map_says_the_share_that_the_rules_see(make_run, shown):
    run = make_run()
    view = shown(page(run))
    sample = run.layers[0]
    share = underflow(sample.layers["blocks.0.weight"], sample.scale).lost_share
    assert 0.01 < share < 0.9
    canvas = view.locator("#heat-map")
    canvas.focus()
    view.keyboard.press("ArrowDown")
    words = view.inner_text("#heat-cell")
    assert words.startswith("blocks.0.weight, step 1, loss scale 2¹⁶: share lost in FP16 " + format_percent(share))
    view.keyboard.press("ArrowDown")
    assert view.inner_text("#heat-cell") == "blocks.1.bias, step 1, loss scale 2¹⁶: all zeros"
    view.keyboard.press("Enter")
    assert "blocks.1.bias" in view.get_attribute("#bars", "aria-label")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    view.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20)
    assert view.inner_text("#tip") == words
    view.mouse.move(0, 0)
    assert view.locator("#tip").is_hidden()
    assert "all zeros" in view.inner_text("#heat-legend")
    view.select_option("#heat-what", "norm")
    assert view.inner_text("#heat-legend") != ""


def test_a_run_that_loses_nothing_shows_how_large_gradients_are(make_run, make_sample, shown):
    healthy = Census(binades={-3: 5, -2: 5}, amax=2**-1.5, amin=2**-2.5, sum_squares=1.0)
    run = make_run({"precision": "bf16"}, layers=[make_sample(1, {"w": healthy}), make_sample(9, {"w": healthy})])
    view = shown(page(run))
    assert view.input_value("#heat-what") == "norm"
    assert "would lose without a loss scale" in view.inner_text("#heat-what")


def test_two_optimizers_have_a_line_and_a_map_each(make_run, make_steps, make_sample, shown):
    census = Census(binades={-3: 5}, amax=2**-2.5, amin=2**-2.5)
    run = make_run(
        {"optimizers": [{"index": 0, "name": "Adam", "model": "G"}, {"index": 1, "name": "Adam", "model": "D"}]},
        steps=[*make_steps(30), *make_steps(20, optimizer=1)],
        layers=[make_sample(1, {"g": census}), make_sample(1, {"d": census}, optimizer=1)],
    )
    view = shown(page(run))
    keys = view.locator("figure.chart[data-metric=loss] .key").all_inner_texts()
    assert keys[:2] == ["Adam of G", "Adam of D"]
    view.focus("#heat-map")
    view.keyboard.press("ArrowUp")
    assert view.inner_text("#heat-cell").startswith("g (Adam of G), step 1")
    view.select_option("#heat-whose", "1")
    assert view.inner_text("#heat-cell").startswith("d (Adam of D), step 1")
    assert view.inner_text("#range") == "steps 1 to 30, of each optimizer"


def test_layers_of_equal_names_and_their_scales_are_not_mixed_up(make_run, make_sample, shown):
    census = Census(binades={-3: 5}, amax=2**-2.5, amin=2**-2.5)
    rows = [StepRow(optimizer=n, step=1, scale=scale) for n, scale in ((0, 64.0), (1, 65536.0))]
    run = make_run(
        {"optimizers": [{"index": 0, "name": "Adam", "model": "G"}, {"index": 1, "name": "Adam", "model": "D"}]},
        steps=[StepBucket.of(row) for row in rows],
        layers=[
            make_sample(1, {"a": census, "w": census}),
            make_sample(1, {"b": census, "w": census, "x": census}, optimizer=1),
        ],
    )
    view = shown(page(run))
    view.click("#histogram-fold summary")  # nothing is wrong, so it is folded
    view.select_option("#layer", label="w (Adam of G)")
    assert view.inner_text("#scale-value") == "2⁶ = 64, as at the end of the run"
    view.select_option("#layer", label="w (Adam of D)")
    assert view.inner_text("#scale-value") == "2¹⁶ = 65,536, as at the end of the run"
    view.emulate_media(color_scheme="dark")
    assert view.locator("#layer").evaluate("box => box.selectedOptions[0].textContent") == "w (Adam of D)"
    view.focus("#heat-map")
    view.select_option("#heat-whose", "1")
    view.focus("#heat-map")
    for key in ("ArrowDown", "ArrowDown"):
        view.keyboard.press(key)
    view.select_option("#heat-whose", "0")  # which has fewer layers
    view.focus("#heat-map")
    view.keyboard.press("Enter")
    assert view.locator("#layer").evaluate("box => box.selectedOptions[0].textContent") == "w (Adam of G)"


def test_hostile_names_are_only_text(make_run, make_sample, rules, shown):
    run = hostile_run(make_run, make_sample, rules)
    for text in (page(run), comparison_page(run, run)):
        view = shown(text)
        assert view.locator("img, iframe, object").count() == 0
        assert view.locator("script").count() == 2
        assert HOSTILE[:25] in view.inner_text("main")


def test_runs_with_little_in_them(make_run, make_sample, shown):
    wide = Census(binades=dict.fromkeys(range(-1000, 1000), 1), amax=2.0**999.5, amin=2.0**-999.5)
    for run in (
        make_run(steps=[], layers=[], findings=[]),
        make_run(steps=[StepBucket.of(StepRow(step=5, loss=1.0))], layers=[]),
        make_run(
            steps=[StepBucket.of(StepRow(step=n, loss=math.nan, scale=0.0, norm=0.0)) for n in (1, 2, 3)], layers=[]
        ),
        make_run(layers=[make_sample(1, {"zeros": Census(zeros=4)})]),
        make_run(layers=[make_sample(1, {"bad": Census(nans=1, infs=2, zeros=4)})]),
        make_run(layers=[make_sample(1, {"wide": wide})], steps=[StepBucket.of(StepRow(step=1, loss=-1e300))]),
    ):
        view = shown(page(run))
        assert view.locator("h1").count() == 1
    view = shown(page(make_run(steps=[StepBucket.of(StepRow(step=n, loss=math.nan)) for n in (1, 2)])))
    assert "Not finite at any step." in view.inner_text("figure.chart[data-metric=loss]")


def test_without_scripts_the_words_are_all_there(make_run, shown):
    view = shown(page(make_run(FACTS)), wait=False, java_script_enabled=False)
    text = view.inner_text("main")
    assert "Gradients are clipped while still scaled" in text
    assert "open the file in a recent browser" in text
    assert view.locator("nav >> text=Curves").is_hidden()
    assert view.locator("#no-charts").is_visible()
    assert shown(page(make_run(FACTS))).locator("#no-charts").count() == 0


def test_on_paper_it_is_light_and_unfolded(make_run, shown, tmp_path):
    view = shown(page(make_run(FACTS)), scheme="dark")
    view.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"
    assert view.locator("details:not([open]):not(.repeated)").count() == 0
    assert max(view.locator("figure.chart .uplot").evaluate_all("all => all.map(one => one.offsetWidth)")) <= 720
    view.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 23)"
    assert len(view.pdf(path=tmp_path / "page.pdf")) > 10_000


@pytest.mark.parametrize("scheme", ["light", *by_night("dark")])
def test_it_has_no_barrier_that_a_program_can_find(make_run, shown, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    for text in (page(make_run(FACTS)), comparison_page(make_run(FACTS), make_run(findings=[]))):
        view = shown(text, scheme=scheme, bypass_csp=True)  # it has to bring its own script
        found = axe.Axe().run(view).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []


def test_two_runs_are_drawn_over_each_other(make_run, make_steps, shown, looked_at):
    view = shown(comparison_page(make_run(FACTS), make_run(findings=[], steps=make_steps(60))))
    assert view.locator("figure.chart[data-metric=loss] .key").all_inner_texts()[:2] == ["before", "after"]
    figure = view.locator("figure.chart[data-metric=norm]")
    figure.focus()
    view.keyboard.press("ArrowRight")
    view.keyboard.press("ArrowRight")
    assert figure.locator(".readout").inner_text() == "before, step 2: 1.2 · after, step 2: 1.2"
    looked_at(view, "comparison")


@pytest.mark.nightly
def test_a_week_long_run_with_three_hundred_layers(make_run, make_sample, shown, looked_at):
    last, spike, samples = (100_000, 54_321, 200) if NIGHTLY else (20_000, 4_321, 50)
    steps = [
        StepBucket.of(
            StepRow(step=n, loss=1.0 + (n == spike) * 40, scale=2.0 ** (n % 24), norm=1.0, skipped=n % 9 == 0)
        )
        for n in range(1, last + 1)
    ]
    census = Census(binades={e: abs(e) for e in range(-40, -1)}, zeros=50, amax=0.4, amin=2.0**-39.5, sum_squares=1.0)
    layers = {f"transformer.encoder.layers.{n}.attention.projection.weight": census for n in range(300)}
    sampled = [make_sample(n * last // samples, layers) for n in range(1, samples + 1)]
    view = shown(page(make_run(steps=steps, layers=sampled)))
    assert "highest 41" in view.get_attribute("figure.chart[data-metric=loss]", "aria-label")
    assert view.inner_text("#range") == f"steps 1 to {last:,}"
    assert "300 layers" in view.inner_text("#heat-about")
    looked_at(view, "long")


def test_formats_of_the_page_are_those_of_the_catalog(make_run, shown):
    view = shown(page(make_run()))
    labels = view.locator("#fates tbody tr").evaluate_all("rows => rows.map(row => row.dataset.format)")
    assert [find_scalar_format(name).name for name in labels] == ["fp16", "bf16", "e4m3fn", "e5m2"]
