"""One GradScaler for several ranks, proposed."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.source.shared_scaler import RULE

__all__ = ["RULE", "check"]


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("one-scaler-for-all-ranks") and choice.want != "bf16":
        yield no(
            RULE,
            choice,
            "each process has a GradScaler of its own, and all start at the same scale: DDP sums gradients before "
            "they are checked, so that every rank sees the same inf and the scales stay equal; ranks at 65536 and "
            "32768 drift apart",
            costs={
                "one scaler handed to all": "copies that no longer know of each other, or threads that mix up its "
                "state",
                "different scales": "gradients averaged in different units: wrong on every rank",
                "one each, equal starts": "nothing; with FSDP2 the plain torch.amp.GradScaler too",
            },
            know=ToKnow(
                "ampwise run -o RUN -m torch.distributed.run --nproc-per-node 2 train.py",
                "whether scales differ (AMP207)",
            ),
        )
