"""Capsules: what comes back is what was saved, bit for bit; what was changed is refused; nothing is ever half there."""

import collections
import hashlib
import json
import math
import os
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampwise import Capsules
from ampwise.errors import BadInput
from ampwise.finding import Place
from ampwise.finding.registry import find_rule
from ampwise.runs.tensor_files import DTYPES, read_tensors
from ampwise.trace.capsule import CapsuleContents, capsule_files, next_path, read, size_of, write
from ampwise.trace.capsule.capsule_files import BATCH, CHECKSUM, METADATA, WEIGHTS
from ampwise.train.precision.policy import Policy
from ampwise.train.random_state import plain_random_state, restore_random

CPU = torch.device("cpu")
FILES = {METADATA, CHECKSUM, BATCH, WEIGHTS}


def contents(**changes):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    full = CapsuleContents(
        args=(torch.randn(4, 3),),
        kwargs={"target": torch.arange(4)},
        random=plain_random_state(CPU),
        weights=dict(model.named_parameters()),
        buffers=dict(model.named_buffers()),
        precision="fp16",
        policy=Policy("fp16").keep("fp32", "1").as_dict(),
        scale=65536.0,
        step=12,
        loss=math.nan,
        build="train:make",
        build_args={"width": 3, "names": ["a", "b"]},
        findings=[find_rule("AMP907").at(Place(file="train.py", line=3, step=12), "0/0", evidence={"loss": math.nan})],
        evaluating=("1",),
    )
    return replace(full, **changes)


def equal(one, other):
    """Of the same kind and the same bits, down to those of NaNs."""
    if isinstance(one, torch.Tensor):
        facts = (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        return facts and torch.equal(bits(one), bits(other))
    if isinstance(one, float):
        return type(other) is float and struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@st.composite
def tensors(draw):
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    values = bytearray(
        value & (1 if dtype == torch.bool else 255) for value in draw(st.binary(min_size=size, max_size=size))
    )
    flat = torch.frombuffer(values, dtype=torch.uint8).clone() if values else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(dtype).reshape(shape)
    return tensor.t() if len(shape) == 2 and draw(st.booleans()) else tensor


NANS = st.sampled_from([math.nan, -math.nan, struct.unpack(">d", bytes.fromhex("7ff4000000000123"))[0]])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | NANS | st.text(max_size=5)
MORE = st.binary(max_size=3) | st.sets(st.integers(), max_size=3) | st.text(st.characters(exclude_categories=()))


def nested(leaves):
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=8,
    )


VALUES = nested(PLAIN | MORE | tensors())


@given(st.lists(VALUES, max_size=3), st.dictionaries(st.sampled_from(["x", "y", "mask"]), VALUES), nested(PLAIN))
def test_whatever_a_function_is_given_comes_back(tmp_path_factory, args, kwargs, option):
    given_it = CapsuleContents(args=tuple(args), kwargs=kwargs, build_args={"option": option}, step=1)
    back = read(write(tmp_path_factory.mktemp("capsules"), given_it))
    assert equal(back.args, given_it.args)
    assert equal(dict(back.kwargs), kwargs)
    assert equal(back.build_args["option"], option)


def test_all_of_it_comes_back(tmp_path):
    saved = contents()
    path = write(tmp_path, saved)
    assert path == tmp_path / "step-000012"
    assert {file.name for file in path.iterdir()} == FILES
    back = read(path)
    for name in ("args", "kwargs", "random", "weights", "buffers", "policy", "build_args"):
        ours, theirs = getattr(back, name), getattr(saved, name)
        assert equal({key: value.detach() for key, value in theirs.items()} if name == "weights" else theirs, ours), (
            name
        )
    for name in ("precision", "scale", "step", "rank", "build", "evaluating"):
        assert getattr(back, name) == getattr(saved, name), name
    assert math.isnan(back.loss)
    assert [(each.rule.code, each.place, each.message) for each in back.findings] == [
        (each.rule.code, each.place, each.message) for each in saved.findings
    ]
    assert back.device == "cpu"
    assert back.environment["torch"] == torch.__version__
    assert Policy.from_dict(back.policy) == Policy("fp16").keep("fp32", "1")


def test_random_numbers_go_on_as_they_would_have(tmp_path):
    saved = contents()
    path = write(tmp_path, saved)
    restore_random(saved.random, CPU)
    expected = torch.rand(3), torch.randn(2)
    torch.manual_seed(0)
    restore_random(read(path).random, CPU)
    assert equal((torch.rand(3), torch.randn(2)), expected)


def test_the_size_is_reported_before(tmp_path):
    for weights in (True, False):
        told = size_of(contents(), weights)
        path = write(tmp_path, contents(), weights)
        written = sum(file.stat().st_size for file in path.iterdir())
        assert abs(told - written) < 1000
    big = {"w": torch.zeros(10_000)}
    assert size_of(contents(weights=big)) - size_of(contents(weights=big), weights=False) > 40_000


def test_without_weights_there_are_none(tmp_path):
    path = write(tmp_path, contents(), weights=False)
    assert {file.name for file in path.iterdir()} == FILES - {WEIGHTS}
    back = read(path)
    assert (back.weights, back.buffers) == ({}, {})
    assert equal(back.args[0].shape, torch.Size((4, 3)))


def test_tied_weights_are_written_once_and_come_back_under_both_names(tmp_path):
    weight = torch.randn(50, 20)
    path = write(
        tmp_path, contents(weights={"wte.weight": weight, "head.weight": weight.view(50, 20), "t": weight.t()})
    )
    assert set(read_tensors(path / WEIGHTS).tensors) == {"wte.weight", "t", *contents().buffers}
    back = read(path).weights
    assert torch.equal(back["head.weight"], weight)
    assert torch.equal(back["t"], weight.t())


def test_a_tensor_that_is_given_twice_is_one_again(tmp_path):
    x, trained = torch.ones(2), torch.ones(3, requires_grad=True)
    back = read(write(tmp_path, contents(args=(x, {"same": x}, trained), kwargs={})))
    assert back.args[1]["same"] is back.args[0]
    assert back.args[2].requires_grad
    assert back.args[2].is_leaf
    assert not back.args[0].requires_grad


def test_what_lay_on_the_device_goes_to_the_device_and_the_rest_stays(tmp_path):
    kinds = []
    path = write(tmp_path, contents(args=(torch.ones(2), torch.ones(3)), device="cuda"))
    facts = json.loads((path / METADATA).read_text())
    assert facts["device"] == "cuda"
    assert facts["args"] == [{"ref": {"name": f"argument {number}", "on": "cpu"}} for number in (1, 2)]  # lengths, say

    def where(kind):
        kinds.append(kind)
        return torch.device("meta")

    assert read(path, where).args[0].device.type == "cpu"
    assert read(write(tmp_path, contents()), where).args[0].device.type == "meta"
    assert kinds == ["cuda", "cpu"]


# Batches that are objects


Pair = collections.namedtuple("Pair", "x y")


@dataclass
class Batch:
    pixels: torch.Tensor
    label: int


class Encoding(collections.UserDict):
    """As transformers' BatchEncoding is."""


def test_batches_that_are_objects_come_back_as_their_values(tmp_path):
    x = torch.ones(2)
    batches = (Pair(x, 3), Batch(x, 4), Encoding(input_ids=x), collections.OrderedDict(a=x))
    pair, batch, encoding, ordered = read(write(tmp_path, contents(args=batches))).args
    first, second = pair
    assert (first is pair.x, second, pair.y, pair._fields) == (True, 3, 3, ("x", "y"))
    leaves = torch.utils._pytree.tree_leaves(pair)  # also to torch it is a named tuple
    assert len(leaves) == 2
    assert (batch.label, batch["label"]) == (4, 4)
    assert torch.equal(encoding["input_ids"], encoding.input_ids)
    assert dict(**ordered).keys() == {"a"}
    with pytest.raises(AttributeError, match="the capsule's values of a 'Encoding' have no 'to'"):
        encoding.to("cpu")


def nested(depth):
    return [nested(depth - 1)] if depth else []


def endless():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), r"argument 1 is a object\. Supported: numbers, strings, bytes, None, tensors, arrays, and lists"),
        ([1, {"f": print}], r"argument 1\[1\]\['f'\] is a builtin_function_or_method"),
        (Encoding({3: "x"}), "argument 1 is a Encoding with keys that are not strings"),
        (Batch, "argument 1 is a type"),
        (nested(51), "is nested more than 50 deep, or contains itself"),
        (endless(), "is nested more than 50 deep, or contains itself"),
        (1 << 5000, "argument 1 is an integer of 5,001 bits"),
        ([torch.eye(2).to_sparse()], r"argument 1\[0\] is not dense"),
    ],
    ids=range(8),
)
def test_unsupported_values_are_refused_and_nothing_is_left(tmp_path, value, said):
    with pytest.raises(BadInput, match=said):
        write(tmp_path / "new", contents(args=(value,)))
    with pytest.raises(BadInput, match=said.replace("argument 1", "argument 'x'")):
        size_of(contents(kwargs={"x": value}))
    assert not list(tmp_path.iterdir())


def test_other_things_that_cannot_be_written(tmp_path):
    for build in ("train", "train:", ":make", "os.path:a.b", "a b:make", "train-it:make", "\x1b.py:make"):
        with pytest.raises(BadInput, match=r"build .*: expected train.py:make or train:make"):
            write(tmp_path, contents(build=build))
    with pytest.raises(BadInput, match="weights: 'w' is on the meta device"):
        write(tmp_path, contents(weights={"w": torch.empty(1, device="meta")}))
    with pytest.raises(BadInput, match="'w' is the name of both a weight and a buffer"):
        write(tmp_path, contents(weights={"w": torch.ones(1)}, buffers={"w": torch.ones(1)}))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"a capsule cannot be written to .*file: File exists. Choose another folder"):
        write(tmp_path / "file", contents())


# Where it is put


def test_never_over_another(tmp_path):
    (tmp_path / "step-000012").mkdir()  # whatever it is
    assert write(tmp_path, contents()).name == "step-000012-2"
    (tmp_path / "step-000012-3").symlink_to("nowhere")
    assert write(tmp_path, contents()).name == "step-000012-4"
    assert write(tmp_path, contents(rank=3)).name == "step-000012-rank3"
    assert write(tmp_path, contents(step=None)).name == "step"
    assert not list((tmp_path / "step-000012").iterdir())


@pytest.mark.parametrize("at", range(1, 5))
def test_an_incomplete_capsule_is_never_left_behind(tmp_path, monkeypatch, at):
    """Each of its four files is put in place by a rename, and the disk may be full at any of them."""
    calls, replace_file = [], os.replace

    def full(*names):
        calls.append(names)
        if len(calls) == at:
            raise OSError(28, "No space left on device")
        return replace_file(*names)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(BadInput, match=r"cannot be written to .*: No space left on device. Choose another folder."):
        write(tmp_path, contents())
    assert len(calls) == at
    assert not list(tmp_path.iterdir())


def test_the_leftovers_of_a_killed_process_are_not_a_capsule(tmp_path):
    path = write(tmp_path, contents())
    torn = path.rename(tmp_path / ".step-000012.0a1b2c3d.new")
    (torn / CHECKSUM).unlink()
    with pytest.raises(BadInput, match=r"capsule.sha256 cannot be read: No such file"):
        read(torn)
    with pytest.raises(BadInput, match=r"is not a capsule: it has no capsule.json\.$"):
        read(tmp_path)  # the message does not name it


def test_nothing_is_written_if_the_disk_is_full(tmp_path, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")(10, 9, 1000)
    monkeypatch.setattr(capsule_files.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(BadInput, match=r"bytes does not fit in .*, where 1,000 bytes are free. Leave out the weights"):
        write(tmp_path, contents())
    assert not list(tmp_path.iterdir())


# What is refused


def reseal(path, change):
    """Change capsule.json and write a matching checksum."""
    facts = json.loads((path / METADATA).read_text())
    change(facts)
    data = json.dumps(facts).encode()
    (path / METADATA).write_bytes(data)
    (path / CHECKSUM).write_text(f"{hashlib.sha256(data).hexdigest()}  {METADATA}\n")


def refused(path, said):
    with pytest.raises(BadInput, match=said) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()


def test_other_folders_and_files_are_not_capsules(tmp_path):
    refused(tmp_path / "gone", "gone: there is no such folder")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "file: expected a capsule, which is a folder; got a file")
    refused(tmp_path, "is not a capsule: it has no capsule.json.$")
    for step in (3, 1, 2, 4):
        write(tmp_path, contents(step=step))
    refused(tmp_path, r"Give one of the capsules in it: 'step-000001', 'step-000002', 'step-000003', ….$")
    (tmp_path / METADATA).write_text('{"format": "another"}')
    refused(tmp_path, "is not a capsule: capsule.json has another format")
    (tmp_path / METADATA).write_text("[" * 100_000)
    refused(tmp_path, "capsule.json is damaged")
    (tmp_path / METADATA).unlink()
    (tmp_path / METADATA).mkdir()
    refused(tmp_path, "capsule.json (cannot be read|is not a plain file)")


def test_a_newer_version_says_so(tmp_path):
    path = write(tmp_path, contents())
    reseal(path, lambda facts: facts.update(version=99))
    refused(path, "is a capsule of version '99'; this ampwise reads version 2")


@pytest.mark.parametrize("name", sorted(FILES))
def test_any_flipped_bit_is_seen(tmp_path, name):
    path = write(tmp_path, contents())
    data = (path / name).read_bytes()
    for position in {0, 9, len(data) // 3, len(data) // 2, len(data) - 20}:
        for bit in (0, 6):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            (path / name).write_bytes(changed)
            refused(path, METADATA if name == CHECKSUM else name)
    (path / name).write_bytes(data)
    read(path)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_that_is_cut_off_longer_gone_or_a_link_is_refused(tmp_path, name):
    path = write(tmp_path, contents())
    file, data = path / name, (path / name).read_bytes()
    for changed in (data[:-70], b"", *([] if name == CHECKSUM else [data + b"x"])):
        file.write_bytes(changed)
        refused(path, METADATA if name == CHECKSUM else name)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(data)
    file.unlink()
    refused(path, f"{name} cannot be read: No such file" if name != METADATA else "is not a capsule")
    file.symlink_to(elsewhere)
    refused(path, f"{name} cannot be read: {name} is a link")


def test_a_damaged_header_names_the_file(tmp_path):
    path = write(tmp_path, contents())
    data = (path / BATCH).read_bytes()
    (path / BATCH).write_bytes(struct.pack("<Q", 2**40) + data[8:])
    refused(path, "tensors.safetensors is damaged: its header should have 1,099,511,627,776 bytes")


def test_no_other_file_can_be_named(tmp_path):
    path = write(tmp_path, contents())
    (tmp_path / "secret").write_bytes((path / BATCH).read_bytes())
    for other in ("../secret", str(tmp_path / "secret"), "..\\secret", ""):
        reseal(path, lambda facts, other=other: facts["files"].update({other: facts["files"][BATCH]}))
        refused(path, "it must list the files tensors.safetensors and weights.safetensors")
        reseal(path, lambda facts, other=other: facts["files"].pop(other))
    read(path)


def set_in(*keys, value):
    def change(facts):
        for key in keys[:-1]:
            facts = facts[key]
        facts[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda facts: facts.pop("precision"), "'precision' is missing"),
        (set_in("files", BATCH, value={}), "tensors.safetensors has no checksum"),
        (set_in("args", value=3), "args: expected list, got '3'"),
        (set_in("args", 0, value={"call": "os.system"}), "a value of unknown type: 'call'"),
        (set_in("args", 0, value={"tuple": {}}), "expected a list"),
        (set_in("args", 0, value={"dict": []}), "expected values by name"),
        (set_in("args", 0, value={"ref": {"name": "../x"}}), "the tensor '../x' is missing"),
        (set_in("args", 0, value={"ref": {"name": "argument 1", "\x1b[2J": 1}}), "a tensor with unknown keys"),
        (set_in("args", 0, value={"float": "zz"}), "a float that is not 16 hexadecimal digits"),
        (set_in("args", 0, value={"named": {"__class__": 1}}), "a named tuple with invalid field names"),
        (set_in("args", 0, value={"object": [1, {}]}), "an object without a class name"),
        (set_in("kwargs", "target", "ref", "requires_grad", value=True), "cannot require gradients"),
        (set_in("scale", value="much"), "scale: expected float, got 'much'"),
        (set_in("step", value="12"), "step: expected int, got '12'"),
        (set_in("model", "weights", "0.bias", value="gone"), "'gone' is missing"),
        (set_in("model", value=[]), "capsule.json is damaged"),
        (set_in("findings", value=None), None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_facts_are_refused_despite_a_valid_checksum(tmp_path, change, said):
    path = write(tmp_path, contents())
    reseal(path, change)
    if said is None:
        assert not read(path).findings
    else:
        refused(path, said)


def test_nothing_is_pickled_or_run():
    """By their own text: no reader of a capsule has a way to make code of what it holds."""
    from ampwise.runs import plain_data, tensor_files
    from ampwise.trace.capsule import capsule_files

    for module in (tensor_files, plain_data, capsule_files):
        text = Path(module.__file__).read_text()
        assert not [word for word in ("pickle", "torch.load", "eval(", "exec(", "import_module") if word in text]


def test_where_it_will_be_is_known_before(tmp_path):
    contents = CapsuleContents(step=20)
    for expected in ("step-000020", "step-000020-2"):
        announced = next_path(tmp_path, contents)
        assert announced == tmp_path / expected
        assert write(tmp_path, contents) == announced


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"folder": 3}, "Capsules(3): expected a folder, such as Capsules('capsules')."),
        ({"arguments": [1]}, "Capsules(arguments=[1]): expected a dict by name, such as {'width': 64}."),
        ({"arguments": {1: 2}}, "Capsules(arguments={1: 2}): expected a dict by name, such as {'width': 64}."),
    ],
)
def test_where_and_how_are_asked_for_in_words(given, said):
    with pytest.raises(BadInput, match=f"^{re.escape(said)}$"):
        Capsules(**{"folder": "capsules", **given})
