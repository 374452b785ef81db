"""The table of 7 B parameters in the docs: from its record, which is what is counted."""

import json
from pathlib import Path

import pytest

from ampwise import memory
from ampwise.tune.advise.model import parse_count
from ampwise.tune.memory.allocation_log import PER_PARAMETER
from ampwise.tune.memory.decoder import decoder_shape

ROOT = Path(__file__).parents[3]
GENERATOR = ROOT / "tools" / "generate_docs.py"
RECORD = json.loads((ROOT / "benchmarks" / "results" / "lowbit_7b.json").read_text(encoding="utf-8"))
ROWS = [dict(zip(RECORD["columns"], row, strict=True)) for row in RECORD["rows"]]
SEVEN = decoder_shape(parse_count("7B"), {})


def named(row):
    return f"{row['precision']}-{row['optimizer']}"


def number(cell):
    return 0.0 if cell == "–" else cell


def kept(precision, optimizer, layers):
    """Of a model as wide, with fewer layers."""
    sizes = {"hidden": SEVEN.hidden, "heads": SEVEN.heads, "ffn": SEVEN.ffn, "vocab": SEVEN.vocab, "seq": 16}
    options = {"precisions": [precision], "optimizer": optimizer, "largest": False}
    return memory(layers=layers, **sizes, **options).at(precision).most


@pytest.mark.few_by_day(4)
@pytest.mark.parametrize("row", ROWS, ids=named)
def test_a_row_is_what_is_counted(row):
    one, two = (kept(row["precision"], row["optimizer"], layers) for layers in (1, 2))
    whole = 0.0
    for kind in PER_PARAMETER:
        first, second = one.get(kind, 0), two.get(kind, 0)
        gb = (first + (SEVEN.layers - 1) * (second - first)) / 1e9
        assert number(row[kind]) == pytest.approx(gb, abs=0.06), kind
        whole += gb
    assert row["bytes a parameter"] == pytest.approx(whole * 1e9 / SEVEN.parameters, abs=0.02)
    assert number(row["peak, recomputed"]) <= number(row["peak"]) + 0.5
    assert number(row["peak, recomputed"]) >= whole - 0.1


def test_it_goes_from_16_bytes_down():
    every = [row["bytes a parameter"] for row in ROWS]
    assert every[:2] == [16, 16]
    assert every == sorted(every, reverse=True)
    assert every[-1] < 5.2


def test_the_page_has_it(load_script, tmp_path):
    docs = load_script(GENERATOR)
    text = docs.pages_with_tables(ROOT)["docs/low_bit.md"]
    assert all(f"| {row['precision']} | {row['optimizer']} |" in text for row in ROWS)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "low_bit.md").write_text("<!-- The table of benchmarks/results/lowbit_7b.json. --> and no end")
    with pytest.raises(ValueError, match="a table is to be between"):
        docs.pages_with_tables(tmp_path)
    assert not docs.pages_with_tables(tmp_path / "nothing")
