"""Whatever evidence holds, the JSON is strict."""

import json
from fractions import Fraction
from pathlib import PurePosixPath

import numpy as np

from ampwise.finding import Severity
from ampwise.finding.strict_json import dumps

from ..for_each import for_each


@for_each(
    ("value", "expected"),
    [
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        (float("-inf"), "-Infinity"),
        (True, True),
        (None, None),
        (1e-45, 1e-45),
        (2**70, 2**70),
        (np.float32(1.5), 1.5),
        (np.float32("inf"), "Infinity"),
        (np.int64(3), 3),
        (Fraction(1, 2), 0.5),
        (Severity.ERROR, "error"),
        (PurePosixPath("a/b"), "a/b"),
        (b"x", "b'x'"),
        ((1, [2, (float("nan"),)]), [1, [2, ["NaN"]]]),
        ({1: {"a": float("inf")}}, {"1": {"a": "Infinity"}}),
        ("\udcff", r"\udcff"),
    ],
)
def test_every_value_has_a_form(value, expected):
    assert json.loads(dumps(value)) == expected


def test_evidence_that_holds_itself_ends():
    loop: list[object] = []
    loop.append(loop)
    json.loads(dumps(loop))


def test_a_document_ends_in_a_newline():
    assert dumps([], indent=None) == "[]\n"
