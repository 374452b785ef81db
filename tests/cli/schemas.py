"""Hold what the commands print with --json to the schemas that are published for it."""

import functools
import json

from jsonschema import Draft202012Validator

from ampwise.cli.schema import SCHEMAS

__all__ = ["follows", "schema", "schema_of", "validator"]


def schema(name):
    return json.loads((SCHEMAS / f"{name}.json").read_text())


@functools.cache
def validator(name):
    return Draft202012Validator(schema(name))


def schema_of(words, data):
    """The name of the schema for what a command line printed."""
    if words[0] == "report" and "runs" in data:
        return "runs"
    if words[0] == "report" and "before" in data:
        return "comparison"
    if "--equal-loss" in words:
        return "equal-loss"
    return "check-statistics" if "--statistics" in words else "check" if words[0] == "replay" else words[0]


def follows(name, data):
    """Assert that data follows a schema, and say where it does not."""
    problems = [f"{error.json_path}: {error.message[:300]}" for error in validator(name).iter_errors(data)]
    assert not problems, f"not as src/ampwise/cli/_schemas/{name}.json: change both, or neither\n" + "\n".join(problems)
