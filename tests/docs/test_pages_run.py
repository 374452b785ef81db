"""The start, the guides and the concepts: examples run and say what is shown, and numbers are the code's."""

import json
import logging
import re
import sys
from pathlib import Path

import pytest
import torch

from ampwise.finding.registry import built_in_rules
from ampwise.numbers.formats import FORMATS
from ampwise.tune.advise import advise

from ..for_each import for_each
from .pages import Reading, is_as_shown, patched, pieces

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without BF16
BY_OTHERS = {DOCS / "concepts" / "autocast.md"}
PAGES = [DOCS / "start.md", *sorted({*DOCS.glob("guides/*.md"), *DOCS.glob("concepts/*.md")} - BY_OTHERS)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("COLUMNS", "GITHUB_ACTIONS"):  # these change what is printed
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    logging.getLogger("ampwise").setLevel(logging.NOTSET)  # a page shows how to silence it
    for path in tmp_path.glob("*.py"):  # the next page may have another train.py
        sys.modules.pop(path.stem, None)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.nightly] * (page.stem == "distributed")) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_a_page_does_what_it_shows(page, folder, warm):
    Reading(page, folder, warm).go()


@pytest.mark.parametrize("word", ["check", pytest.param("run", marks=pytest.mark.nightly)])
def test_the_commands_of_the_readme_do_what_it_shows(word, folder, warm):
    (folder / "examples").symlink_to(ROOT / "examples")
    fences = [piece for piece in pieces(ROOT / "README.md") if piece.text.startswith(f"$ ampwise {word} ")]
    assert len(fences) == 1
    Reading(ROOT / "README.md", folder, warm)._console(fences[0])


def test_few_examples_are_not_run():
    fences = [piece for page in PAGES for piece in pieces(page) if piece.language in ("python", "console", "bash")]
    left_out = [piece.not_run for piece in fences if piece.not_run]
    assert len(left_out) <= 7 < 30 <= len(fences)
    assert all(len(reason.split()) >= 2 for reason in left_out)


# --- numbers


def rows_of(page, first):
    """The rows of the table whose heading begins with ``first``."""
    table = (DOCS / page).read_text(encoding="utf-8").partition(f"| {first} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def result(name):
    """A benchmark's rows, as dictionaries."""
    data = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]


def test_the_table_of_formats_is_the_codes():
    rows = rows_of("concepts/formats.md", "format")
    assert [row[0] for row in rows] == ["fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3fn"]
    for name, largest, normal, subnormal, zero, epsilon in rows:
        fmt = FORMATS[name]
        shown = [float(number) for number in (largest, normal, subnormal, epsilon)]
        assert shown == pytest.approx([fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.epsilon], rel=5e-3)
        assert zero == f"2^{fmt.flush_exponent}"


def test_the_table_of_devices_is_what_is_advised():
    rows = rows_of("guides/choose_a_precision.md", "device")
    assert len(rows) == 3
    for devices, precision, scale in rows:
        for device in re.findall(r"`(.+?)`", devices):
            assert advise(gpu=device).precision == precision.lower(), device
        assert (scale == "dynamic") == (precision == "FP16")


def test_the_table_of_speeds_is_the_benchmarks():
    names = ("precisions_gpt2_gpu", "precisions_gpt1300m_gpu", "precisions_resnet50_gpu", "precisions_relevance_gpu")
    for row, name in zip(rows_of("guides/choose_a_precision.md", "model"), names, strict=True):
        measured = {each["row"]: each["×FP32"] for each in result(name)}
        shown = dict(zip(("tf32", "fp16", "bf16"), row[1:], strict=True))
        assert shown == {key: f"{measured[key]:.2f}" if key in measured else "–" for key in shown}, row[0]


def test_the_table_of_compared_precisions_is_the_benchmarks():
    rows, measured = rows_of("bench.md", "| fp32 | tf32 | fp16 | bf16"), result("precisions_gpt2_compiled_gpu")
    for at, compiled in ((0, ""), (2, " compiled")):
        found = [
            each for name in ("fp32", "tf32", "fp16", "bf16") for each in measured if each["row"] == name + compiled
        ]
        assert rows[at][1:] == [f"{each['per second'] / 1000:.0f} k" for each in found]
        assert rows[at + 1][1:] == [f"{each['×FP32']:.2f}" for each in found]


def test_the_table_of_fp8_is_the_benchmarks():
    contenders = ("ampwise current", "torchao tensorwise", "torchao rowwise")
    shrunk = {name: [] for name in contenders}
    for row, name in zip(rows_of("guides/fp8.md", "GPT"), ("gpt1300m", "d4096"), strict=True):
        rows = result(f"fp8_{name}_gpu")
        measured = {each["contender"].removesuffix(", converted by itself"): each for each in rows}
        steps = {each["work"]: each for each in result(f"fp8_roofline_{name}_gpu")}["step"]
        ours = steps["BF16 ms"] / steps["FP8 ms"]
        theirs = [measured[each]["× over BF16"] for each in contenders[1:]]
        assert row[1:] == [f"{ratio:.2f}" for ratio in (ours, *theirs)]
        for each, shares in shrunk.items():
            shares.append(round(100 * (1 - measured[each]["peak GiB"] / measured["BF16"]["peak GiB"])))
    told = "{1} to {0} % of these peaks by ampwise's layers and {3} to {2} % by torchao's"
    shares = [*shrunk["ampwise current"], *shrunk["torchao tensorwise"]]
    assert told.format(*shares) in " ".join((DOCS / "guides" / "fp8.md").read_text(encoding="utf-8").split())


def test_the_table_of_memory_is_the_benchmarks():
    measured = {
        (each["model"], each["batch"], each["precision"]): each["measured, GB"] for each in result("memory_gpu")
    }
    rows = rows_of("concepts/memory.md", "model")
    assert len(rows) == 5
    for model, batch, wide, half, saved in rows:
        numbers = [measured[model, float(batch), precision] for precision in ("fp32", "bf16")]
        assert [float(wide), float(half)] == numbers
        assert saved == f"−{100 * (1 - numbers[1] / numbers[0]):.0f} %"


def test_what_is_said_of_torchs_scaler_is_so():
    scaler, said = torch.amp.GradScaler("cpu"), dict(rows_of("concepts/loss_scaling.md", "torch's `GradScaler`"))
    assert said["starts at"] == f"{scaler.get_scale():,.0f}"
    assert f"after {scaler.get_growth_interval():,} steps without" in said
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2.0, 0.5)  # "doubled", "halved"


def told():
    """Numbers that a page tells in a sentence: the page, the sentence's piece, with the number of the benchmark."""
    compiled = {row["row"]: row["×FP32"] for row in result("precisions_gpt2_compiled_gpu")}
    yield "guides/choose_a_precision.md", f"from {compiled['bf16']:.2f} to {compiled['bf16 compiled']:.2f} times"
    yield "guides/distributed.md", f"takes {result('ddp_cpu')[0]['ratio']:.2f}x the time of the hand-written loop"
    guard = {row["what"]: row["value"] for row in result("guard_host_gpu")}
    yield "guides/production.md", f"{guard['whole run, over plain']}x the time of a run without"
    watched = {row["step"]: row["ratio"] for row in result("watch_gpu")}
    yield "guides/production.md", f"around it: {watched['ampwise run']:.2f}"
    overflow, derivative = result("trace_gpu")[:2]
    yield "guides/production.md", f"{overflow['plain steps']:.0f} to {derivative['plain steps']:.0f} plain"
    spikes = {row["model"]: row["×5, 1 step"] for row in result("spikes")}
    assert spikes["CNN, noisy labels"] == "0%"
    yield "guides/production.md", f"in {spikes['GPT on text'].replace('%', ' %')} of the cases for a GPT, and in none"
    bytes_of = {(row["precision"], row["optimizer"]): row["peak, recomputed"] for row in result("lowbit_7b")}
    plain, eight, pure = (
        bytes_of[key] for key in (("bf16", "adamw"), ("bf16", "adamw8bit"), ("bf16-pure", "adamw8bit"))
    )
    yield (
        "concepts/memory.md",
        f"{plain} with BF16 autocast and AdamW, {eight} with `adamw8bit`, {pure} with `bf16-pure`",
    )


@for_each(("page", "sentence"), list(told()))
def test_a_number_that_is_reported_is_the_benchmarks(page, sentence):
    assert sentence in " ".join((DOCS / page).read_text(encoding="utf-8").split())


@for_each("page", PAGES)
def test_rules_are_linked_by_their_names(page):
    text, rules = page.read_text(encoding="utf-8"), {rule.code: rule.name for rule in built_in_rules()}
    assert set(re.findall(r"AMP\d{3}", text)) <= set(rules)
    for code, target in re.findall(r"\[(AMP\d{3})\]\((.*?)\)", text):
        assert target == f"../rules/{code}-{rules[code]}.md"


# --- the means itself


@for_each(
    ("shown", "real"),
    [
        ("all of it", "all of it\n"),
        ("one\n…\nfour", "one\ntwo\nthree\nfour"),
        ("one\n…\ntwo", "one\ntwo"),
        ("one\n…", "one\ntwo\nthree"),
        ("the … of it …", "the middle of it and the end"),
        ("loss 2.70", "loss 2.71"),
        ("loss 0.01", "loss 0.02"),
        ("", "whatever"),
    ],
)
def test_what_is_as_shown(shown, real):
    assert is_as_shown(shown, real)


@for_each(
    ("shown", "real"),
    [
        ("all of it", "all of them"),
        ("all of it", "all of it\nand more"),
        ("one\n…\nfour", "one\ntwo"),
        ("the … of it", "the middle\nof it"),
        ("loss 2.70", "loss 2.90"),
        ("loss 2.70", "loss nan"),
        ("65504.0", "65536.0"),
        ("step 60", "step 61"),
    ],
)
def test_what_is_not(shown, real):
    assert not is_as_shown(shown, real)


def test_a_diff_is_applied():
    assert patched("a\nb\nc\nd\n", "-b\n+B\n c\n…\n d\n+e\n") == "a\nB\nc\nd\ne\n"
    with pytest.raises(AssertionError, match="not once in the file"):
        patched("a\na\n", "-a\n+b\n")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```", "it prints"),
        ("```python\nraise ValueError('no')\n```", "no"),
        ("<!-- not run: needs CUDA -->\n```python\nx = = 1\n```", "invalid syntax"),
        ("```console\n$ ampwise formats fp16\nnothing\n```", "says"),
        ("```console\n$ ampwise formats fp17\n```", "ends with 2"),
    ],
)
def test_a_page_that_is_wrong_is_reported_with_its_line(wrong, why, folder, warm):
    page = folder / "page.md"
    page.write_text(f"# Page\n\n{wrong}\n", encoding="utf-8")
    with pytest.raises((AssertionError, ValueError, SyntaxError), match=why) as caught:
        Reading(page, folder, warm).go()
    assert re.fullmatch(r"page.md, the fence at line \d+", caught.value.__notes__[-1])


def test_what_was_found_in_public_code_adds_up():
    text = (DOCS / "found.md").read_text(encoding="utf-8")
    real, arguable, false, deprecated = (int(row[1]) for row in rows_of("found.md", "judgement"))
    links = [
        re.findall(r"^(?:- |\| )\[\S+ `.+?:\d+`\]\(https://github\.com/\S+/blob/[0-9a-f]{40}/\S+#L\d+\)", part, re.M)
        for part in text.split("\n## ")[1:4]
    ]
    assert [len(part) for part in links] == [real, arguable, false]
    repositories = [list(map(int, row[2:])) for row in rows_of("found.md", "repository")]
    assert [sum(column) for column in zip(*repositories, strict=True)] == [real, arguable, false, deprecated]
    tally = f"{len(repositories)} repositories, {real + arguable + false} findings that needed judgement: {real} real, "
    assert f"{tally}{arguable} arguable, {false} false" in (ROOT / "README.md").read_text(encoding="utf-8")
