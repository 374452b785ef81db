"""Result of a search: a format for each module, why, and what it gains."""

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

from ampwise.errors import AmpwiseError, BadInput, UnknownName
from ampwise.finding.strict_json import dumps
from ampwise.finding.terminal import shortened
from ampwise.report.result_view import Part, ShownResult
from ampwise.runs.files import read_json, write_atomically
from ampwise.train.arguments import model_device
from ampwise.train.precision.contexts import PrecisionContexts
from ampwise.train.precision.policy import Policy, named_modules
from ampwise.train.precision.precision import PRECISIONS
from ampwise.tune.search.arrangement import WIDEST, arrange_formats, parse_formats
from ampwise.tune.search.units import SearchUnit

WHAT = "a policy of ampwise search"
VERSION = 1
LARGEST = 64_000_000  # bytes of a file


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSensitivity:
    """A module, the format found for it, and why not a narrower one.

    ``estimates`` are predicted errors in each narrower format, from running the module by itself. ``alone`` is the
    measured error of the whole model when only this module has ``narrower``; it is measured for some modules only.
    """

    name: str
    kind: str
    format: str
    share: float  # of the FLOPs of all matmuls
    narrower: str | None  # the next narrower format, which it does not tolerate
    estimates: Mapping[str, float]
    alone: float | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatGain:
    """Gain over FP32. Times cover matmuls only, at the peaks of a datasheet."""

    cost: float  # bits of operands, weighted by FLOPs; FP32 is 1
    gpu: str | None
    faster_than_fp32: float | None
    faster_than_16_bits: float | None
    why_no_time: str | None
    kept_bytes: int | None  # saved for the backward pass, for one batch
    kept_bytes_fp32: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result on batches that the search has not seen; ``worst`` is the module with the largest gradient error there.

    ``raised``: modules that were given a wider format because it failed; then ``error_after`` is the error on these
    batches, which are no longer unseen.
    """

    batches: int
    error: float
    worst: str | None
    raised: tuple[str, ...] = ()
    error_after: float | None = None

    @property
    def passed(self) -> bool:
        """Whether it passed without changes."""
        return not self.raised


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedFormats:
    """A policy applied to a model: what a manual training loop needs."""

    base: str
    device: torch.device

    def forward(self) -> Any:
        """Return the context for the forward pass: autocast, if the policy has one."""
        return PrecisionContexts(PRECISIONS[self.base], self.device.type).forward()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchResult(ShownResult):
    """The cheapest formats that pass. ``print`` shows them, with what they gain and which modules are sensitive.

    ``policy`` says what runs in 16 and what in 32 bits, for ``ampwise.Engine`` and ``torch.autocast``; ``narrow`` maps
    patterns of modules to the formats of fewer bits that their matmuls have. ``widened`` are 16-bit modules within FP32
    whose output is cast to FP32. ``apply`` applies all of it.

    ``gap``: no other passing assignment can be cheaper by more than this fraction of the cost, if a wider format is
    never worse.
    """

    name: str
    formats: tuple[str, ...]  # as given, the cheapest first
    tolerance: float
    noise: float  # the error between two FP32 runs
    error: float
    loss_error: float
    gradient_error: float
    worst: str | None  # the module with the largest gradient error
    modules: Mapping[str, str]  # format by name
    policy: Policy
    narrow: Mapping[str, str]
    widened: tuple[str, ...]
    ranking: tuple[ModuleSensitivity, ...]
    gain: FormatGain
    gap: float
    verified: Verification | None
    batches: int
    trials: int
    passes: int
    spent: bool  # the limit on trials was reached; more may find a cheaper one
    seconds: float
    device: str
    notes: tuple[str, ...] = ()

    @property
    def narrower(self) -> bool:
        """Whether anything can have fewer bits than FP32."""
        return any(fmt != WIDEST for fmt in self.modules.values())

    @property
    def counts(self) -> dict[str, int]:
        """Number of modules in each format."""
        counted = Counter(self.modules.values())
        return {fmt: counted[fmt] for fmt in self.formats}

    @contextmanager
    def apply(self, model: Module) -> Iterator[AppliedFormats]:
        """Apply the formats found while inside, forward and backward.

        Formats of 8 bits and fewer are emulated, so that it runs anywhere and gains no speed.

        To train inside, use ``Engine(model, optimizer, precision=found.policy)``, or write the loop yourself::

            with found.apply(model) as on:
                with on.forward():
                    loss = loss_fn(x, y)
                loss.backward()

        Args:
            model: changed while inside.

        Returns:
            a context manager.
        """
        units = self._units(model)
        choices = {choice.name: choice for choice in parse_formats(self.formats)}
        device = model_device([model])
        arrangement = arrange_formats(units, [choices[self.modules[unit.name]] for unit in units], device)
        with self.policy.apply(model), replace(arrangement, regions={}).on(model):  # the policy sets the regions
            yield AppliedFormats(base=self.policy.base, device=device)

    def _units(self, model: Module) -> list[SearchUnit]:
        if not isinstance(model, Module):
            raise BadInput(f"SearchResult.apply(): expected a torch.nn.Module, got {type(model).__name__}.")
        named = named_modules(model)
        for name in self.modules:
            if name not in named:
                listing = "The policy was found for a model that has this module."
                raise UnknownName("module", name, filter(None, named), listing=listing)
        return [
            SearchUnit(name=name, module=named[name], kind=type(named[name]).__name__, flops=0.0)
            for name in self.modules
        ]

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as JSON, for ``load``.

        Args:
            path: a file, overwritten.
        """
        try:
            write_atomically(Path(path), [dumps(self.as_dict()).encode()])
        except OSError as error:
            raise BadInput(f"SearchResult.save({str(path)!r}): cannot write it: {error.strerror or error}.") from error

    @classmethod
    def load(cls, path: str | PathLike[str]) -> SearchResult:
        """Read what ``save`` wrote.

        Args:
            path: a file that ``save`` wrote.

        Returns:
            the result.

        Raises:
            BadInput: it is not such a file.
        """
        try:
            return cls.from_dict(read_json(Path(path), LARGEST))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, AmpwiseError) as error:
            raise BadInput(f"SearchResult.load({str(path)!r}): not a file of ampwise search -o: {error}.") from error

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; unknown values are None."""
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
    def from_dict(cls, data: Any) -> SearchResult:
        """Read what ``as_dict`` returned, through JSON or not.

        Args:
            data: plain data.

        Returns:
            the result.

        Raises:
            BadInput: it is not that of a result.
        """
        if not isinstance(data, dict) or data.get("what") != WHAT or data.get("version") != VERSION:
            raise BadInput(f"it is not marked as {WHAT!r}, version {VERSION}")
        parts = {name: data[name] for name in cls.__slots__}
        verified = parts["verified"]
        found = cls(
            **parts
            | {
                "policy": Policy.from_dict(parts["policy"]),
                "ranking": tuple(ModuleSensitivity(**_restored(each)) for each in parts["ranking"]),
                "gain": FormatGain(**parts["gain"]),
                "verified": None if verified is None else Verification(**_restored(verified)),
            }
            | {name: float(parts[name]) for name in ("error", "loss_error", "gradient_error", "noise", "gap")}
            | {name: tuple(map(str, parts[name])) for name in ("formats", "widened", "notes")}
            | {name: {str(one): str(fmt) for one, fmt in parts[name].items()} for name in ("modules", "narrow")}
        )
        known = {choice.name for choice in parse_formats(found.formats)}
        if not set(found.modules.values()) <= known:
            raise BadInput("its modules have formats that its list of formats lacks")
        return found

    def _parts(self) -> Iterator[Part]:
        """Yield what is shown: the verdict first, then the numbers behind it."""
        from ampwise.tune.search.text import result_parts

        return result_parts(self)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} in {fmt}" for fmt, count in self.counts.items() if count)
        return shortened(f"<SearchResult for {self.name}: {counts}; error {self.error:.3g} of {self.tolerance:g}>")


def _restored(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record as they were before JSON: errors as numbers, for infinity is text there."""
    found = dict(data)
    for name in ("alone", "error", "error_after"):
        if found.get(name) is not None:
            found[name] = float(found[name])
    for name in ("reasons", "raised"):
        if name in found:
            found[name] = tuple(map(str, found[name]))
    if "estimates" in found:
        found["estimates"] = {str(fmt): float(value) for fmt, value in found["estimates"].items()}
    return found
