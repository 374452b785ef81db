"""Modules of tests' own folders are forgotten after each test: the next has a ``train`` of its own."""

import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def _own_modules_only(tmp_path_factory):
    yield
    folder = str(tmp_path_factory.getbasetemp().parent)
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]


@pytest.fixture
def onednn():
    """As it is when a process starts: on a CPU without BF16, a product in BF16 of another test may have left it off."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(True)
    yield
    torch._C._set_mkldnn_enabled(before)
