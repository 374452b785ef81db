from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.check.source.deprecated_names import deprecated_uses
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.project import SourceFile

RULE = Rule(
    code="AMP310",
    name="deprecated-amp-api",
    severity=Severity.WARNING,
    summary="`torch.cuda.amp` or `torch.cpu.amp` is used, which is deprecated since torch 2.4.",
    why=(
        "`torch.cuda.amp.autocast`, `GradScaler`, `custom_fwd` and `custom_bwd` warn on each use since torch 2.4 and "
        "will be removed. `torch.amp` has the same names with the device as an argument, so one script works on GPU "
        "and CPU."
    ),
    fix=(
        "Use `torch.amp.autocast('cuda', ...)` and `torch.amp.GradScaler('cuda', ...)`. For custom functions, use "
        "`torch.amp.custom_fwd(device_type='cuda')`."
    ),
    bad="scaler = torch.cuda.amp.GradScaler()\nwith torch.cuda.amp.autocast():\n    loss = model(x).sum()",
    good='scaler = torch.amp.GradScaler("cuda")\nwith torch.amp.autocast("cuda"):\n    loss = model(x).sum()',
    fixable="sometimes",
)
NEEDS = (("cuda.amp", "cpu.amp", "torch.cuda import", "torch.cpu import", "torch.cuda as", "torch.cpu as"),)


def check_source(code: SourceFile) -> Findings:
    for use in deprecated_uses(code):
        new = "torch.amp" if use.name.endswith(".amp") else f"torch.amp.{use.name.rpartition('.')[2]}"
        yield RULE.at(
            code.script.place(use.node),
            f"`{use.name}` is deprecated, use `{new}`",
            edits=use.edits,
            # The old autocast has a fixed default dtype; the new one uses the dtype that was set.
            safe="set_autocast" not in code.script.text,
        )
