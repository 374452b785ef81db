"""Proposal: use a custom autograd.Function under autocast as it is."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, caution
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.source.custom_function_no_custom_fwd import RULE

__all__ = ["RULE", "check"]


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("custom-function"):
        kind = choice.target.kind or "cuda"
        yield caution(
            RULE,
            choice,
            "the forward of an autograd.Function runs under autocast but its backward does not: a matmul there may "
            "combine FP32 weights with 16-bit gradients, which raises an error",
            costs={
                "as it is": "fine for elementwise code; an error, or a second dtype, where it has matmuls",
                "decorated": f'`@torch.amp.custom_fwd(device_type="{kind}")` and `custom_bwd`; '
                "`cast_inputs=torch.float32` where it needs FP32",
            },
            know=SuggestedCommand(
                "ampwise check train.py --select AMP405", "the functions with matmuls that lack the decorators"
            ),
        )
