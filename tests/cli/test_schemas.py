"""The schemas of --json: closed, so that a change of the output without a change of the schema fails.

What the other tests of this folder print with --json is held to them, too: see conftest.py.
"""

import json

import pytest

pytest.importorskip("jsonschema")

from jsonschema import Draft202012Validator

from ampwise.cli import commands, main
from ampwise.cli.schema import SCHEMAS
from ampwise.finding.registry import built_in_rules
from ampwise.finding.strict_json import SCHEMA_VERSION
from ampwise.hardware.cpu import Cpu
from ampwise.hardware.device import CudaDevice, Fp32Switches
from ampwise.hardware.machine import Machine
from ampwise.hardware.torch_info import TorchInfo

from ..for_each import for_each
from .schemas import follows, schema, validator

NAMES = sorted(file.stem for file in SCHEMAS.glob("*.json"))
ARRAYS = {"check", "check-statistics", "explain", "formats"}
NOT_A_COMMAND = {"check-statistics": "check", "comparison": "report", "equal-loss": "bench", "runs": "report"}


def parts(node):
    """Yield every object in a schema."""
    if isinstance(node, dict):
        yield node
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from parts(part)


@for_each("name", NAMES)
def test_a_schema_is_one_and_closed(name):
    made = schema(name)
    Draft202012Validator.check_schema(made)
    assert made["$id"] == f"urn:ampwise:schema:{name}:{SCHEMA_VERSION}"
    assert NOT_A_COMMAND.get(name, name) in commands()
    for part in parts(made):
        kinds = part.get("type", ())
        if "object" in ([kinds] if isinstance(kinds, str) else kinds):
            assert "additionalProperties" in part, f"{name}: open without saying so: {str(part)[:200]}"
            assert set(part.get("required", ())) <= set(part.get("properties", ()))
        if "array" in ([kinds] if isinstance(kinds, str) else kinds):
            assert "items" in part


def test_every_object_has_a_version():
    for name in NAMES:
        forms = [form for form in schema(name).get("anyOf", [schema(name)]) if form["type"] == "object"]
        assert bool(forms) is (name not in ARRAYS)
        assert all(form["properties"]["version"]["const"] == SCHEMA_VERSION for form in forms)
        assert all("version" in form["required"] for form in forms)


def test_shared_parts_are_the_same_everywhere():
    shared = {}
    for name in NAMES:
        for part, what in schema(name).get("$defs", {}).items():
            if part in ("finding", "place", "severity", "evidence", "number"):
                assert shared.setdefault(part, what) == what, f"{name}: {part}"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["advise", "--gpu", "h200", "--symptom", "nan", "--idea", "autocast-off", "--json"], "advise"),
        (["explain", "AMP101", "--json"], "explain"),
        (["formats", "fp16", "mxfp8", "--json"], "formats"),
        (["gpu", "h200", "--json"], "gpu"),
        (["gpu", "--list", "--json"], "gpu"),
        (["memory", "--layers", "1", "--hidden", "128", "--vocab", "512", "--seq", "64", "--json", "-q"], "memory"),
    ],
)
def test_a_new_key_is_noticed(words, name, capsys):
    main(words)
    data = json.loads(capsys.readouterr().out)
    follows(name, data)
    (data[0] if isinstance(data, list) else data)["new"] = 1
    assert not validator(name).is_valid(data)


def test_a_machine_with_a_gpu():
    torch = TorchInfo(
        version="2.13",
        cuda="13.0",
        hip=None,
        devices=(
            CudaDevice(
                index=0,
                name="NVIDIA H200",
                capability="9.0",
                memory_bytes=150_000_000_000,
                bf16_claimed=True,
                bf16_native=True,
                gpu=None,
            ),
        ),
        mps=False,
        fp32=Fp32Switches(matmul_tf32=False, convolution_tf32=True, matmul_precision=None),
        problem=None,
    )
    machine = Machine(python="3.11", platform="Linux", cpu=Cpu(model=None, features=None), driver="580", torch=torch)
    follows("gpu", {"version": 1, "machine": machine.as_dict(), "findings": []})


def test_rules_are_all_explained_as_promised(capsys):
    assert main(["explain", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    follows("explain", data)
    assert len(data) >= len(built_in_rules())


# --- the command


def test_schemas_are_listed_and_printed(capsys):
    assert main(["schema"]) == 0
    assert capsys.readouterr().out.split() == NAMES
    assert main(["schema", "bench"]) == 0
    assert json.loads(capsys.readouterr().out) == schema("bench")


def test_an_unknown_name_is_refused(capsys):
    assert main(["schema", "benhc"]) == 2
    message = "unknown schema 'benhc'. Did you mean bench? `ampwise schema` lists them."
    assert capsys.readouterr().err == f"ampwise: error: {message}\n"
