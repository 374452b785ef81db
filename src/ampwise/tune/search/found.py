"""What a search has found: a format for each module, why, and what it gains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from ampwise.engine.arguments import where
from ampwise.engine.precision.arithmetic import Arithmetic
from ampwise.engine.precision.policy import Policy, named_modules
from ampwise.engine.precision.precision import PRECISIONS
from ampwise.errors import AmpwiseError, BadInput, UnknownName
from ampwise.record.files import read_json, write_aside
from ampwise.strict_json import dumps
from ampwise.tune.search.arrangement import arrangement_of
from ampwise.tune.search.choices import WIDEST, choices_of
from ampwise.tune.search.costs import Gain
from ampwise.tune.search.units import Unit

__all__ = ["Found", "On", "Sensitive", "Verified"]

WHAT = "a policy of ampwise search"
VERSION = 1
LARGEST = 64_000_000  # bytes of a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitive:
    """A module: the format that was found for it, and why not a narrower one.

    ``estimates`` are what each narrower format was thought to do, in the units of the error, from running the module by
    itself. ``alone`` is the error of the whole where this module alone has ``narrower``, measured, for those for which
    that was done.
    """

    name: str
    kind: str
    format: str
    share: float  # of the products' FLOPs
    narrower: str | None  # the next format that it does not have
    estimates: Mapping[str, float]
    alone: float | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """On batches that the search has not seen; ``worst`` is the module whose gradient was farthest off there.

    ``raised``: what was given a wider format because it failed; then ``error_after`` is the error on these batches,
    which are not unseen any more.
    """

    batches: int
    error: float
    worst: str | None
    raised: tuple[str, ...] = ()
    error_after: float | None = None

    @property
    def passed(self) -> bool:
        """At once."""
        return not self.raised


@dataclass(frozen=True, slots=True, kw_only=True)
class On:
    """A policy that is on a model: what is needed to train by hand."""

    base: str
    device: torch.device

    def forward(self) -> Any:
        """Around the forward pass: autocast, where there is one."""
        return Arithmetic(PRECISIONS[self.base], self.device.type).forward()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Found:
    """The cheapest formats that were found to pass. ``print`` shows them, with what they gain and what is sensitive.

    ``policy`` is what runs in which of 16 and 32 bits, for ``ampwise.Engine`` and ``torch.autocast``; ``narrow`` are
    the patterns of modules whose products have fewer bits, and which formats. ``widened`` are modules of 16 bits in
    what is FP32, whose output is made FP32 again. ``apply`` puts all of it on.

    ``gap``: no other assignment that passes can be cheaper by more than this part of the cost, if nothing gets worse by
    a wider format.
    """

    subject: str
    formats: tuple[str, ...]  # asked for, the cheapest first
    tolerance: float
    noise: float  # the error of FP32 against itself
    error: float
    loss_error: float
    gradient_error: float
    worst: str | None  # the module whose gradient is farthest off
    modules: Mapping[str, str]  # by name, the format
    policy: Policy
    narrow: Mapping[str, str]
    widened: tuple[str, ...]
    ranking: tuple[Sensitive, ...]
    gain: Gain
    gap: float
    verified: Verified | None
    batches: int
    trials: int
    passes: int
    spent: bool  # as many trials were made as allowed; more may find a cheaper one
    seconds: float
    device: str
    notes: tuple[str, ...] = ()

    @property
    def narrower(self) -> bool:
        """Whether anything can have fewer bits than FP32."""
        return any(fmt != WIDEST for fmt in self.modules.values())

    @property
    def counts(self) -> dict[str, int]:
        """How many modules have each format."""
        counted = Counter(self.modules.values())
        return {fmt: counted[fmt] for fmt in self.formats}

    @contextmanager
    def apply(self, model: Module) -> Iterator[On]:
        """While inside, the model computes by what was found, forward and backward; formats of 8 bits and fewer are
        emulated, so that it runs anywhere and gains nothing yet.

        To train inside, use ``Engine(model, optimizer, precision=found.policy)``, or by hand::

            with found.apply(model) as on:
                with on.forward():
                    loss = loss_fn(x, y)
                loss.backward()
        """
        units = self._units(model)
        choices = {choice.name: choice for choice in choices_of(self.formats)}
        device = where([model])
        arrangement = arrangement_of(units, [choices[self.modules[unit.name]] for unit in units], device)
        with self.policy.apply(model), replace(arrangement, regions={}).on(model):  # the regions are the policy's
            yield On(base=self.policy.base, device=device)

    def _units(self, model: Module) -> list[Unit]:
        if not isinstance(model, Module):
            raise BadInput(f"Found.apply(): a torch.nn.Module is expected, not {type(model).__name__}.")
        named = named_modules(model)
        for name in self.modules:
            if name not in named:
                listing = "The policy was found for a model that has it."
                raise UnknownName("module", name, filter(None, named), listing=listing)
        return [
            Unit(name=name, module=named[name], kind=type(named[name]).__name__, flops=0.0) for name in self.modules
        ]

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as JSON, for ``load``."""
        try:
            write_aside(Path(path), [dumps(self.as_dict()).encode()])
        except OSError as error:
            raise BadInput(f"Found.save({str(path)!r}): it cannot be written: {error.strerror or error}.") from error

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Found:
        """What ``save`` wrote."""
        try:
            return cls.from_dict(read_json(Path(path), LARGEST))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, AmpwiseError) as error:
            raise BadInput(f"Found.load({str(path)!r}): that is no {WHAT.partition(' ')[2]}: {error}.") from error

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what is not known is None."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return {
            "what": WHAT,
            "version": VERSION,
            **plain,
            "policy": self.policy.as_dict(),
            "ranking": [asdict(each) for each in self.ranking],
            "gain": asdict(self.gain),
            "verified": None if self.verified is None else asdict(self.verified),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Found:
        """What ``as_dict`` gave, by way of JSON or not."""
        if not isinstance(data, dict) or data.get("what") != WHAT or data.get("version") != VERSION:
            raise BadInput(f"it does not say that it is {WHAT}, version {VERSION}")
        parts = {name: data[name] for name in cls.__slots__}
        checked = parts | {
            "policy": Policy.from_dict(parts["policy"]),
            "ranking": tuple(_sensitive(each) for each in parts["ranking"]),
            "gain": Gain(**parts["gain"]),
            "verified": None if parts["verified"] is None else _verified(parts["verified"]),
        }
        numbers = {name: float(parts[name]) for name in ("error", "loss_error", "gradient_error", "noise", "gap")}
        tuples = {name: tuple(map(str, parts[name])) for name in ("formats", "widened", "notes")}
        mappings = {name: {str(one): str(fmt) for one, fmt in parts[name].items()} for name in ("modules", "narrow")}
        found = cls(**checked | numbers | tuples | mappings)
        known = {choice.name for choice in choices_of(found.formats)}
        if not set(found.modules.values()) <= known:
            raise BadInput("its modules have formats that it does not name")
        return found

    def __str__(self) -> str:
        from ampwise.tune.search.text import found_text

        return found_text(self)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} in {fmt}" for fmt, count in self.counts.items() if count)
        return f"<Found for {self.subject}: {counts}; error {self.error:.3g} of {self.tolerance:g}>"

    def _repr_html_(self) -> str:
        from ampwise.tune.search.notebook import found_html

        return found_html(self)


def _sensitive(data: dict[str, Any]) -> Sensitive:
    estimates = {str(fmt): float(value) for fmt, value in data["estimates"].items()}
    alone = None if data["alone"] is None else float(data["alone"])
    return Sensitive(**data | {"estimates": estimates, "alone": alone, "reasons": tuple(data["reasons"])})


def _verified(data: dict[str, Any]) -> Verified:
    after = None if data["error_after"] is None else float(data["error_after"])
    return Verified(
        **data | {"error": float(data["error"]), "error_after": after, "raised": tuple(map(str, data["raised"]))}
    )
