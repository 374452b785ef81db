from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp5xx_speed.misaligned_layers import misaligned_layers

if TYPE_CHECKING:
    from ampwise.tune.align.matmuls import StepMatmuls

RULE = Rule(
    code="AMP509",
    name="misaligned-channels",
    severity=Severity.INFO,
    summary="A convolution's channel count is not a multiple of 8.",
    why=(
        "Convolutions run on tensor cores with the channels of a pixel contiguous: a 16-byte word is 8 channels of "
        "FP16 or BF16. With other counts the library pads copies or uses slower kernels. The three channels of an "
        "image are an exception: there are special kernels for them."
    ),
    fix="Round the channel count up: 60 to 64, 100 to 104. Use channels_last, which makes them contiguous.",
    bad="conv = nn.Conv2d(60, 100, 3)",
    good="conv = nn.Conv2d(64, 104, 3)",
)


def check_matmuls(step: StepMatmuls) -> Findings:
    yield from misaligned_layers(RULE, step, "convolution")
