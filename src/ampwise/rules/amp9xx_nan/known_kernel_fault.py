from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.time_use import TimeUse

RULE = Rule(
    code="AMP920",
    name="known-kernel-fault",
    severity=Severity.WARNING,
    summary="The run uses a kernel with a known bug, in the shapes that it shows in.",
    why=(
        "A kernel is chosen by shape, format, GPU and torch version, and some have bugs that only some values show: "
        "training goes well for days, and then a gradient is NaN although all inputs are small. The list has the "
        "public report of each bug."
    ),
    fix="Switch the kernel off, or change the shape (pad the sequence), until torch has a fixed version.",
    bad="out = F.scaled_dot_product_attention(q, k, v, mask)  # 704 keys, cuDNN's kernel",
    good="torch.backends.cuda.enable_cudnn_sdp(False)\nout = F.scaled_dot_product_attention(q, k, v, mask)",
)


def check_time(use: TimeUse) -> Findings:
    for fault in use.faulty_kernels:
        evidence = {"report": fault.link}
        fix = f"`{fault.avoid}` avoids the kernel."
        yield RULE.at(Place(), f"this run calls a kernel with a known bug: {fault.what}", evidence=evidence, fix=fix)
