"""What two others would have said of a program: torch's anomaly detection, and forward hooks as transformers has them.

Both look on while the plain loop trains, with a GradScaler where the program is in FP16, until they first speak.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from benchmarks.failures.case import Case, Program
from benchmarks.failures.plain import quiet, train, where

__all__ = ["Said", "anomaly_says", "hooks_say"]


@dataclass(frozen=True)
class Said:
    """What a tool named, or nothing; ``right`` where that is, or holds, the guilty line."""

    what: str = ""
    right: bool = False

    @property
    def spoke(self) -> bool:
        return bool(self.what)

    def __str__(self) -> str:
        return f"{self.what} ✓" if self.right else self.what or "nothing"


def anomaly_says(program: Program) -> Said:
    """The forward line of detect_anomaly's warning, the innermost in the program's file."""
    case = program.case()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                for _ in train(case, _scaler(case), around=_as_it_is):
                    pass
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                return _broke(error)
            line = _named_line("\n".join(str(each.message) for each in told), program.path)
            return Said(f"line {line or '?'}", right=program.label is not None and line == program.label.line)
    return Said()


def hooks_say(program: Program) -> Said:
    """The first module whose output is not finite. Right where the guilty line is in its forward, or, for one of
    torch's own, in the forward of the nearest module around it that the program wrote.
    """
    case = program.case()
    found: list[str] = []
    handles = [module.register_forward_hook(_look(name, found)) for name, module in case.model.named_modules()]
    try:
        for _ in train(case, _scaler(case), around=quiet):
            if found:
                break
    except RuntimeError as error:
        return _broke(error)
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        return Said()
    line = program.label.line if program.label is not None else 0
    spans = (_lines_of(module, program.path) for module in _upwards(case.model, found[0]))
    innermost = next((span for span in spans if span), range(0))
    return Said(f"{found[0] or 'the model'} ({type(case.model.get_submodule(found[0])).__name__})", line in innermost)


def _broke(error: RuntimeError) -> Said:
    """Some programs cannot be looked at in this way, or by a loop that looks at their gradients."""
    return Said(f"an error ({str(error).split(maxsplit=6)[0].rstrip(':')}…)")


def _scaler(case: Case) -> torch.amp.GradScaler | None:
    if case.precision != "fp16":
        return None
    return torch.amp.GradScaler(where(case), **case.options.get("scaling", {}))


def _as_it_is() -> warnings.catch_warnings[None]:
    """Leaves warnings alone, which are being recorded."""
    return warnings.catch_warnings()


def _named_line(text: str, path: Path) -> int | None:
    lines = re.findall(rf'File "{re.escape(str(path))}", line (\d+)', text)
    return int(lines[-1]) if lines else None


def _look(name: str, found: list[str]) -> Callable[[Module, Any, Any], None]:
    def hook(module: Module, given: Any, returned: Any) -> None:
        tensors = (leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        if not all(tensor.isfinite().all() for tensor in tensors):
            found.append(name)

    return hook


def _upwards(model: Module, name: str) -> Iterator[Module]:
    parts = name.split(".") if name else []
    for length in range(len(parts), -1, -1):
        yield model.get_submodule(".".join(parts[:length]))


def _lines_of(module: Module, path: Path) -> range:
    """The lines of a module's forward, where the program wrote it."""
    code = inspect.unwrap(type(module).forward).__code__
    if Path(code.co_filename) != path:
        return range(0)
    lines, start = inspect.getsourcelines(code)
    return range(start, start + len(lines))
