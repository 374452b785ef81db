"""Modules of tests' own folders are forgotten after each test: the next has a ``train`` of its own."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _own_modules_only(tmp_path_factory):
    yield
    folder = str(tmp_path_factory.getbasetemp().parent)
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]
