"""docs/peers.md from a record of what was seen."""

import json

import pytest

from ampwise.errors import BadInput

from .registry import HERE

RECORD = {
    "contenders": {
        "ampwise": {"versions": {"torch": "2.13.0"}, "date": "2026-01-02"},
        "torch": {"versions": {"torch": "2.13.0"}, "date": "2026-01-02"},
        "lightning + ampwise": {"versions": {"lightning": "2.6.6", "torch": "2.13.0"}, "date": "2025-12-31"},
    },
    "cases": {
        "a-case": {
            "title": "Clip | step",
            "why": "It matters.",
            "outcomes": {"torch": {"right": False, "seen": "is nan"}, "ampwise": {"right": True, "seen": "is 1"}},
        }
    },
}


@pytest.fixture(scope="module")
def page(load_script):
    docs = load_script(HERE.parents[1] / "tools" / "generate_docs.py")
    return lambda file: docs.peers_page(file)["docs/peers.md"]


@pytest.fixture
def record(tmp_path):
    return tmp_path / "seen.json"


def test_the_page_has_verdicts_versions_and_what_was_seen(page, record):
    record.write_text(json.dumps(RECORD))
    text = page(record)
    assert (
        "| case | ampwise | torch | lightning + ampwise |\n| --- | --- | --- | --- |\n"
        "| [Clip \\| step](#a-case) | right | **wrong** | – |\n"
    ) in text
    assert "| lightning + ampwise | lightning 2.6.6, torch 2.13.0 | 2025-12-31 |\n" in text
    assert text.endswith(
        '<a id="a-case"></a>\n\n### Clip | step\n\n`a-case`\n\nIt matters.\n\n'
        "|  |  | outcome |\n| --- | --- | --- |\n| ampwise | right | is 1 |\n| torch | **wrong** | is nan |\n"
    )


def test_no_record_is_said(page, record):
    assert "Nothing seen yet" in page(record)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a record of peers"),
        ("[]", "not a record of peers"),
        (json.dumps({**RECORD, "contenders": {}}), "torch has no versions; run `make peers`"),
    ],
)
def test_a_broken_record_is_refused_by_name(page, record, text, message):
    record.write_text(text)
    with pytest.raises(BadInput) as caught:
        page(record)
    assert "seen.json: " in str(caught.value)
    assert message in str(caught.value)
