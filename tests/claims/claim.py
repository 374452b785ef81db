"""A claim and the test that settles it, in one place: docs/claims.md is made of them (tools/claims_page.py).

The way in: in a module here, whose docstring is the theme, write a test that fails if the truth is another, and put
over it what is said, the verdict and the truth. The page is made by reading, not by running: all of it is literal.

    @claim("BF16 needs multiples of 16.", verdict="false", truth="8 will do ...", also=["tests/...::test_x"])
    def test_sizes(truth): ...

``also`` names tests elsewhere that hold it, too. The fixture ``truth`` is the text, for figures that are read from a
published result: the test then holds the sentence to the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["VERDICTS", "Claim", "claim"]

VERDICTS = ("true", "false", "depends")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    said: str
    verdict: str
    truth: str
    also: tuple[str, ...] = ()


def claim(said: str, *, verdict: str, truth: str, also: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Decorator: this test settles what is said."""
    settled = Claim(said=said, verdict=verdict, truth=truth, also=tuple(also))

    def put_on(test: Any) -> Any:
        test.claim = settled
        return test

    return put_on
