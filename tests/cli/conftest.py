"""Modules of tests' own folders are forgotten after each test: the next has a ``train`` of its own.

What a test prints with --json is held to the schema that is published for it.
"""

import importlib.util
import io
import json
import sys

import pytest

from ampwise import cli


@pytest.fixture(autouse=True)
def _own_modules_only(tmp_path_factory):
    yield
    folder = str(tmp_path_factory.getbasetemp().parent)
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]


class Copy(io.TextIOBase):
    """A stream that also remembers what is written to it."""

    def __init__(self, stream):
        self.stream, self.parts = stream, []

    def write(self, text):
        self.parts.append(text)
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


@pytest.fixture(autouse=True)
def _json_follows_its_schema(monkeypatch):
    if importlib.util.find_spec("jsonschema") is None:  # on the GPU machine
        return
    from .schemas import follows, schema_of

    really = cli._run

    def run(words):
        if "--json" not in words:
            return really(words)
        copy = Copy(sys.stdout)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", copy)
            code = really(words)
        if copy.parts:
            data = json.loads("".join(copy.parts))
            follows(schema_of(words, data), data)
        return code

    monkeypatch.setattr(cli, "_run", run)
