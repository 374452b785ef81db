"""Training precisions, and the choice among them for a device.

``precisions_of`` reads what a device can run; ``choose_from`` chooses from that alone. To add a precision, add an entry
to ``PRECISIONS``, or to ``EXTRA_PRECISIONS`` if autocast alone is not enough for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ampwise.errors import AmpwiseError, BadInput, PrecisionUnavailable, UnknownName, nearest
from ampwise.hardware.cpu import BF16_FEATURES, FEATURES, Cpu, describe_cpu
from ampwise.hardware.device import CudaDevice
from ampwise.hardware.torch_info import read_device
from ampwise.numbers.emulation.recipe import EmulationRecipe, parse_recipe
from ampwise.train.float8.recipe import AUTO as FP8_AUTO
from ampwise.train.float8.recipe import MEASURED, RECIPES
from ampwise.train.low_bit.pure_bf16 import PURE, PureBf16, parse_pure_bf16
from ampwise.train.precision.names import AUTO, EMULATE, RIGHT_NAMES

__all__ = [
    "AUTO",
    "EMULATE",
    "EXTRA_PRECISIONS",
    "PRECISIONS",
    "WITH_OPTIONS",
    "ChosenPrecision",
    "DevicePrecisions",
    "TrainPrecision",
    "choose_from",
    "choose_precision",
    "cpu_precisions",
    "gpu_precisions",
    "other_precisions",
    "precision_named",
    "precisions_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPrecision:
    """What a training precision consists of."""

    name: str
    dtype: torch.dtype | None  # what autocast casts to; None: no autocast
    scaled: bool  # whether the loss needs a scale
    tf32: bool | None  # whether FP32 matmuls may run in TF32; None: as the user has set it
    # The format that the GPU's tensor cores must support: else torch would emulate it, or ignore the setting.
    units: str | None = None
    recipe: EmulationRecipe | None = None  # how matmuls are emulated, for "emulate:..."
    pure: PureBf16 | None = None  # how BF16 weights are updated, for "bf16-pure"


# Precisions that torch provides itself, by autocast and TF32 settings.
PRECISIONS: dict[str, TrainPrecision] = {
    precision.name: precision
    for precision in (
        TrainPrecision(name="fp32", dtype=None, scaled=False, tf32=False),
        TrainPrecision(name="tf32", dtype=None, scaled=False, tf32=True, units="tf32"),
        TrainPrecision(name="fp16", dtype=torch.float16, scaled=True, tf32=None),
        TrainPrecision(name="bf16", dtype=torch.bfloat16, scaled=False, tf32=None, units="bf16"),
    )
}
# Precisions that need special layers or weights.
EXTRA_PRECISIONS: dict[str, TrainPrecision] = {
    precision.name: precision
    for precision in (
        TrainPrecision(name="fp8", dtype=torch.bfloat16, scaled=False, tf32=None, units="fp8"),
        TrainPrecision(name=PURE, dtype=torch.bfloat16, scaled=False, tf32=None, units="bf16", pure=PureBf16()),
    )
}
ALL = {**PRECISIONS, **EXTRA_PRECISIONS}
EXAMPLE = f"{EMULATE}mxfp8"
WITH_OPTIONS = (EMULATE, f"{PURE},")  # prefixes of names with options

BETWEEN = " ,:;/_-"  # separators between "fp8" and a recipe, where others write them as one name

FP16_FEATURES = ("amx_fp16", "avx512_fp16")  # FP16 arithmetic of ARM is not used for matmuls by torch

NO_SCALE = "and BF16's range needs no loss scale"


class ChosenPrecision(NamedTuple):
    """A precision, and why it was chosen, in one line; slow: that the device runs it slower than FP32, if it does."""

    precision: TrainPrecision
    why: str
    slow: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrecisions:
    """Precisions that a device can run, what it lacks for the others, and what "auto" chooses."""

    lacks: Mapping[str, str]  # a sentence by precision
    best: str
    why: str
    slow: Mapping[torch.dtype, str] = field(default_factory=dict)  # a sentence by dtype, where FP32 is faster

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(name for name in PRECISIONS if name not in self.lacks)


def choose_precision(asked: Any, device: torch.device) -> ChosenPrecision:
    """Return the requested precision, or with "auto" the best for the device; raise if the device cannot run it.

    >>> choose_precision("bf16", torch.device("cpu")).precision.dtype
    torch.bfloat16
    """
    checked = _checked(asked)  # before the device is queried: a typo should be found without a GPU
    return choose_from(checked, precisions_of(device))


def choose_from(asked: str, facts: DevicePrecisions) -> ChosenPrecision:
    """Choose from what is known about the device. ``asked`` is "auto" or the name of a precision."""
    if asked == AUTO:
        return ChosenPrecision(PRECISIONS[facts.best], facts.why)
    plain = asked.partition(",")[0]
    if plain in facts.lacks:
        emulated = f"FP8 can be emulated: precision='{EMULATE}e4m3'. " if asked == "fp8" else ""
        raise PrecisionUnavailable(
            f"Engine(precision={asked!r}): {facts.lacks[plain]} It runs {', '.join(facts.runs)}. "
            f"{emulated}Use precision='auto' to let ampwise choose."
        )
    precision = precision_named(asked)
    return ChosenPrecision(precision, "requested", facts.slow.get(precision.dtype, "") if precision.dtype else "")


def precision_named(name: str) -> TrainPrecision:
    """Return a precision by its name, whether or not a device here can run it; raise for an unknown name.

    >>> precision_named("emulate:mxfp8").recipe.forward.name
    'mxfp8_e4m3'
    """
    if not name.startswith(WITH_OPTIONS):
        return ALL[_checked(name)]
    if name.startswith(PURE):
        pure = parse_pure_bf16(name)
        return replace(EXTRA_PRECISIONS[PURE], name=pure.text, pure=pure)
    recipe = parse_recipe(name.removeprefix(EMULATE))
    return TrainPrecision(
        name=f"{EMULATE}{recipe.text}", dtype=None, scaled=recipe.needs_loss_scale, tf32=False, recipe=recipe
    )


def precisions_of(device: torch.device) -> DevicePrecisions:
    """Return which precisions a device of this machine can run; initialises CUDA for a CUDA device."""
    if device.type == "cpu":
        return cpu_precisions(describe_cpu())
    if device.type != "cuda":
        return other_precisions(device.type, _autocast_dtypes(device.type))
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= seen:
        raise BadInput(f"device {str(device)!r}: torch sees {seen or 'no'} CUDA devices here. Try: ampwise gpu")
    return gpu_precisions(read_device(torch, torch.cuda.current_device() if device.index is None else device.index))


def gpu_precisions(device: CudaDevice) -> DevicePrecisions:
    """Return which precisions a CUDA or ROCm device can run, by its tensor cores."""
    capability = f"compute capability {device.capability}" if device.compute_capability else device.capability
    lacks = {}
    for name, precision in ALL.items():
        units = precision.units
        has = units is None or device.has_tensor_cores(units)
        if not has and not (has is None and units == "bf16" and device.bf16_native):
            has_text = "is not known to have" if has is None else "has no"
            lacks[name] = f"{device.name} ({capability}) {has_text} {str(units).upper()} tensor cores."
    fp16 = device.has_tensor_cores("fp16")
    if device.has_tensor_cores("bf16"):
        best, why = "bf16", f"it has BF16 tensor cores, {NO_SCALE}"
    elif fp16:
        best, why = "fp16", "it has FP16 tensor cores, and none for BF16"
    elif fp16 is None:
        best, why = "fp32", "it is not known whether it has tensor cores for 16 bits"
    else:
        best, why = "fp32", "it has no tensor cores, without which 16 bits gain little"
    return DevicePrecisions(lacks=lacks, best=best, why=f"{best} on {device.name}: {why}")


def cpu_precisions(cpu: Cpu) -> DevicePrecisions:
    """Return which precisions a CPU can run: all but TF32 and FP8; those with instructions of their own run fast."""
    name = cpu.model or "this CPU"
    feature = next((feature for feature in BF16_FEATURES if feature in (cpu.features or ())), None)
    if cpu.features is None:
        best, why = "fp32", "its instruction set is not known"
    elif feature is None:
        best, why = "fp32", "it has no BF16 instructions: 16 bits would be slower"
    else:
        best, why = "bf16", f"it has {FEATURES[feature]} ({feature}), {NO_SCALE}"
    lacks = _unlike_a_gpu(name, (torch.float16, torch.bfloat16))
    fast = {torch.bfloat16: ("BF16", BF16_FEATURES), torch.float16: ("FP16", FP16_FEATURES)}
    slow = {
        dtype: f"{name} has no {title} matmul instructions: training in {title} may be many times slower than in FP32. "
        "Use precision='auto' or 'fp32'; to try out numerics, a small model."
        for dtype, (title, features) in fast.items()
        if cpu.features is not None and not any(each in cpu.features for each in features)
    }
    return DevicePrecisions(lacks=lacks, best=best, why=f"{best} on {name}: {why}", slow=slow)


def other_precisions(kind: str, dtypes: tuple[torch.dtype, ...]) -> DevicePrecisions:
    """Return which precisions a device of another type, such as "mps", can run, from the dtypes of its autocast."""
    why = f"fp32 on {kind}: it is not known what is fast on {kind}"
    return DevicePrecisions(lacks=_unlike_a_gpu(kind, dtypes), best="fp32", why=why)


def _unlike_a_gpu(name: str, dtypes: tuple[torch.dtype, ...]) -> dict[str, str]:
    """Return what a device without tensor cores lacks, from the dtypes of its autocast."""
    lacks = {}
    for precision in ALL.values():
        if precision.units == "fp8":
            lacks[precision.name] = f"{name} has no FP8 tensor cores."
        elif precision.tf32:
            lacks[precision.name] = f"{name} has no TF32, which is a format of NVIDIA's tensor cores."
        elif precision.dtype is not None and precision.dtype not in dtypes:
            lacks[precision.name] = f"torch's autocast does not support {precision.dtype} on {name}."
    return lacks


def _autocast_dtypes(kind: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes that autocast supports. torch shows it only by a warning, and by turning autocast off."""
    if not torch.amp.is_autocast_available(kind):
        return ()
    found = []
    for dtype in (precision.dtype for precision in PRECISIONS.values() if precision.dtype is not None):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                torch.autocast(kind, dtype=dtype)
            except (RuntimeError, AssertionError):  # the latter from a backend outside torch that is not loaded
                continue
        if not any(issubclass(warning.category, UserWarning) for warning in heard):
            found.append(dtype)
    return tuple(found)


def _checked(asked: Any) -> str:
    if isinstance(asked, str) and (asked == AUTO or asked in ALL):
        return asked
    if isinstance(asked, str) and asked.startswith(WITH_OPTIONS):
        return precision_named(asked).name
    hint = _hint(str(asked).lower().removeprefix("torch."))
    listing = f"{hint}The precisions are {', '.join((AUTO, *ALL, EXAMPLE))}."
    if not isinstance(asked, str):
        raise BadInput(f"Engine(precision={asked!r}): expected a name. {listing}")
    # "float16" resembles bf16 as much as fp16: with a hint, suggest no similar names.
    raise UnknownName("precision", asked, () if hint else (AUTO, *ALL), listing=listing)


def _hint(text: str) -> str:
    """Return a sentence on what to write instead of an unknown name; empty if there is no hint."""
    if text in RIGHT_NAMES:
        return f"ampwise calls it {RIGHT_NAMES[text]!r}. "
    try:  # a format that may follow "emulate:" and is narrower than 16 bits; "fp8" itself is a precision
        is_narrow_format = text.strip() not in ALL and parse_recipe(text).scaled
    except AmpwiseError:
        is_narrow_format = False
    if is_narrow_format:
        return f"That is a format: precision='{EMULATE}{text}' computes on values rounded to it, on any device. "
    # The recipe in "fp8,delayed" or in "delayed"; after "fp8", also the most similar one.
    known, rest = (*RECIPES, MEASURED, FP8_AUTO), text.removeprefix("fp8")
    recipe: str | None = rest.lstrip(BETWEEN)
    if recipe not in known:
        recipe = next(iter(nearest(str(recipe), known)), None) if text != rest != recipe else None
    return f"For an FP8 recipe: precision=ampwise.Fp8({recipe!r}). " if recipe else ""
