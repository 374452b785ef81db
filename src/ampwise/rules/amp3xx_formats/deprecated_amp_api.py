from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.deprecated_names import MOVED, deprecated_uses
from ampwise.check.source.oldest_torch import oldest_torch
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
        "`torch.amp.custom_fwd(device_type='cuda')`. `torch.amp` has all of these names since torch 2.4."
    ),
    bad="scaler = torch.cuda.amp.GradScaler()\nwith torch.cuda.amp.autocast():\n    loss = model(x).sum()",
    good='scaler = torch.amp.GradScaler("cuda")\nwith torch.amp.autocast("cuda"):\n    loss = model(x).sum()',
    fixable="sometimes",
)
NEEDS = (("cuda.amp", "cpu.amp", "torch.cuda import", "torch.cpu import", "torch.cuda as", "torch.cpu as"),)


SINCE = (2, 4)  # the torch whose torch.amp has all four names


def check_source(code: SourceFile) -> Findings:
    oldest = oldest_torch(code.path, code.project.target_torch.get(code.path))
    doubt = oldest.reason if oldest is not None and oldest.version < SINCE else None
    if "set_autocast" in code.script.text:
        doubt = "the old autocast has a default dtype of its own, the new one takes that of `set_autocast_dtype`"
    for use in deprecated_uses(code):
        names = [use.name.rpartition(".")[2]] if use.name.endswith(MOVED) else _imported(use.node)
        new = f"torch.amp.{names[0]}" if use.name.endswith(MOVED) else "torch.amp"
        device = use.name.split(".")[1]
        calls = [
            f"`torch.amp.{name}('{device}', ...)`"
            if name in ("autocast", "GradScaler")
            else f"`torch.amp.{name}(device_type='{device}')`"
            for name in names
        ]
        fix = f"Use {' and '.join(calls)}; torch 2.4 or newer has all of `torch.amp`."
        yield RULE.at(
            code.script.place(use.node),
            f"`{use.name}` is deprecated, use `{new}`",
            fix=f"{fix} Not a safe fix: {doubt}." if doubt and use.edits else fix,
            edits=use.edits,
            safe=doubt is None,
        )


def _imported(node: ast.AST) -> list[str]:
    """Return the deprecated names of an import; of a module, or of all its names, the usual two."""
    names = [alias.name for alias in node.names if alias.name in MOVED] if isinstance(node, ast.ImportFrom) else []
    return names or ["autocast", "GradScaler"]
