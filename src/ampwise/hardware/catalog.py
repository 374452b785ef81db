"""Catalog of devices: published figures of each, and which of them are only approximate.

The numbers are in ``gpus.toml``. A number that no source states exactly is stored separately, in ``Gpu.approximate``:
code that reads ``peak_flops`` or ``memory_bytes`` gets only known numbers, and ``None`` otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ampwise.errors import UnknownName

# The formats for training; ``tensor_cores`` reports on each of them for every device.
COMMON_FORMATS = ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "mxfp4", "nvfp4")

# Brand words, ignored in device names: drivers add and drop them ("Tesla T4", "NVIDIA A10").
BRANDS = frozenset({"nvidia", "tesla", "geforce", "amd", "instinct", "intel", "habana", "google"})

LISTING = (
    "`ampwise gpu --list` shows them all; `ampwise advise --gpu` also takes a compute capability, such as 8.9 or sm_89."
)
GIB = 2**30  # what vendors call a GB of device memory: torch reports 139.8 GiB for a "141 GB" H200
GB_PER_S = 1e9
TFLOPS = 1e12

# Keys of gpus.toml, with their field of Gpu and unit; every other key of a number is a format.
UNITS = {"memory_gb": ("memory_bytes", GIB), "bandwidth_gbs": ("memory_bytes_per_s", GB_PER_S)}


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, and whether it is approximate; printed with ``~`` if so."""

    value: float
    approximate: bool

    def show(self, unit: float = 1.0, digits: int = 1) -> str:
        """Return the number in a unit, as text.

        >>> Figure(70e12, approximate=True).show(1e12)
        '~70.0'
        """
        return f"{'~' if self.approximate else ''}{self.value / unit:.{digits}f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A device of the catalog.

    ``approximate`` holds, by field or format name, numbers that are shown with a ``~`` and never used in rules.
    ``tensor_core_formats`` is None if it is not known which formats the tensor cores take.

    >>> h200 = gpu_named("h200")
    >>> h200.has_tensor_cores("fp8"), h200.has_tensor_cores("nvfp4")
    (True, False)
    >>> round(h200.ridge("bf16"))
    206
    """

    id: str
    name: str
    vendor: str
    arch: str
    capability: str  # as the vendor writes it: "9.0", "gfx942"; "mps", "xla" and "hpu" name the backend
    torch_names: tuple[str, ...]
    memory_bytes: int | None
    memory_bytes_per_s: float | None
    tensor_core_formats: tuple[str, ...] | None
    # Dicts, so that a Gpu can be pickled and copied; the other fields are enough to hash.
    peak_flops: Mapping[str, float] = field(hash=False)
    approximate: Mapping[str, float] = field(hash=False)
    note: str
    sources: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<Gpu {self.id}: {self.name}, {self.arch}, {self.capability}>"

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """NVIDIA's compute capability as two numbers that compare; None for other vendors."""
        return compute_capability(self.capability)

    def figure(self, name: str) -> Figure | None:
        """Return the peak of a format, or "memory_bytes" or "memory_bytes_per_s", marked if approximate.

        >>> gpu_named("a10g").figure("bf16").show(1e12)
        '~70.0'
        """
        if name in self.approximate:
            return Figure(self.approximate[name], approximate=True)
        known = getattr(self, name) if name.startswith("memory_") else self.peak_flops.get(name)
        return None if known is None else Figure(known, approximate=False)

    def has_tensor_cores(self, fmt: str) -> bool | None:
        """Return whether matmuls in this format run on tensor cores; None if that is not known."""
        return None if self.tensor_core_formats is None else fmt in self.tensor_core_formats

    def ridge_figure(self, fmt: str) -> Figure | None:
        """Return the ridge point, FLOP per byte below which memory is the limit; approximate if an input is."""
        peak, bandwidth = self.figure(fmt), self.figure("memory_bytes_per_s")
        if peak is None or bandwidth is None:
            return None
        return Figure(peak.value / bandwidth.value, peak.approximate or bandwidth.approximate)

    def ridge(self, fmt: str) -> float | None:
        """Return the ridge point in FLOP/byte; None unless peak and bandwidth are both known."""
        figure = self.ridge_figure(fmt)
        return None if figure is None or figure.approximate else figure.value

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "id": self.id,
            "name": self.name,
            "vendor": self.vendor,
            "arch": self.arch,
            "capability": self.capability,
            "memory_bytes": self.memory_bytes,
            "memory_bytes_per_s": self.memory_bytes_per_s,
            "tensor_core_formats": None if self.tensor_core_formats is None else list(self.tensor_core_formats),
            "peak_flops": dict(self.peak_flops),
            "ridge_flop_per_byte": {fmt: ridge for fmt in self.peak_flops if (ridge := self.ridge(fmt)) is not None},
            "approximate": dict(self.approximate),
            "note": self.note,
            "sources": list(self.sources),
        }


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return every device of the catalog, in the catalog's order."""
    document = _document()
    return tuple(_read_device(table, document["sources"]) for table in document["device"])


def find_gpu(device_name: str) -> Gpu | None:
    """Return the device that torch calls by this name; None for any other name, however similar.

    The whole name has to match, ignoring case, punctuation and brand words.

    Args:
        device_name: the name, as ``torch.cuda.get_device_name()`` returns it.

    Returns:
        the device of the catalog, or None.

    >>> find_gpu("NVIDIA GeForce RTX 4090").id
    'rtx4090'
    >>> find_gpu("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    True
    """
    return _by_torch_name().get(_words(device_name))


def gpu_named(name: str) -> Gpu:
    """Return the device with this id, name, torch name or short name; raise UnknownName, with similar ids, if none has.

    Of a family, such as "a100", it is the most common variant; ``other_variants`` returns the others.

    >>> gpu_named("NVIDIA A100-SXM4-80GB").id, gpu_named("a100").id, gpu_named("4090").id
    ('a100-sxm-80', 'a100-sxm-80', 'rtx4090')
    """
    words = _words(name)
    for gpu in gpus():
        if words in (_words(gpu.id), _words(gpu.name)):
            return gpu
    found = find_gpu(name) or _by_short_name().get("".join(words))
    if found is None:
        # Suggest ids that share a word: by letters alone, "v100" is as near to "a10".
        sharing = [gpu.id for gpu in gpus() if set(words) & {*_words(gpu.id), *_words(gpu.name)}]
        raise UnknownName("device", name, sharing or [gpu.id for gpu in gpus()], listing=LISTING)
    return found


def other_variants(name: str) -> list[str]:
    """Return the ids that a family's name could also mean; empty if the name is that of one device.

    >>> other_variants("a100"), other_variants("h200")
    (['a100-40', 'a100-pcie-80'], [])
    """
    words, gpu = _words(name), gpu_named(name)
    model = next((word for word in words if any(map(str.isdigit, word))), None)  # "rtx", "apple": a series, no model
    family = [other.id for other in gpus() if model in _words(other.id)]
    if gpu.id not in family or words in map(_words, (gpu.id, gpu.name, *gpu.torch_names)):
        return []
    return [other for other in family if other != gpu.id]


def compute_capability(text: str) -> tuple[int, int] | None:
    """Parse NVIDIA's compute capability into two numbers; None for anything else.

    >>> compute_capability("10.0"), compute_capability("gfx942")
    ((10, 0), None)
    """
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def nvidia_tensor_cores(fmt: str, capability: tuple[int, int]) -> bool | None:
    """Return whether this compute capability has tensor cores for a format; None if the capability alone does not tell.

    >>> nvidia_tensor_cores("bf16", (7, 0)), nvidia_tensor_cores("bf16", (8, 6))
    (False, True)
    >>> nvidia_tensor_cores("fp16", (7, 5)) is None  # RTX 20 has them, GTX 16 does not
    True
    """
    limits = _document()["nvidia_tensor_cores"].get(fmt, {})
    absent_below = compute_capability(limits.get("absent_below", ""))
    present_from = compute_capability(limits.get("present_from", ""))
    if absent_below is not None and capability < absent_below:
        return False
    return True if present_from is not None and capability >= present_from else None


@cache
def _document() -> dict[str, Any]:
    import tomllib
    from importlib.resources import files

    return tomllib.loads(files("ampwise.hardware").joinpath("gpus.toml").read_text(encoding="utf-8"))


@cache
def _by_torch_name() -> dict[tuple[str, ...], Gpu]:
    return {_words(name): gpu for gpu in gpus() for name in gpu.torch_names}


@cache
def _by_short_name() -> dict[str, Gpu]:
    """Names without spaces and punctuation: "rtx 4090" is "rtx4090"."""
    tables = zip(gpus(), _document()["device"], strict=True)
    named = {"".join(_words(name)): gpu for gpu, table in tables for name in table.get("also_called", ())}
    return named | {"".join(_words(name)): gpu for gpu in gpus() for name in (gpu.id, gpu.name)}


def _words(name: str) -> tuple[str, ...]:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return tuple(word for word in words if word not in BRANDS)


def _read_device(table: Mapping[str, Any], urls: Mapping[str, str]) -> Gpu:
    known = _in_base_units(
        {key: table[key] for key in UNITS if key in table} | table.get("tflops", {})  # the exact numbers
    )
    memory = known.pop("memory_bytes", None)
    formats = table.get("tensor_core_formats")
    return Gpu(
        id=table["id"],
        name=table["name"],
        vendor=table["vendor"],
        arch=table["arch"],
        capability=table["capability"],
        torch_names=tuple(table["torch_names"]),
        memory_bytes=None if memory is None else int(memory),
        memory_bytes_per_s=known.pop("memory_bytes_per_s", None),
        tensor_core_formats=None if formats is None else tuple(formats),
        peak_flops=known,
        approximate=_in_base_units(table.get("approximate", {})),
        note=table.get("note", ""),
        sources=tuple(urls[key] for key in table["sources"]),
    )


def _in_base_units(numbers: Mapping[str, float]) -> dict[str, float]:
    units = ((*UNITS.get(key, (key, TFLOPS)), value) for key, value in numbers.items())
    return {name: float(round(value * unit)) for name, unit, value in units}  # 66.9 * 1e12 has a stray 0.01
