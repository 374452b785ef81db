"""A small decoder, whose steps are run once for all tests."""

import pytest

pytest.importorskip("torch")

from ampwise.tune.memory.decoder import decoder_factory, decoder_shape
from ampwise.tune.memory.setup import TrainingSetup

SMALL = {"layers": 2, "hidden": 128, "vocab": 512, "seq": 64}


@pytest.fixture(scope="session")
def case_of():
    """Make a case of a decoder with such sizes, trained so."""

    def make(sizes=None, **options):
        return TrainingSetup(
            decoder_factory(decoder_shape(None, SMALL | (sizes or {}))), **{"optimizer": "adamw", **options}
        )

    return make


@pytest.fixture(scope="session")
def small(case_of):
    return case_of()
