from __future__ import annotations

import linecache
import re
from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import failure_finding, overflows_text

if TYPE_CHECKING:
    from ampwise.finding.call_site import CallSite
    from ampwise.trace.failure import Failure

RULE = Rule(
    code="AMP904",
    name="half-overflow",
    severity=Severity.ERROR,
    summary="A result of the forward pass exceeds the range of FP16; FP32 and BF16 can hold it.",
    why=(
        "FP16 ends at 65504: larger values become inf, and a subtraction, a softmax or a normalisation later turns it "
        "into NaN, often far from here. The loss scale is not involved: it multiplies the loss, not the activations. "
        "BF16 reaches 3.39e38, like FP32, with 8 bits of precision instead of 11."
    ),
    fix=(
        "Train in BF16 if the hardware supports it. Otherwise keep this module or line in FP32, or make its inputs "
        "smaller. To do that, normalise first, and divide before a matmul, not after."
    ),
    bad='with torch.autocast("cuda", torch.float16):\n    scores = q @ k.transpose(-2, -1) / math.sqrt(d)',
    good='with torch.autocast("cuda", torch.float16):\n    scores = (q / math.sqrt(d)) @ k.transpose(-2, -1)',
)


# A conversion that is written in the code: autocast and the weights' format do not change it.
CONVERTS = re.compile(r"\.half\(\)|\.(?:to|type)\([^()]*\b(?:float16|half)\b[^()]*\)")
SMALLER = "Make its inputs smaller: normalise first, clamp them, and divide before a matmul, not after."


def check_op(failure: Failure) -> Findings:
    if failure.kind != RULE.name or failure.origin is None:
        return
    failed = {each.argument for each in failure.trials if each.change == "precision" and not each.finite}
    written = CONVERTS.search(_line_of(failure.site))
    advice = ""
    if written is not None:
        advice = f"`{written[0]}` in this line converts to FP16, whatever autocast says: remove it. {SMALLER}"
    elif {"bf16", "fp32"} <= failed:
        advice = f"A wider format alone does not help this step. {SMALLER}"
    elif failed:
        advice = f"{'Keep this module or line in FP32' if 'bf16' in failed else 'Train in BF16'}. Or: {SMALLER}"
    yield failure_finding(RULE, failure, overflows_text(failure.origin), advice=advice)


def _line_of(site: CallSite) -> str:
    line = linecache.getline(site.file, site.line) if site.file and site.line else ""
    return line.partition("#")[0]
