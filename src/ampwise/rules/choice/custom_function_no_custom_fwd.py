"""An autograd function of one's own under autocast, proposed."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, careful
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.source.custom_function_no_custom_fwd import RULE

__all__ = ["RULE", "check"]


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("custom-function"):
        kind = choice.target.kind or "cuda"
        yield careful(
            RULE,
            choice,
            "the forward of an autograd.Function runs under autocast and its backward under none: products there may "
            "meet FP32 weights beside 16-bit gradients, which is an error",
            costs={
                "as it is": "fine for elementwise work; an error, or a second dtype, where it multiplies matrices",
                "decorated": f'`@torch.amp.custom_fwd(device_type="{kind}")` and `custom_bwd`; '
                "`cast_inputs=torch.float32` where it needs FP32",
            },
            know=ToKnow("ampwise check train.py --select AMP405", "the functions that multiply matrices without them"),
        )
