"""Claims, each next to the test that settles it; docs/claims.md is generated from them (tools/claims_page.py).

To add one: in a module here, whose docstring is the heading, write a test that fails if the truth is different, and
decorate it with the claim, the verdict and the truth. The page is generated without running the tests, so all arguments
are literals.

    @claim("BF16 needs multiples of 16.", verdict="false", truth="8 will do ...", also=["tests/...::test_x"])
    def test_sizes(truth): ...

``also`` names other tests of the same claim. The fixture ``truth`` is the text, so that a test can compare its figures
with a published result.
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
    """Mark a test as the one that settles a claim."""
    settled = Claim(said=said, verdict=verdict, truth=truth, also=tuple(also))

    def put_on(test: Any) -> Any:
        test.claim = settled
        return test

    return put_on
