"""A small decoder, whose steps are run once for all tests."""

import pytest

pytest.importorskip("torch")

from ampwise.tune.memory.case import Case
from ampwise.tune.memory.decoder import decoder_maker
from ampwise.tune.memory.shapes import shape_for

SMALL = {"layers": 2, "hidden": 128, "vocab": 512, "seq": 64}


@pytest.fixture(scope="session")
def case_of():
    """Make a case of a decoder with such sizes, trained so."""

    def make(sizes=None, **options):
        return Case(decoder_maker(shape_for(None, SMALL | (sizes or {}))), **{"optimizer": "adamw", **options})

    return make


@pytest.fixture(scope="session")
def small(case_of):
    return case_of()
