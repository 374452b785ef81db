"""A side of a difference: the precision, device and kernels of a step.

As text: ``PRECISION[@DEVICE][,OPTION…]``, such as "bf16", "fp32@cuda", "fp16,scale=1024", "bf16,attention=math",
"bf16,batch=1", "fp32,compiled", "tf32,emulated".
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ampwise.errors import AmpwiseError, BadInput, PrecisionUnavailable, UnknownName
from ampwise.numbers.emulation.recipe import UP, EmulationRecipe, recipe_for_format, recipe_with_scales_rounded_up
from ampwise.numbers.formats import BlockFormat, Format, all_names, find_format, find_scalar_format
from ampwise.numbers.number_text import scale_text
from ampwise.train.precision.names import RIGHT_NAMES
from ampwise.train.precision.policy import Policy
from ampwise.train.precision.precision import AUTO, PRECISIONS, TrainPrecision, precisions_of

SIDE_SYNTAX = "PRECISION[@DEVICE][,OPTION…], such as bf16, fp32@cuda or 'bf16,attention=math'"
WIDEST = "fp64"
ARITHMETICS = {**PRECISIONS, WIDEST: TrainPrecision(name=WIDEST, dtype=None, scaled=False, tf32=False)}
ATTENTION = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
SPREAD = 16  # ratio of a tensor's typical magnitude to the smallest that still matters
OPTIONS = (
    "compiled",
    "compiled=BACKEND",
    "emulated",
    UP,
    f"attention={'|'.join(ATTENTION)}",
    "batch=ROWS",
    "scale=NUMBER",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How a step is computed."""

    precision: str  # a key of ARITHMETICS, or an emulated format
    policy: Policy | None = None
    recipe: EmulationRecipe | None = None  # for emulated matmuls
    device: torch.device | None = None  # None: that of the model
    compiled: str = ""  # torch.compile's backend
    attention: str = ""
    batch: int | None = None  # rows that are computed at a time; None: the whole batch
    scale: float | None = None  # of the loss; None: chosen as the precision needs

    @property
    def label(self) -> str:
        """The text that selects this side."""
        name = self.precision if self.policy is None else repr(self.policy)
        options = [
            "emulated" if self.recipe is not None and self.precision in ARITHMETICS else "",
            UP if self.recipe is not None and self.recipe.scales_up else "",
            "" if not self.compiled else "compiled" if self.compiled == "inductor" else f"compiled={self.compiled}",
            f"attention={self.attention}" if self.attention else "",
            "" if self.batch is None else f"batch={self.batch}",
            "" if self.scale is None else f"scale={scale_text(self.scale)}",
        ]
        target = "" if self.device is None else f"@{self.device}"
        return ",".join([name + target, *filter(None, options)])

    @property
    def arithmetic(self) -> TrainPrecision:
        """The precision torch computes in; FP32 for an emulated format."""
        return ARITHMETICS["fp32" if self.recipe is not None else self.precision]

    @property
    def is_wider(self) -> bool:
        """Whether weights and batch are converted to FP64."""
        return self.recipe is None and self.precision == WIDEST

    @property
    def is_scaled(self) -> bool:
        """Whether the loss needs a scale."""
        if self.recipe is not None:
            return self.recipe.needs_loss_scale
        return self.arithmetic.scaled

    @property
    def roundoffs(self) -> tuple[float, float]:
        """The unit roundoff of values and weights, and of gradients."""
        if self.recipe is not None:
            return roundoff(self.recipe.forward), roundoff(self.recipe.backward)
        own = roundoff(find_format(self.precision))
        return own, own

    @property
    def flushed_below(self) -> float:
        """Typical magnitude below which a tensor has values below the format's range; 0 if each tensor has a scale."""
        if self.recipe is not None and self.recipe.scaled:
            return 0.0
        return find_scalar_format(self.precision).smallest_normal * SPREAD

    def on(self, device: torch.device) -> Side:
        """Resolve the side for a model on a device; raise PrecisionUnavailable if it cannot run there."""
        target = self.device or device
        precision = precisions_of(target).best if self.precision == AUTO else self.precision
        placed = replace(self, precision=precision, device=self.device if target != device else None)
        lacks = precisions_of(target).lacks.get(precision) if self.recipe is None else None
        if lacks is not None:
            raise PrecisionUnavailable(
                f"diff: {self.label}: {lacks} It runs "
                f"{', '.join((*precisions_of(target).runs, WIDEST))}. To emulate it: "
                f"'{self.label},emulated'."
            )
        return placed


def roundoff(fmt: Format | BlockFormat) -> float:
    """Return the largest relative error of rounding a value to a format, within its range.

    >>> roundoff(find_format("bf16")) == 2**-8
    True
    """
    return (fmt.element if isinstance(fmt, BlockFormat) else fmt).epsilon / 2


def parse_side(asked: Any) -> Side:
    """Parse a side from its text, or make one from a policy.

    >>> side = parse_side("bf16,attention=math")
    >>> side.precision, side.attention, side.roundoffs[0]
    ('bf16', 'math', 0.00390625)
    """
    if isinstance(asked, Side):
        return asked
    if isinstance(asked, Policy):
        return Side(precision=asked.base, policy=asked)
    if not isinstance(asked, str):
        raise BadInput(f"diff: expected {SIDE_SYNTAX}, or a Policy; got {asked!r}.")
    first, *words = [word.strip() for word in re.split("[,+]", asked)]
    name, _, device = first.partition("@")
    side = _named(name, asked, emulated="emulated" in words)
    if device:
        side = replace(side, device=_device(device, asked))
    for word in words:
        if word != "emulated":
            side = _with_option(side, word, asked)
    return side


def _with_option(side: Side, word: str, asked: str) -> Side:
    name, _, value = word.partition("=")
    if word == UP and side.recipe is not None:
        return replace(side, recipe=recipe_with_scales_rounded_up(side.recipe, f"diff: {asked!r}"))
    if name == "compiled":
        return replace(side, compiled=value or "inductor")
    if name == "attention":
        if value not in ATTENTION:
            listing = f"The kernels are {', '.join(ATTENTION)}."
            raise UnknownName("attention kernel", value, ATTENTION, listing=listing)
        return replace(side, attention=value)
    if name == "batch":
        if not value.isdecimal() or int(value) < 1:
            raise BadInput(f"diff: {asked!r}: expected rows to compute at a time, such as batch=1; got batch={value}.")
        return replace(side, batch=int(value))
    if name == "scale":
        try:
            scale = float(value)
        except ValueError:
            scale = math.nan
        if not (math.isfinite(scale) and scale > 0):
            raise BadInput(f"diff: {asked!r}: expected a positive loss scale, such as 65536; got scale={value}.")
        return replace(side, scale=scale)
    raise BadInput(f"diff: {asked!r}: unknown option {word!r}; expected {SIDE_SYNTAX}, with {', '.join(OPTIONS)}.")


def _named(name: str, asked: str, *, emulated: bool) -> Side:
    if name.endswith(".json"):
        policy = _policy(name)
        return Side(precision=policy.base, policy=policy)
    if name in ARITHMETICS and not emulated:
        return Side(precision=name)
    right = RIGHT_NAMES.get(name.lower())
    if right is not None or not name:
        hint = f"Did you mean {right!r}? " if right else ""
        raise BadInput(f"diff: {asked!r}: expected {SIDE_SYNTAX}. {hint}The precisions are {', '.join(ARITHMETICS)}.")
    try:
        recipe = recipe_for_format(name)
    except UnknownName as error:
        listing = f"Precisions are {', '.join(ARITHMETICS)}; any other format of `ampwise formats` is emulated."
        known = list(dict.fromkeys([*ARITHMETICS, *all_names()]))
        raise UnknownName("precision", name, known, listing=listing) from error
    return Side(precision=name if name in ARITHMETICS else recipe.name, recipe=recipe)


def _policy(file: str) -> Policy:
    """Read a policy from a JSON file; the result of a search contains one."""
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
        if isinstance(data, dict) and "policy" in data:
            if data.get("narrow"):
                names = ", ".join(sorted(set(map(str, data["narrow"].values()))))
                raise BadInput(
                    f"diff: {file}: this search result has modules in {names}, which an autocast policy cannot "
                    "express. Compare the format itself, such as --b e4m3, or search with --formats bf16,fp32."
                )
            data = data["policy"]
        return Policy.from_dict(data)
    except OSError as error:
        raise BadInput(f"diff: {file}: cannot read the policy: {error.strerror or error}.") from error
    except (ValueError, AmpwiseError) as error:
        raise BadInput(f"diff: {file}: expected JSON as written from Policy.as_dict(): {error}") from error


def _device(text: str, asked: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise BadInput(f"diff: {asked!r}: expected a device such as cpu or cuda:1, got {text!r}.") from error
    seen = 1
    if device.type != "cpu":
        backend = getattr(torch, device.type, None)
        seen = backend.device_count() if backend is not None and backend.is_available() else 0
    if (device.index or 0) >= seen:
        kinds = "CUDA" if device.type == "cuda" else device.type
        raise BadInput(f"diff: {asked!r}: torch sees {seen or 'no'} {kinds} devices. Run: ampwise gpu")
    return device
