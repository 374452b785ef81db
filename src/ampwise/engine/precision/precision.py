"""The precisions to train in, and which of them a device gets.

What a device can do is read once (``facts_of``); ``decide`` is the choice, from those facts alone. A new
precision is one more entry of ``PRECISIONS``, or of ``BEYOND`` where autocast alone does not make it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ampwise.emulation.recipe import Recipe, recipe_from
from ampwise.errors import AmpwiseError, BadInput, PrecisionUnavailable, UnknownName, nearest
from ampwise.float8.recipe import MEASURED, RECIPES
from ampwise.hardware.cpu import BF16_FEATURES, FEATURES, Cpu, describe_cpu
from ampwise.hardware.device import Device
from ampwise.hardware.torch_facts import read_device
from ampwise.low_bit.pure import PURE, Pure, pure_from

__all__ = [
    "AUTO",
    "BEYOND",
    "EMULATE",
    "PRECISIONS",
    "WITH_OPTIONS",
    "Chosen",
    "Facts",
    "Precision",
    "choose",
    "cpu_facts",
    "decide",
    "facts_of",
    "gpu_facts",
    "other_facts",
    "precision_named",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How a training step computes."""

    name: str
    dtype: torch.dtype | None  # what autocast casts to; None: no autocast
    scaled: bool  # whether the loss needs a scale
    tf32: bool | None  # whether FP32 products may run in TF32; None: as the user has set it
    # The format of the matrix units without which a GPU is refused: torch would emulate it, or ignore the wish.
    units: str | None = None
    recipe: Recipe | None = None  # of products that are emulated
    pure: Pure | None = None  # weights in BF16, and how


# What torch does by itself: autocast, and switches.
PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision(name="fp32", dtype=None, scaled=False, tf32=False),
        Precision(name="tf32", dtype=None, scaled=False, tf32=True, units="tf32"),
        Precision(name="fp16", dtype=torch.float16, scaled=True, tf32=None),
        Precision(name="bf16", dtype=torch.bfloat16, scaled=False, tf32=None, units="bf16"),
    )
}
# What takes more: layers of their own, or weights.
BEYOND: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision(name="fp8", dtype=torch.bfloat16, scaled=False, tf32=None, units="fp8"),
        Precision(name=PURE, dtype=torch.bfloat16, scaled=False, tf32=None, units="bf16", pure=Pure()),
    )
}
ALL = {**PRECISIONS, **BEYOND}
AUTO = "auto"
EMULATE = "emulate:"  # and a format: products on values rounded to it, on any device
EXAMPLE = f"{EMULATE}mxfp8"
WITH_OPTIONS = (EMULATE, f"{PURE},")  # what names begin with that are more than a name

# What others call them. Only to say the right name: one name for each thing is enough.
OTHER_NAMES = {
    "fp32": ("float32", "float", "32", "32-true", "no"),
    "fp16": ("float16", "half", "16", "16-mixed"),
    "bf16": ("bfloat16", "bf16-mixed"),
    "fp8": ("float8", "fp8-mixed", "transformer-engine"),
    "bf16-pure": ("bf16-true", "pure-bf16"),
}
RIGHT_NAMES = {other: name for name, others in OTHER_NAMES.items() for other in others}
BETWEEN = " ,:;/_-"  # "fp8" and a recipe, where others write them as one name

NO_SCALE = "and BF16's range needs no loss scale"


class Chosen(NamedTuple):
    """A precision, and why this one, in a line."""

    precision: Precision
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a device can run, what it lacks for the other precisions, and what "auto" means on it."""

    runs: tuple[str, ...]
    lacks: Mapping[str, str]  # by precision, a sentence
    best: str
    why: str


def choose(asked: Any, device: torch.device) -> Chosen:
    """The precision asked for, or with "auto" the best for the device; an error where it cannot be had.

    >>> choose("bf16", torch.device("cpu")).precision.dtype
    torch.bfloat16
    """
    checked = _checked(asked)  # before the device is asked: a typo needs no GPU to be found
    return decide(checked, facts_of(device))


def decide(asked: str, facts: Facts) -> Chosen:
    """The same, from facts alone. ``asked`` is "auto" or a precision by its name."""
    if asked == AUTO:
        return Chosen(PRECISIONS[facts.best], facts.why)
    plain = asked.partition(",")[0]
    if plain in facts.lacks:
        emulated = f"What it lacks can be emulated: precision='{EMULATE}e4m3'. " if asked == "fp8" else ""
        raise PrecisionUnavailable(
            f"Engine(precision={asked!r}): {facts.lacks[plain]} It runs {', '.join(facts.runs)}. "
            f"{emulated}Use precision='auto' to let ampwise choose."
        )
    return Chosen(precision_named(asked), "asked for")


def precision_named(name: str) -> Precision:
    """Any precision, wherever it can be had; an error where there is none of that name.

    >>> precision_named("emulate:mxfp8").recipe.forward.name
    'mxfp8_e4m3'
    """
    if not name.startswith(WITH_OPTIONS):
        return ALL[_checked(name)]
    if name.startswith(PURE):
        pure = pure_from(name)
        return replace(BEYOND[PURE], name=pure.text, pure=pure)
    recipe = recipe_from(name.removeprefix(EMULATE))
    return Precision(
        name=f"{EMULATE}{recipe.text}", dtype=None, scaled=recipe.needs_loss_scale, tf32=False, recipe=recipe
    )


def facts_of(device: torch.device) -> Facts:
    """What is known about a device of this machine; starts CUDA if it is a CUDA device."""
    if device.type == "cpu":
        return cpu_facts(describe_cpu())
    if device.type != "cuda":
        return other_facts(device.type, _autocast_dtypes(device.type))
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= seen:
        raise BadInput(f"device {str(device)!r}: torch sees {seen or 'no'} CUDA devices here. Try: ampwise gpu")
    return gpu_facts(read_device(torch, torch.cuda.current_device() if device.index is None else device.index))


def gpu_facts(device: Device) -> Facts:
    """Of a CUDA or ROCm device: what it has matrix units for."""
    lacks = {name: missing for name, precision in ALL.items() if (missing := _missing(precision, device))}
    best, why = _best_on_gpu(device)
    return _facts(lacks, best, f"{best} on {device.name}: {why}")


def cpu_facts(cpu: Cpu) -> Facts:
    """Of a CPU, which runs every format, and fast those it has instructions for."""
    name = cpu.model or "this CPU"
    best, why = _best_on_cpu(cpu)
    return _facts(_unlike_a_gpu(name, (torch.float16, torch.bfloat16)), best, f"{best} on {name}: {why}")


def other_facts(kind: str, dtypes: tuple[torch.dtype, ...]) -> Facts:
    """Of a device of another type, such as "mps", given what torch's autocast takes there."""
    why = f"fp32 on {kind}: nothing is known here about what is fast on {kind}"
    return _facts(_unlike_a_gpu(kind, dtypes), "fp32", why)


def _facts(lacks: Mapping[str, str], best: str, why: str) -> Facts:
    return Facts(runs=tuple(name for name in PRECISIONS if name not in lacks), lacks=lacks, best=best, why=why)


def _missing(precision: Precision, device: Device) -> str | None:
    if precision.units is None:
        return None
    has = device.has_matrix_units(precision.units)
    if has or (has is None and precision.units == "bf16" and device.bf16_native):
        return None
    capability = f"compute capability {device.capability}" if device.compute_capability else device.capability
    verb = "is not known to have" if has is None else "has no"
    return f"{device.name} ({capability}) {verb} {precision.units.upper()} matrix units."


def _unlike_a_gpu(name: str, dtypes: tuple[torch.dtype, ...]) -> dict[str, str]:
    """What devices lack that are described by what autocast takes there."""
    lacks = {}
    for precision in ALL.values():
        if precision.units == "fp8":
            lacks[precision.name] = f"{name} has no FP8 matrix units."
        elif precision.tf32:
            lacks[precision.name] = f"{name} has no TF32, which is a format of NVIDIA's matrix units."
        elif precision.dtype is not None and precision.dtype not in dtypes:
            lacks[precision.name] = f"torch's autocast does not take {precision.dtype} on {name}."
    return lacks


def _best_on_gpu(device: Device) -> tuple[str, str]:
    if device.has_matrix_units("bf16"):
        return "bf16", f"it has BF16 matrix units, {NO_SCALE}"
    fp16 = device.has_matrix_units("fp16")
    if fp16:
        return "fp16", "it has FP16 matrix units, and none for BF16"
    if fp16 is None:
        return "fp32", "it is not known whether it has matrix units for 16 bits"
    return "fp32", "it has no matrix units, without which 16 bits gain little"


def _best_on_cpu(cpu: Cpu) -> tuple[str, str]:
    if cpu.features is None:
        return "fp32", "it is not known which instructions it has"
    feature = next((feature for feature in BF16_FEATURES if feature in cpu.features), None)
    if feature is None:
        return "fp32", "it has no BF16 instructions: 16 bits would be slower"
    return "bf16", f"it has {FEATURES[feature]} ({feature}), {NO_SCALE}"


def _autocast_dtypes(kind: str) -> tuple[torch.dtype, ...]:
    if not torch.amp.is_autocast_available(kind):
        return ()
    wanted = (precision.dtype for precision in PRECISIONS.values())
    return tuple(dtype for dtype in wanted if dtype is not None and _autocasts(kind, dtype))


def _autocasts(kind: str, dtype: torch.dtype) -> bool:
    """Torch answers this in one way only: autocast that cannot do a dtype warns, and is then off."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            torch.autocast(kind, dtype=dtype)
        except (RuntimeError, AssertionError):  # the latter from a backend outside torch that is not loaded
            return False
    return not any(issubclass(warning.category, UserWarning) for warning in heard)


def _checked(asked: Any) -> str:
    if isinstance(asked, str) and (asked == AUTO or asked in ALL):
        return asked
    if isinstance(asked, str) and asked.startswith(WITH_OPTIONS):
        return precision_named(asked).name
    hint = _meant(str(asked).lower().removeprefix("torch."))
    listing = f"{hint}The precisions are {', '.join((AUTO, *ALL, EXAMPLE))}."
    if not isinstance(asked, str):
        raise BadInput(f"Engine(precision={asked!r}): a name is expected. {listing}")
    # "float16" looks as much like bf16 as like fp16: where the right name is known, there is no guess.
    raise UnknownName("precision", asked, () if hint else (AUTO, *ALL), listing=listing)


def _meant(text: str) -> str:
    """What to write instead of what is no precision, as a sentence; nothing where it is not known."""
    if text in RIGHT_NAMES:
        return f"Here that is called {RIGHT_NAMES[text]!r}. "
    if _is_narrow_format(text):
        return f"That is a format: precision='{EMULATE}{text}' computes on values rounded to it, on any device. "
    recipe = _fp8_recipe(text)
    if recipe is not None:
        return f"How FP8 layers are scaled is said apart: precision='fp8', fp8={recipe!r}. "
    return ""


def _is_narrow_format(text: str) -> bool:
    """Whether it is what may stand after "emulate:"; of 16 bits and more, and of "FP8", there are precisions."""
    try:
        return text.strip() not in ALL and recipe_from(text).scaled
    except AmpwiseError:
        return False


def _fp8_recipe(text: str) -> str | None:
    """The recipe in "fp8,delayed", or by itself; after "fp8" also the one that is most like it."""
    known = (*RECIPES, MEASURED)
    rest = text.removeprefix("fp8")
    recipe = rest.lstrip(BETWEEN)
    if recipe in known:
        return recipe
    is_after_fp8 = text != rest != recipe
    return next(iter(nearest(recipe, known)), None) if is_after_fp8 else None
