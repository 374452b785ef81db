from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.check.source.precision import argument_of
from ampwise.check.source.sharding import sharding_policies
from ampwise.check.source.torch_names import BF16, FP16, FP32
from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.numbers.number_text import scale_text

if TYPE_CHECKING:
    from ampwise.check.source.types import SourceFile
    from ampwise.watch.gradient_health import GradientHealth

RULE = Rule(
    code="AMP614",
    name="reduced-in-half",
    severity=Severity.WARNING,
    summary="FSDP sums gradients over ranks in a 16-bit format that cannot hold them.",
    why=(
        "`MixedPrecisionPolicy(reduce_dtype=...)` is the dtype in which ranks add up their gradients; without it, they "
        "use `param_dtype`. FP16 flushes gradients below 2⁻²⁵ to zero, also those of BF16 and FP32 models, which have "
        "no loss scale. BF16 has 8 significant bits: 256 plus 1 is 256, so where one rank after the other adds its "
        "share, the shares of ranks beyond the 256th can vanish. FP32 doubles the bytes of this exchange, and nothing "
        "else."
    ),
    fix="Use `MixedPrecisionPolicy(..., reduce_dtype=torch.float32)`.",
    bad="policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)",
    good="policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
)

NEEDS = (("MixedPrecisionPolicy",), ("reduce_dtype",))

LOST = 0.05  # of a parameter's gradient; less than this is harmless
LEAST = 64  # values: with fewer, the fraction is noise
BF16_RANKS = 256  # so many equal shares, added one by one, are as much as BF16 can count


def check_source(code: SourceFile) -> Findings:
    for policy in sharding_policies(code):
        reduce, computed = argument_of(policy.call, "reduce_dtype", 1), policy.dtype("param_dtype")
        # In FP32 there may be a loss scale, in another file, too.
        unscaled = computed == BF16 or (computed in (None, FP32) and "backward(" in code.script.text)
        if reduce is not None and policy.dtype("reduce_dtype") == FP16 and unscaled and "caler" not in code.script.text:
            message = "FSDP sums gradients over ranks in FP16, which flushes those below 2⁻²⁵; there is no loss scale"
            yield RULE.at(code.script.place(reduce), message)


def check_gradients(health: GradientHealth) -> Findings:
    if health.reduced_in == "bf16" and health.ranks > BF16_RANKS:
        yield RULE.at(Place(), f"FSDP sums these gradients over {health.ranks:,} ranks in BF16")
    # With a model in FP16, what is lost is lost before they are summed (AMP601).
    if health.reduced_in != "fp16" or health.precision == "fp16" or not health.recent:
        return
    step, scale = health.recent[-1].last, health.recent[-1].scale
    at = "without a loss scale" if scale is None else f"at loss scale {scale_text(scale)}"
    hit = {
        name: found for name, found in health.underflows.items() if found.values >= LEAST and found.lost_share >= LOST
    }
    if not hit:
        return
    worst = max(hit, key=lambda name: hit[name].lost_share)
    others = f" (and {len(hit) - 1} more parameters)" if len(hit) > 1 else ""
    yield RULE.at(
        Place(parameter=worst, step=step),
        f"FSDP sums this gradient over ranks in FP16, which flushes at least {hit[worst].lost_share:.0%} of it to zero "
        f"{at}{others}",
        evidence={
            "lost_share_at_least": round(hit[worst].lost_share, 4),
            "parameters": len(hit),
            "of": len(health.underflows),
        },
    )
