"""Proposal: run backward() inside the autocast block."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.source.backward_in_autocast import RULE

__all__ = ["RULE", "check"]


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("backward-in-autocast"):
        yield advise_against(
            RULE,
            choice,
            "each backward operation runs in the dtype of its forward operation: autocast around backward() only adds "
            "casts in custom functions and hooks that were not written for them",
            costs={
                "inside": "wrong dtypes in custom functions and double backward",
                "outside": "one indentation level less",
            },
            know=SuggestedCommand("ampwise check train.py", "every backward() inside the block (AMP111)"),
        )
