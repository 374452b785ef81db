"""A side of a difference: in which precision, on which device, by which kernels a step is computed.

As text it is ``PRECISION[@DEVICE][,OPTION…]``: "bf16", "fp32@cuda", "fp16,scale=1024", "bf16,attention=math",
"fp32,compiled", "tf32,emulated".
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

from ampwise.emulation.recipe import UP, Recipe, recipe_named, with_scales_up
from ampwise.engine.precision.policy import Policy
from ampwise.engine.precision.precision import AUTO, PRECISIONS, RIGHT_NAMES, Precision, facts_of
from ampwise.errors import AmpwiseError, BadInput, PrecisionUnavailable, UnknownName
from ampwise.evidence.wording import scale_text
from ampwise.formats import BlockFormat, Format, all_names, find_format, find_scalar_format

__all__ = ["ATTENTION", "FORM", "WIDEST", "Side", "side_of"]

FORM = "PRECISION[@DEVICE][,OPTION…], such as bf16, fp32@cuda or 'bf16,attention=math'"
WIDEST = "fp64"
ARITHMETICS = {**PRECISIONS, WIDEST: Precision(name=WIDEST, dtype=None, scaled=False, tf32=False)}
ATTENTION = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
SPREAD = 16  # between a tensor's typical magnitudes and those that matter still
OPTIONS = ("compiled", "compiled=BACKEND", "emulated", UP, f"attention={'|'.join(ATTENTION)}", "scale=NUMBER")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How a step is computed."""

    precision: str  # a key of ARITHMETICS, or a format that is emulated
    policy: Policy | None = None
    recipe: Recipe | None = None  # of products that are emulated
    device: torch.device | None = None  # None: where the model is
    compiled: str = ""  # torch.compile's backend
    attention: str = ""
    scale: float | None = None  # of the loss; None: as the precision needs it

    @property
    def label(self) -> str:
        """As one asks for it."""
        name = self.precision if self.policy is None else repr(self.policy)
        options = [
            "emulated" if self.recipe is not None and self.precision in ARITHMETICS else "",
            UP if self.recipe is not None and self.recipe.scales_up else "",
            "" if not self.compiled else "compiled" if self.compiled == "inductor" else f"compiled={self.compiled}",
            f"attention={self.attention}" if self.attention else "",
            "" if self.scale is None else f"scale={scale_text(self.scale)}",
        ]
        where = "" if self.device is None else f"@{self.device}"
        return ",".join([name + where, *filter(None, options)])

    @property
    def arithmetic(self) -> Precision:
        """What torch computes in; an emulated format is computed in FP32."""
        return ARITHMETICS["fp32" if self.recipe is not None else self.precision]

    @property
    def is_wider(self) -> bool:
        """Whether weights and batch become FP64."""
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
        """Tensors of this typical magnitude have values below the format's range; 0 where each tensor has a scale."""
        if self.recipe is not None and self.recipe.scaled:
            return 0.0
        return find_scalar_format(self.precision).smallest_normal * SPREAD

    def on(self, device: torch.device) -> Side:
        """With nothing left open, for a model on a device; an error where it cannot be had there."""
        where = self.device or device
        precision = facts_of(where).best if self.precision == AUTO else self.precision
        placed = replace(self, precision=precision, device=self.device if where != device else None)
        lacks = facts_of(where).lacks.get(precision) if self.recipe is None else None
        if lacks is not None:
            raise PrecisionUnavailable(
                f"diff: {self.label}: {lacks} It runs {', '.join((*facts_of(where).runs, WIDEST))}. What it lacks can "
                f"be emulated: '{self.label},emulated'."
            )
        return placed


def roundoff(fmt: Format | BlockFormat) -> float:
    """The largest relative error of rounding a value to a format, inside its range.

    >>> roundoff(find_format("bf16")) == 2**-8
    True
    """
    return (fmt.element if isinstance(fmt, BlockFormat) else fmt).epsilon / 2


def side_of(asked: Any) -> Side:
    """A side by its text, or by a policy.

    >>> side = side_of("bf16,attention=math")
    >>> side.precision, side.attention, side.roundoffs[0]
    ('bf16', 'math', 0.00390625)
    """
    if isinstance(asked, Side):
        return asked
    if isinstance(asked, Policy):
        return Side(precision=asked.base, policy=asked)
    if not isinstance(asked, str):
        raise BadInput(f"diff: {asked!r}: a side is {FORM}, or a Policy.")
    first, *words = [word.strip() for word in re.split("[,+]", asked)]
    name, _, device = first.partition("@")
    emulated = "emulated" in words
    side = _named(name, asked, emulated=emulated)
    if device:
        side = replace(side, device=_device(device, asked))
    for word in words:
        if word != "emulated":
            side = _with(side, word, asked)
    return side


def _named(name: str, asked: str, *, emulated: bool) -> Side:
    if name.endswith(".json"):
        policy = _policy(name)
        return Side(precision=policy.base, policy=policy)
    if name in ARITHMETICS and not emulated:
        return Side(precision=name)
    right = RIGHT_NAMES.get(name.lower())
    known = list(dict.fromkeys([*ARITHMETICS, *all_names()]))
    if right is not None or not name:
        hint = f"Here that is called {right!r}. " if right else ""
        raise BadInput(f"diff: {asked!r}: a side is {FORM}. {hint}The precisions are {', '.join(ARITHMETICS)}.")
    try:
        recipe = recipe_named(name)
    except UnknownName as error:
        listing = f"Precisions are {', '.join(ARITHMETICS)}; any other format of `ampwise formats` is emulated."
        raise UnknownName("precision", name, known, listing=listing) from error
    return Side(precision=name if name in ARITHMETICS else recipe.name, recipe=recipe)


def _policy(file: str) -> Policy:
    """One that was written as JSON."""
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
        if isinstance(data, dict) and "policy" in data:  # what a search has found has one among other things
            _refuse_narrow(file, data)
            data = data["policy"]
        return Policy.from_dict(data)
    except OSError as error:
        raise BadInput(f"diff: {file}: the policy cannot be read: {error.strerror or error}.") from error
    except (ValueError, AmpwiseError) as error:
        raise BadInput(f"diff: {file}: it is no policy, as Policy.as_dict() writes it in JSON: {error}") from error


def _refuse_narrow(file: str, found: dict[str, Any]) -> None:
    """Formats that a policy cannot ask for: products that a search has emulated."""
    if found.get("narrow"):
        names = ", ".join(sorted(set(map(str, found["narrow"].values()))))
        raise BadInput(
            f"diff: {file}: what ampwise search found has modules in {names}, which a policy of autocast cannot have. "
            "Compare the format itself, such as --b e4m3, or search with --formats bf16,fp32."
        )


def _device(text: str, asked: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise BadInput(f"diff: {asked!r}: there is no kind of device {text!r}; cpu and cuda:1 are devices.") from error
    backend = None if device.type == "cpu" else getattr(torch, device.type, None)
    seen = (
        1 if device.type == "cpu" else backend.device_count() if backend is not None and backend.is_available() else 0
    )
    if (device.index or 0) >= seen:
        kinds = "CUDA" if device.type == "cuda" else device.type
        raise BadInput(f"diff: {asked!r}: torch sees {seen or 'no'} {kinds} devices here. Try: ampwise gpu")
    return device


def _with(side: Side, word: str, asked: str) -> Side:
    name, _, value = word.partition("=")
    if word == UP and side.recipe is not None:
        return replace(side, recipe=with_scales_up(side.recipe, f"diff: {asked!r}"))
    if name == "compiled":
        return replace(side, compiled=value or "inductor")
    if name == "attention":
        if value not in ATTENTION:
            listing = f"The kernels are {', '.join(ATTENTION)}."
            raise UnknownName("attention kernel", value, ATTENTION, listing=listing)
        return replace(side, attention=value)
    if name == "scale":
        return replace(side, scale=_scale(value, asked))
    raise BadInput(f"diff: {asked!r}: there is no option {word!r}; a side is {FORM}, with {', '.join(OPTIONS)}.")


def _scale(text: str, asked: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0):
        raise BadInput(f"diff: {asked!r}: scale={text} is no loss scale; 65536 is what a GradScaler begins with.")
    return scale
