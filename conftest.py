"""For doctests: files that have none are not gone through, nor those whose imports need Triton where there is none."""

import importlib.util

import pytest
from _pytest.doctest import DoctestModule

collect_ignore = []
if importlib.util.find_spec("triton") is None:
    collect_ignore += ["src/ampwise/tune/diff/statistics_kernel.py"]


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path):
    """To look for examples, pytest imports a file and asks every object in it for its docstring: nine files in ten
    have none, and those under tests are gone through a second time."""
    found = yield
    if any(isinstance(each, DoctestModule) for each in found) and b">>>" not in file_path.read_bytes():
        return [each for each in found if not isinstance(each, DoctestModule)]
    return found
