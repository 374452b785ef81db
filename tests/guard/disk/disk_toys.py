"""States to save, and the ways in which a checkpoint can be read again."""

import hashlib
import json
import math

import torch

from ampwise.guard.disk.manifest import MANIFEST, SEAL
from ampwise.guard.disk.reading import CheckpointReader
from ampwise.guard.disk.writing import write_checkpoint
from ampwise.runs.tensor_files import DTYPES

FILE = "tensors-00000.safetensors"
PLAIN = "plain-00000.json"


def save(folder, step=1, tensors=None, plain=None, about=None, **options):
    tensors = {"w": torch.arange(12.0).reshape(3, 4)} if tensors is None else tensors
    options = {"live": tensors, "staged": tensors, "group": None, **options}
    return write_checkpoint(folder, step=step, plain=plain, about=about or {}, **options)


def read_into(checkpoint, tensors, group):
    CheckpointReader(checkpoint).read_into(tensors, group)


def read_plain(checkpoint, rank):
    return CheckpointReader(checkpoint).plain(rank)


def stored_tensors(checkpoint):
    return CheckpointReader(checkpoint).stored()


def read(checkpoint, like, group=None):
    """What a checkpoint holds, into tensors of these shapes that hold something else at first."""
    found = {name: other_than(tensor) for name, tensor in like.items()}
    read_into(checkpoint, found, group)
    return found


def other_than(tensor):
    """A tensor of the same kind, strides included, with no bit as it is there."""
    other = torch.empty_like(tensor)
    numbers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    flipped = tensor.view(numbers) ^ (1 if tensor.dtype == torch.bool else -1 if numbers != torch.uint8 else 255)
    other.view(numbers).copy_(flipped)
    return other


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def tensors_of_all_dtypes():
    generator = torch.Generator().manual_seed(0)
    found = {}
    for code, dtype in DTYPES.items():
        for shape in [(), (0, 3), (5,), (2, 3, 4)]:
            size = math.prod(shape) * dtype.itemsize
            values = torch.randint(
                0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator
            )
            found[f"{code}{list(shape)}"] = values.view(dtype).reshape(shape)
        found[f"{code} turned"] = found[f"{code}[2, 3, 4]"].permute(2, 0, 1)
    return found


def forge(checkpoint, change):
    """Change a manifest and seal it again, as somebody who means harm would."""
    facts = json.loads((checkpoint.path / MANIFEST).read_text())
    text = change(facts)
    data = text if isinstance(text, bytes) else json.dumps(facts).encode()
    (checkpoint.path / MANIFEST).write_bytes(data)
    (checkpoint.path / SEAL).write_text(f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n")


def forge_file(checkpoint, name, data):
    """Change a file and its sum in the manifest."""
    (checkpoint.path / name).write_bytes(data)

    def change(facts):
        facts["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    forge(checkpoint, change)


def read_all(checkpoint):
    """Everything a resume reads."""
    read_plain(checkpoint, 0)
    return read(checkpoint, {"w": torch.zeros(3, 4)})
