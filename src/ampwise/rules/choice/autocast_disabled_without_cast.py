"""Proposal: disable autocast around the loss."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.source.autocast_disabled_without_cast import RULE

__all__ = ["RULE", "check"]


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("autocast-off-for-loss"):
        kind = choice.target.kind or "cuda"
        yield advise_against(
            RULE,
            choice,
            "disabling autocast does not cast anything: scores that arrive in 16-bit stay in 16-bit, and exp, log and "
            "sum, which autocast would run in FP32, now run in 16-bit too",
            costs={
                "enabled=False alone": "worse than leaving it on",
                "enabled=False and .float()": f'two lines: `with torch.autocast("{kind}", enabled=False):` and '
                "`scores = scores.float()`; the decorator in torch.cuda.amp is deprecated and CUDA only",
                '@ampwise.keep("fp32")': "one line that does both",
            },
            know=SuggestedCommand(
                "ampwise check train.py", "blocks without a cast (AMP406), deprecated names (AMP310)"
            ),
        )
