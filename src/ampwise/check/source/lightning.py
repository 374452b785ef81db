"""Lightning modules that enter autocast by themselves, in a file whose Trainer trains in FP32 and scales nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.outline import ClassOutline
from ampwise.check.source.project import SourceFile
from ampwise.check.source.walk import CodeSite, CodeTrace, trace_function

TRAINER = LazyPattern(r"^(pytorch_lightning|lightning)(\.\w+)*\.Trainer$")
SET_PRECISION = ("precision", "plugins", "strategy", "amp_backend", None)  # None: **options


@dataclass(slots=True, eq=False)
class HandCastModule:
    """Lightning module whose ``training_step`` enters autocast."""

    owner: ClassOutline
    training: CodeTrace

    @property
    def in_autocast(self) -> list[CodeSite]:
        """Statements of the training that run under autocast."""
        return [site for site in self.training.statements if site.context.in_autocast and not site.context.no_grad]


def hand_cast_modules(code: SourceFile) -> Iterator[HandCastModule]:
    """Yield such modules, if the file makes a Trainer and gives none a precision: what it does not say is FP32."""
    made = [call for call in code.nodes(ast.Call) if TRAINER.match(code.outline.imports.qualified(call.func) or "")]
    if not made or any(call.args or any(word.arg in SET_PRECISION for word in call.keywords) for call in made):
        return
    for owner in code.outline.classes.values():
        step = owner.methods.get("training_step")
        if step is not None and step.is_run_by_framework:
            found = HandCastModule(owner, trace_function(code.project.frame(step, owner)))
            if found.in_autocast:
                yield found
