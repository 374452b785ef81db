"""The page of a comparison of precisions: what it shows, and that nothing in it is anybody's markup."""

import re
import shlex
from html.parser import HTMLParser

import pytest

from ampwise.finding.registry import run_checks
from ampwise.report.page import GENERATOR_MARK
from ampwise.report.page.page_file import check_page_path
from ampwise.tune.bench.page import precisions_page
from ampwise.tune.bench.speeds import (
    GpuClocks,
    LayerTime,
    LossCheck,
    PrecisionRow,
    SpeedComparison,
    StepMemory,
    TimeSplit,
    TimeSpread,
)

from ...night import by_night

GIB = 2**30
EVIL = '<script>alert(1)</script>"><img src=x onerror=alert(2)>\u202e'
VOID = {"meta", "br", "img", "input", "hr", "link"}


def spread(value, by=0.02):
    return TimeSpread(median=value, low=value * (1 - by), high=value * (1 + by))


def row(precision, ratio, *, compiled=False, **parts):
    step = 0.3 / ratio
    usual = {
        "step_s": spread(step),
        "ratio": spread(ratio),
        "ratio_to_eager": spread(ratio),
        "loss": LossCheck(loss=10.97, reference=10.97, tolerance=0.7),
        "peak_flops": 989e12 if precision in ("fp16", "bf16") else 67e12,
        "memory": StepMemory(peak=int(20 * GIB / ratio**0.3), parameters=GIB // 2, gradients=GIB // 2, optimizer=GIB),
        "split": TimeSplit(
            seconds={
                "matrix": 0.5 * step,
                "attention": 0.1 * step,
                "elementwise": 0.2 * step,
                "casts": 0.02 * step,
                "optimizer": 0.08 * step,
            },
            busy=0.9 * step,
            launches=900,
            on_device=True,
        ),
    }
    return PrecisionRow(precision=precision, compiled=compiled, **{**usual, **parts})


@pytest.fixture
def speeds():
    layers = [
        LayerTime(name="blocks.#.expand", kind="Linear", times=12, seconds={"fp32": 0.1, "bf16": 0.01}),
        LayerTime(name="blocks.#.ln_1", kind="LayerNorm", times=12, seconds={"fp32": 0.004, "bf16": 0.005}),
    ]
    return SpeedComparison(
        name="benchmarks.subjects:gpt2",
        command="ampwise bench benchmarks.subjects:gpt2",
        device="cuda",
        device_name="NVIDIA H200",
        rows=(
            row("fp32", 1.0),
            row("tf32", 2.9),
            row("fp16", 5.8, skipped=2),
            row("bf16", 6.0),
            row("bf16", 9.1, compiled=True),
            PrecisionRow(precision="fp8", problem="not run: FP8 layers are torchao's, which is not installed."),
            PrecisionRow(precision="fp16", compiled=True, problem="out of memory"),
        ),
        noise=0.08,
        rounds=15,
        batch=16,
        tokens=16384,
        flops=1.4e13,
        layers=tuple(layers),
        clocks=GpuClocks(before=345, after=1900, lowest=1755, top=1980, held_back_by=("its power limit",)),
        not_measured=("Time spent waiting for data is not part of a step here: `ampwise run` measures it.",),
    )


def made(speeds):
    return precisions_page(speeds, run_checks(speeds))


class Tags(HTMLParser):
    """Elements that are opened and closed in order, what they load, and the text of them all."""

    def __init__(self, page):
        super().__init__()
        self.open, self.links, self.text, self.ids = [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        named = dict(attributes)
        self.links += [value for name, value in attributes if name in ("src", "href") and not value.startswith("#")]
        self.ids += [named["id"]] if "id" in named else []
        assert not [name for name in named if name.startswith("on")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def test_it_shows_bars_numbers_layers_and_reasons(speeds):
    page = made(speeds)
    tags = Tags(page)
    assert GENERATOR_MARK in page[:2000]
    assert not tags.open
    assert tags.links == [], "nothing is fetched"
    assert len(set(tags.ids)) == len(tags.ids)
    assert "Use bf16: 6.00× as fast as fp32 Noise ±8.0%; fastest compiled: bf16 compiled, 9.10× as fast" in tags.words
    for words in (
        "9.10× (8.92×–9.28×)",
        "not run: FP8 layers are torchao's",
        "out of memory",
        "noise, ±8.0%",
        "blocks.#.expand Linear ×12 100 ms 10.0×",
        "norms and elementwise",
        "20 GiB",
        "AMP521",
        "GPU clock as low as 1755 MHz, 1980 MHz at most, throttled by its power limit.",
        "datasheet, dense",
        "ampwise bench benchmarks.subjects:gpt2 --precisions bf16",
    ):
        assert words in tags.words, words


def test_bars_are_as_long_as_they_say(speeds):
    page = made(speeds)
    widths = [float(width) for width in re.findall(r'class="fill format [^"]+" style="width: ([\d.]+)%', page)]
    ratios = [1.0, 2.9, 5.8, 6.0, 9.1]
    longest = 9.1 * 1.02
    assert widths == [pytest.approx(100 * ratio / longest, abs=0.01) for ratio in ratios]
    assert all(0 <= float(share) <= 100 for share in re.findall(r"(?:width|left): ([\d.]+)%", page))


def test_parts_of_a_step_fill_its_bar(speeds):
    page = made(speeds)
    section = page[page.index('id="time"') : page.index('id="memory"')]
    for stack in re.findall(r'<div class="stack"[^>]*>(.*?)</div>', section):
        shares = [float(share) for share in re.findall(r'style="width: ([\d.]+)%', stack)]
        assert sum(shares) == pytest.approx(100, abs=0.1)


def test_names_of_the_users_are_never_markup(speeds):
    from dataclasses import replace

    layer = LayerTime(name=EVIL, kind=EVIL, times=1, seconds={"fp32": 0.1, EVIL: 0.1})
    hostile = replace(
        speeds,
        name=EVIL,
        command=shlex.join(["ampwise", "bench", EVIL]),
        device_name=EVIL,
        layers=(layer,),
        kept=(EVIL,),
        not_measured=(EVIL,),
        rows=(*speeds.rows[:4], PrecisionRow(precision="fp8", problem=f"failed: {EVIL}")),
    )
    page = made(hostile)
    tags = Tags(page)
    assert not tags.open
    assert tags.links == []
    assert "\u202e" not in page
    assert page.count("<script") == 2, "base.html's own"
    policy = page.replace("&#39;", "'")
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "uPlot=" not in page, "nothing is drawn"


def test_little_was_measured_and_it_is_still_a_page(speeds):
    from dataclasses import replace

    bare = replace(
        speeds,
        rows=(PrecisionRow(precision="fp32", problem="out of memory"),),
        layers=(),
        noise=None,
        clocks=None,
        flops=None,
    )
    assert not Tags(made(bare)).open


def test_papers_that_are_not_ours(tmp_path, speeds):
    from ampwise.errors import BadInput

    page = tmp_path / "page.html"
    check_page_path(page, force=False)
    page.write_text(made(speeds))
    check_page_path(page, force=False)
    page.write_text("")
    check_page_path(page, force=False)
    page.write_text("somebody's")
    with pytest.raises(BadInput, match="exists and is not an ampwise page"):
        check_page_path(page, force=False)
    check_page_path(page, force=True)


@pytest.mark.parametrize("scheme", ["light", *by_night("dark")])
def test_a_browser_shows_it_without_a_word(speeds, shown, looked_at, scheme):
    page = shown(made(speeds), scheme=scheme, wait=False)
    looked_at(page, f"precisions-{scheme}")
    widths = page.eval_on_selector_all(".fill", "bars => bars.map(bar => bar.getBoundingClientRect().width)")
    assert widths == sorted(widths)
    assert widths[0] > 0
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
