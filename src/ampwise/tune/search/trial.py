"""One tried assignment."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ampwise.tune.search.descent import Assignment

__all__ = ["SearchTrial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTrial:
    """How far an assignment is from FP32. If stopped early, ``whole`` is False, and the error is a lower bound."""

    assignment: Assignment
    loss: float
    gradient: float
    worst: str | None  # the module with the largest gradient error
    whole: bool = True
    problem: str | None = None  # why it failed to run

    @property
    def error(self) -> float:
        """The number compared with the tolerance."""
        return max(self.loss, self.gradient)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, which ``from_dict`` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SearchTrial:
        """Read what ``as_dict`` returned, through JSON, where infinity is text."""
        numbers = {name: float(data[name]) for name in ("loss", "gradient")}
        assignment = tuple(int(place) for place in data["assignment"])
        return cls(**{**data, **numbers, "assignment": assignment})
