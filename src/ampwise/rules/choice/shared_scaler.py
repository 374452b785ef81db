"""Proposal: share one GradScaler between ranks, or use different scales."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.source.shared_scaler import RULE

__all__ = ["RULE", "check"]


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("one-scaler-for-all-ranks") and choice.want != "bf16":
        yield advise_against(
            RULE,
            choice,
            "each process has its own GradScaler and all start at the same scale: DDP sums gradients before they are "
            "checked, so every rank sees the same inf and the scales stay equal; ranks that start at 65536 and 32768 "
            "drift apart",
            costs={
                "one scaler passed to all": "copies that diverge, or threads that corrupt its state",
                "different scales": "gradients averaged at different scales: wrong on every rank",
                "one per rank, same initial scale": "nothing; FSDP2 works with the plain torch.amp.GradScaler too",
            },
            know=SuggestedCommand(
                "ampwise run -o RUN -m torch.distributed.run --nproc-per-node 2 train.py",
                "whether the scales differ (AMP207)",
            ),
        )
