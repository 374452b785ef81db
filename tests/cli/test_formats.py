"""`ampwise formats`, as it is read and as it is parsed."""

import json
import subprocess
import sys

import pytest

from ampwise.cli import main
from ampwise.numbers.formats import BLOCK_FORMATS, FORMATS

pytest.importorskip("rich")

WITHOUT_TORCH = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from ampwise.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def plain_page(monkeypatch):
    """The same page whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def told(capsys, *words) -> list[str]:
    assert main(["formats", *words]) == 0
    return capsys.readouterr().out.splitlines()


def row(lines, label) -> str:
    return next(line for line in lines if line.startswith(label)).removeprefix(label).strip()


def test_the_overview_draws_every_format(capsys):
    lines = told(capsys)
    assert lines[:7] == [
        "format    S sign  E exponent  M mantissa  bits",
        f"fp64      S EEEEEEEEEEE {'M' * 52}  64",
        f"fp32      S EEEEEEEE {'M' * 23}  32",
        "tf32      S EEEEEEEE MMMMMMMMMM  19",
        "bf16      S EEEEEEEE MMMMMMM  16",
        "fp16      S EEEEE MMMMMMMMMM  16",
        "e5m2      S EEEEE MM  8",
    ]
    assert "e8m0      EEEEEEEE  8" in lines


def test_the_overview_has_every_number(capsys):
    lines = told(capsys)
    start = lines.index("                      smallest   smallest            decimal  needs")
    assert lines[start : start + 8] == [
        "                      smallest   smallest            decimal  needs",
        "format      largest     normal  subnormal   epsilon   digits  scaling  tensor cores since",
        "fp64      1.80e+308  2.23e-308  4.94e-324  2.22e-16     16.0  no       A100 (Ampere)",
        "fp32       3.40e+38   1.18e-38   1.40e-45  1.19e-07      7.2  no       MI100 (none on NVIDIA)",
        "tf32       3.40e+38   1.18e-38   1.15e-41  9.77e-04      3.3  no       A100 (Ampere)",
        "bf16       3.39e+38   1.18e-38   9.18e-41  7.81e-03      2.4  no       A100 (Ampere), TPU v2, MI100",
        "fp16          65504   6.10e-05   5.96e-08  9.77e-04      3.3  loss     V100 (Volta)",
        "e5m2          57344   6.10e-05   1.53e-05      0.25      0.9  tensor   H100 (Hopper), L4 and RTX 40 (Ada)",
    ]
    assert "e2m1              6          1        0.5       0.5      0.6  block    B200, MI355X (in blocks)" in lines
    assert "e8m0       1.70e+38   5.88e-39          -         1      0.3  no       B200, MI355X (scales only)" in lines


def test_the_overview_has_the_block_formats(capsys):
    lines = told(capsys)
    assert "mxfp4         e2m1     e8m0                        32      4.25  B200, MI355X" in lines
    assert "nvfp4         e2m1     e4m3fn, fp32 per tensor     16       4.5  B200 (Blackwell)" in lines
    assert all(any(line.startswith(name) for line in lines) for name in BLOCK_FORMATS)


@pytest.mark.half_by_day
@pytest.mark.parametrize("names", [(), (*FORMATS, *BLOCK_FORMATS)], ids=["overview", "details"])
@pytest.mark.parametrize("width", [80, 104, 105, 110, 200])
def test_it_fits_the_terminal(monkeypatch, capsys, names, width):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = told(capsys, *names)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    assert not any(line != line.rstrip() for line in lines)
    shown = "\n".join(lines)
    assert all(fmt.since.split()[0] in shown for fmt in FORMATS.values())


@pytest.mark.parametrize("names", [(), ("e4m3fnuz", "fp64")], ids=["overview", "details"])
def test_a_narrow_terminal_truncates_nothing(monkeypatch, capsys, names):
    monkeypatch.setenv("COLUMNS", "40")
    shown = "\n".join(told(capsys, *names))
    assert "e4m3fnuz" in shown
    assert "2.23e-308" in shown
    assert "…" not in shown


def test_formats_side_by_side(capsys):
    lines = told(capsys, "fp16", "bfloat16")
    assert lines == [
        "format  S sign  E exponent  M mantissa  bits",
        "fp16    S EEEEE MMMMMMMMMM  16",
        "bf16    S EEEEEEEE MMMMMMM  16",
        "",
        "                    FP16                  BF16",
        "name                fp16                  bf16",
        "bits                16                    16",
        "codes               65,536                65,536",
        "bias                15                    127",
        "largest             65504                 3.39e+38",
        "smallest normal     6.10e-05 = 2^-14      1.18e-38 = 2^-126",
        "smallest subnormal  5.96e-08 = 2^-24      9.18e-41 = 2^-133",
        "zero at or below    2.98e-08 = 2^-25      4.59e-41 = 2^-134",
        "overflows           from 65520: infinity  from 3.40e+38: infinity",
        "epsilon             9.77e-04 = 2^-10      7.81e-03 = 2^-7",
        "decimal digits      3.3                   2.4",
        "infinities          yes                   yes",
        "NaNs                yes                   yes",
        "needs scaling       loss                  no",
        "tensor cores since  V100 (Volta)          A100 (Ampere), TPU v2, MI100",
        "torch dtype         torch.float16         torch.bfloat16",
        "aliases             half, float16, f16    bfloat16, bfloat",
        "",
        "FP16: Gradients at or below 2^-25 vanish and values from 65520 on become infinite: use a loss scale.",
        "BF16: FP32's range in half the memory, so no loss scale; 8 significant bits, so keep FP32 weights.",
    ]


@pytest.mark.parametrize(
    ("name", "label", "fact"),
    [
        ("fp8", "overflows", "above 464: NaN"),
        ("e5m2", "overflows", "from 61440: infinity"),
        ("e3m2", "overflows", "never: stays at 28"),
        ("e8m0", "overflows", "from 2.55e+38: NaN"),
        ("fp32", "overflows", "past the largest: infinity"),
        ("fp64", "overflows", "past the largest: infinity"),
        ("fp64", "codes", "2^64"),
        ("fp64", "zero at or below", "2^-1075"),
        ("e8m0", "zero at or below", "never: it has no zero"),
        ("e8m0", "smallest subnormal", "none"),
        ("tf32", "bits", "19, stored in 32"),
        ("tf32", "torch dtype", "none"),
        ("e2m1", "NaNs", "no"),
        ("fp4", "needs scaling", "block"),
        ("nvfp4", "largest", "2688 × tensor's scale"),
        ("mxfp8", "range in a block", "229376 to 1"),
        ("mxfp8_e5m2", "aliases", "none"),
    ],
)
def test_facts(capsys, name, label, fact):
    assert row(told(capsys, name), f"{label}  ") == fact


def test_two_names_of_one_format_are_one_column(capsys):
    assert told(capsys, "half", "fp16", "torch.float16") == told(capsys, "fp16")


def test_the_parts_of_a_block_format_are_drawn(capsys):
    assert told(capsys, "nvfp4")[1:3] == ["e2m1    S EE M  4", "e4m3fn  S EEEE MMM  8"]


def test_blocks_of_colour_instead_of_words(monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = "\n".join(told(capsys, "e5m2"))
    assert "\x1b[30;41mS\x1b[0m\x1b[30;42mEEEEE\x1b[0m\x1b[30;46mMM\x1b[0m" in shown


def test_json(capsys):
    everything = json.loads("\n".join(told(capsys, "--json")))
    assert everything == [fmt.as_dict() for fmt in (*FORMATS.values(), *BLOCK_FORMATS.values())]
    fp16, mxfp4 = json.loads("\n".join(told(capsys, "half", "mxfp4", "fp16", "--json")))
    assert (fp16["name"], fp16["smallest_subnormal"], fp16["flush_exponent"]) == ("fp16", 2.0**-24, -25)
    assert (mxfp4["element"], mxfp4["scale"], mxfp4["block_size"]) == ("e2m1", "e8m0", 32)


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_unknown_name_is_one_line(capsys, more):
    assert main(["formats", "fp16", "fp17", *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == ("ampwise: error: unknown format 'fp17'. Did you mean fp16? `ampwise formats` lists them all.\n")


@pytest.mark.parametrize("words", [[], ["fp16", "nvfp4"], ["--json"]])
def test_it_needs_no_torch(words):
    command = [sys.executable, "-c", WITHOUT_TORCH, "formats", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "fp16" in done.stdout
