"""Tensors in a file: as the public format has them, bit for bit; and nothing else is believed."""

import hashlib
import json
import math
import os
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampwise.errors import BadInput, UnsupportedTensor
from ampwise.runs.tensor_files import DTYPES, read_tensors, size_on_disk, write_tensors


def file_of(header, data=b"", length=None):
    """A file by the specification: the length of the header, the header, the bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


@st.composite
def tensors(draw):
    """Any dtype, shape and bits, also those of NaNs; contiguous or not."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    values = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        values = bytearray(value & 1 for value in values)
    flat = torch.frombuffer(values, dtype=torch.uint8).clone() if values else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(dtype).reshape(shape)
    return tensor.t() if len(shape) == 2 and draw(st.booleans()) else tensor


@given(st.dictionaries(st.text("abc.é0'[]", min_size=1, max_size=8), tensors(), max_size=4))
def test_what_is_written_is_read_bit_for_bit(tmp_path_factory, named):
    path = tmp_path_factory.mktemp("tensors") / "t.safetensors"
    written = write_tensors(path, named)
    read = read_tensors(path)
    assert list(read.tensors) == list(named)
    assert all(same(read.tensors[name], tensor) for name, tensor in named.items())
    data = path.read_bytes()
    assert len(data) == written.size == read.size == size_on_disk(named)
    assert written.sha256 == read.sha256 == hashlib.sha256(data).hexdigest()


def test_a_file_made_by_hand_after_the_specification_is_read(tmp_path):
    header = {
        "__metadata__": {"made": "by hand"},
        "later": entry("BF16", (2,), 8, 12),
        "first": entry("F32", (1, 2), 0, 8),
        "number": entry("I16", (), 12, 14),
        "none": entry("F64", (0, 5), 14, 14),
    }
    data = struct.pack("<2f", 1.5, -2.0) + bytes.fromhex("803f80ff") + struct.pack("<h", -3)
    path = tmp_path / "t"
    path.write_bytes(file_of(json.dumps(header).encode() + b"   ", data))
    found = read_tensors(path).tensors
    assert torch.equal(found["first"], torch.tensor([[1.5, -2.0]]))
    assert torch.equal(found["later"], torch.tensor([1.0, -math.inf], dtype=torch.bfloat16))
    assert same(found["number"], torch.tensor(-3, dtype=torch.int16))
    assert found["none"].shape == (0, 5)


def test_the_bytes_are_those_of_the_specification(tmp_path):
    write_tensors(tmp_path / "t", {"a": torch.tensor([1, 258], dtype=torch.int16), "b": torch.tensor(True)})
    data = (tmp_path / "t").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    assert json.loads(data[8 : 8 + length]) == {"a": entry("I16", (2,), 0, 4), "b": entry("BOOL", (), 4, 5)}
    assert data[8 + length :] == b"\x01\x00\x02\x01\x01"


def test_the_safetensors_package_reads_ours_and_we_read_its(tmp_path):
    package = pytest.importorskip("safetensors.torch")
    theirs = set(package._TYPES.values())
    named = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES.values() if dtype in theirs}
    assert len(named) > 12
    write_tensors(tmp_path / "ours", named)
    package.save_file(named, tmp_path / "theirs", metadata={"made": "by them"})
    for read in (package.load_file(tmp_path / "ours"), read_tensors(tmp_path / "theirs").tensors):
        assert read.keys() == named.keys()
        assert all(same(read[name], tensor) for name, tensor in named.items())


def test_views_of_conjugates_and_subclasses_are_written_by_value(tmp_path):
    class Own(torch.Tensor):
        pass

    values = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    named = {"conj": values.conj(), "neg": values.conj().imag, "own": torch.ones(2).as_subclass(Own)}
    write_tensors(tmp_path / "t", named)
    found = read_tensors(tmp_path / "t").tensors
    assert torch.equal(found["conj"], values.conj().resolve_conj())
    assert found["neg"].tolist() == [-2.0, 1.0]
    assert type(found["own"]) is torch.Tensor


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.eye(2).to_sparse(), "'x' is not dense"),
        (torch.empty(2, device="meta"), "'x' is on the meta device"),
        (
            torch.zeros(2, dtype=torch.complex128),
            "'x' is torch.complex128, which the safetensors format does not support",
        ),
    ],
)
def test_unsupported_tensors_are_refused_and_leave_no_file(tmp_path, tensor, said):
    with pytest.raises(UnsupportedTensor, match=said):
        write_tensors(tmp_path / "t", {"x": tensor})
    assert not list(tmp_path.iterdir())


GOOD = bytes(8)
DAMAGED = {
    "nothing": (b"", "t is not a file of tensors: it has only 0 bytes"),
    "a few bytes": (b"abc", "it has only 3 bytes"),
    "a header longer than the file": (file_of({}, length=1000), "its header should have 1,000 bytes"),
    "a header of exabytes": (file_of({}, length=2**63), "its header should have"),
    "no JSON": (file_of(b"{nonsense"), "its header is invalid"),
    "no text": (file_of(b"\xff\xfe{}"), "its header is invalid"),
    "nested without end": (file_of(b'{"a":' + b"[" * 200_000), "its header is invalid"),
    "no object": (file_of(b"[1]"), "its header is not a JSON object"),
    "a name twice": (
        file_of(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), GOOD),
        "duplicate name 'a'",
    ),
    "a name that moves the cursor": (file_of({"\x1b[2J": entry()}, GOOD), r"'\\x1b\[2J' is not a valid tensor name"),
    "no name": (file_of({"": entry()}, GOOD), "'' is not a valid tensor name"),
    "an unknown part": (file_of({"a": {**entry(), "code": "x"}}, GOOD), "must have exactly"),
    "no shape": (file_of({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, GOOD), "must have exactly dtype, shape"),
    "a negative shape": (file_of({"a": entry(shape=(-2,))}, GOOD), "an invalid shape"),
    "true as a size": (file_of({"a": entry(shape=(True, 2))}, GOOD), "an invalid shape"),
    "too many dimensions": (file_of({"a": entry(shape=[1] * 65 + [2])}, GOOD), "an invalid shape"),
    "three offsets": (file_of({"a": {**entry(), "data_offsets": [0, 4, 8]}}, GOOD), "invalid data_offsets"),
    "an unknown dtype": (file_of({"a": entry("PICKLE")}, GOOD), "'a' has dtype 'PICKLE'; this torch supports BOOL, "),
    "a dtype that is a list": (file_of({"a": {**entry(), "dtype": ["F32"]}}, GOOD), "this torch supports"),
    "offsets that do not fit the shape": (file_of({"a": entry(shape=(3,))}, GOOD), r"does not fit F32 of shape \[3\]"),
    "offsets backwards": (file_of({"a": entry("U8", (0,), 8, 0)}, GOOD), "does not fit"),
    "a tensor of exabytes": (
        file_of({"a": entry("U8", (2**50,), 0, 2**50)}, GOOD),
        "lists 1,125,899,906,842,624",
    ),
    "a shape beyond any memory": (file_of({"a": entry("U8", (0, 2**62, 8), 0, 0)}), "an invalid shape"),
    "an overlap": (file_of({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12)), "'b' begins at 4, expected 8"),
    "a gap": (file_of({"a": entry(), "b": entry(begin=12, end=20)}, bytes(20)), "'b' begins at 12, expected 8"),
    "bytes at the end": (file_of({"a": entry()}, bytes(9)), "lists 8 bytes of tensors, but the file has 9"),
    "bytes missing": (file_of({"a": entry()}, bytes(7)), "lists 8 bytes of tensors, but the file has 7"),
    "a truth value of 2": (file_of({"a": entry("BOOL", (1,), 0, 1)}, b"\x02"), "neither 0 nor 1"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_in_a_line(tmp_path, case):
    data, said = DAMAGED[case]
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(BadInput, match=said) as caught:
        read_tensors(tmp_path / "t")
    assert "\n" not in str(caught.value)


def test_more_than_is_wanted_is_refused(tmp_path):
    write_tensors(tmp_path / "t", {"a": torch.zeros(3)})
    assert read_tensors(tmp_path / "t", largest=12).tensors["a"].tolist() == [0, 0, 0]
    with pytest.raises(BadInput, match="t has 12 bytes of tensors; the limit is 11"):
        read_tensors(tmp_path / "t", largest=11)


def test_a_header_that_nobody_writes_is_not_read(tmp_path):
    with (tmp_path / "t").open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(8 + 100_000_001)  # it is there, and still too long
    with pytest.raises(BadInput, match="its header should have 100,000,001 bytes"):
        read_tensors(tmp_path / "t")


def test_a_file_that_is_mostly_a_hole_takes_no_memory(tmp_path):
    size = 2**42
    with (tmp_path / "t").open("wb") as file:
        file.write(file_of({"a": entry("U8", (size,), 0, size)}))
        try:
            file.truncate(file.tell() + size)
        except OSError:
            pytest.skip("this file system has no files as long")
    with pytest.raises(BadInput, match="has 4,398,046,511,104 bytes of tensors; the limit is"):
        read_tensors(tmp_path / "t")


def test_links_and_pipes_are_not_followed(tmp_path):
    write_tensors(tmp_path / "real", {"a": torch.zeros(1)})
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="link cannot be read: link is a link"):
        read_tensors(tmp_path / "link")
    with pytest.raises(BadInput, match="pipe cannot be read: pipe is not a regular file"):
        read_tensors(tmp_path / "pipe")
    with pytest.raises(BadInput, match="gone cannot be read: No such file"):
        read_tensors(tmp_path / "gone")
