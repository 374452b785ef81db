"""Records and errors cross process borders: they pickle, copy, and hash."""

import copy
import pickle

import pytest
import torch

from ampwise import Census, Finding, census, find_format
from ampwise.errors import UnknownName
from ampwise.finding import Place
from ampwise.finding.registry import find_rule

from .for_each import for_each


def finding() -> Finding:
    return find_rule("AMP701").at(Place(device="cuda:0"), "here", evidence={"capability": "7.0"})


@for_each(
    "record",
    [Census(), census(torch.tensor([1.0, 0.0, 3.0])), finding(), find_format("fp16"), find_format("nvfp4")],
)
def test_records_travel(record):
    assert pickle.loads(pickle.dumps(record)) == record
    assert copy.deepcopy(record) == record
    assert hash(record) == hash(copy.deepcopy(record))


def test_errors_travel_with_all_they_know():
    with pytest.raises(UnknownName) as caught:
        find_format("fp61")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is UnknownName
    assert str(again) == str(caught.value)
    assert again.nearest == caught.value.nearest
