"""Autocast switched off around a loss, proposed."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.source.autocast_disabled_without_cast import RULE

__all__ = ["RULE", "check"]


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("autocast-off-for-loss"):
        kind = choice.target.kind or "cuda"
        yield no(
            RULE,
            choice,
            "switching autocast off casts nothing: scores that came in 16 bits stay in 16 bits, and exp, log and "
            "sum, which autocast would have run in FP32, now run in 16 bits too",
            costs={
                "enabled=False alone": "worse than leaving it on",
                "enabled=False and .float()": f'two lines: `with torch.autocast("{kind}", enabled=False):` and '
                "`scores = scores.float()`; the decorator of torch.cuda.amp is deprecated and CUDA only",
                '@ampwise.keep("fp32")': "one line that does both",
            },
            know=ToKnow("ampwise check train.py", "blocks without a cast (AMP406), deprecated names (AMP310)"),
        )
