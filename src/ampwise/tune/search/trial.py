"""An assignment that was tried."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ampwise.tune.search.descent import Assignment

__all__ = ["Trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How far from FP32 it was. Where it was given up early, ``whole`` is False, and it is at least that far."""

    assignment: Assignment
    loss: float
    gradient: float
    worst: str | None  # the module whose gradient was farthest off
    whole: bool = True
    problem: str | None = None  # what it failed with

    @property
    def error(self) -> float:
        """What is compared with the tolerance."""
        return max(self.loss, self.gradient)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, which ``from_dict`` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trial:
        """What ``as_dict`` wrote, by way of JSON, where infinity is text."""
        numbers = {name: float(data[name]) for name in ("loss", "gradient")}
        assignment = tuple(int(place) for place in data["assignment"])
        return cls(**{**data, **numbers, "assignment": assignment})
