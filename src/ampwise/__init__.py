"""Mixed-precision training for PyTorch that is correct by construction and explains itself when it breaks.

The public names are those in ``__all__``. They are loaded on first use: ``import ampwise`` brings in neither
torch nor anything else that is slow, so that reading and explaining source works on a machine without torch.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any

    from ampwise.census.algebra import Census as Census
    from ampwise.census.count import Count as Count
    from ampwise.census.device import DeviceCensus as DeviceCensus
    from ampwise.census.measure import census as census
    from ampwise.engine.capsules import Capsules as Capsules
    from ampwise.engine.engine import Engine as Engine
    from ampwise.engine.precision.keep import keep as keep
    from ampwise.engine.precision.policy import Policy as Policy
    from ampwise.engine.scaling.scaler import GradScaler as GradScaler
    from ampwise.errors import AmpwiseError as AmpwiseError
    from ampwise.errors import BadInput as BadInput
    from ampwise.errors import MissingDependency as MissingDependency
    from ampwise.errors import PrecisionUnavailable as PrecisionUnavailable
    from ampwise.errors import ScaleCollapsed as ScaleCollapsed
    from ampwise.errors import UnknownName as UnknownName
    from ampwise.errors import UnsupportedTensor as UnsupportedTensor
    from ampwise.finding import Edit as Edit
    from ampwise.finding import Finding as Finding
    from ampwise.finding import Place as Place
    from ampwise.finding import Rule as Rule
    from ampwise.finding import Severity as Severity
    from ampwise.float8.recipe import Fp8 as Fp8
    from ampwise.formats import BlockFormat as BlockFormat
    from ampwise.formats import Format as Format
    from ampwise.formats import find_format as find_format
    from ampwise.formats.cast import cast as cast
    from ampwise.guard.ends import Stopped as Stopped
    from ampwise.guard.guard import Guard as Guard
    from ampwise.guard.ladder import Ladder as Ladder
    from ampwise.hardware import Gpu as Gpu
    from ampwise.hardware import describe_machine as describe_machine
    from ampwise.hardware import find_gpu as find_gpu
    from ampwise.low_bit.optimizers import make_optimizer as make_optimizer
    from ampwise.record.reader import Run as Run
    from ampwise.report.comparison.comparison import Comparison as Comparison
    from ampwise.rules import find_rule as find_rule
    from ampwise.trace.tracing import trace as trace
    from ampwise.tune.advise.asking import advise as advise
    from ampwise.tune.align.align import align as align
    from ampwise.tune.align.pad import pad_ as pad_
    from ampwise.tune.align.pad import unpad_ as unpad_
    from ampwise.tune.compare.comparing import compare as compare
    from ampwise.tune.compare.result import PrecisionComparison as PrecisionComparison
    from ampwise.tune.diff.diffing import diff as diff
    from ampwise.tune.diff.result import Difference as Difference
    from ampwise.tune.memory.estimate import memory as memory
    from ampwise.tune.search.found import Found as Found
    from ampwise.tune.search.searching import search as search

_HOMES = {
    "AmpwiseError": "errors",
    "BadInput": "errors",
    "BlockFormat": "formats",
    "Capsules": "engine.capsules",
    "Census": "census.algebra",
    "Comparison": "report.comparison.comparison",
    "Count": "census.count",
    "DeviceCensus": "census.device",
    "Difference": "tune.diff.result",
    "Edit": "finding",
    "Engine": "engine.engine",
    "Finding": "finding",
    "Format": "formats",
    "Fp8": "float8.recipe",
    "Found": "tune.search.found",
    "Gpu": "hardware",
    "GradScaler": "engine.scaling.scaler",
    "Guard": "guard.guard",
    "Ladder": "guard.ladder",
    "MissingDependency": "errors",
    "Place": "finding",
    "Policy": "engine.precision.policy",
    "PrecisionComparison": "tune.compare.result",
    "PrecisionUnavailable": "errors",
    "Rule": "finding",
    "Run": "record.reader",
    "ScaleCollapsed": "errors",
    "Severity": "finding",
    "Stopped": "guard.ends",
    "UnknownName": "errors",
    "UnsupportedTensor": "errors",
    "advise": "tune.advise.asking",
    "align": "tune.align.align",
    "cast": "formats.cast",
    "census": "census.measure",
    "compare": "tune.compare.comparing",
    "describe_machine": "hardware",
    "diff": "tune.diff.diffing",
    "find_format": "formats",
    "find_gpu": "hardware",
    "find_rule": "rules",
    "keep": "engine.precision.keep",
    "make_optimizer": "low_bit.optimizers",
    "memory": "tune.memory.estimate",
    "pad_": "tune.align.pad",
    "search": "tune.search.searching",
    "trace": "trace.tracing",
    "unpad_": "tune.align.pad",
}

_FRAMEWORKS = ("accelerate", "lightning", "transformers")  # a module for each: ``ampwise.lightning``

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from ampwise.printers.tool import installed_version

        return installed_version() or "unknown"
    if name in _FRAMEWORKS:
        return importlib.import_module(f"ampwise.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'ampwise' has no attribute {name!r}")
    try:
        home = importlib.import_module(f"ampwise.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from ampwise.errors import MissingDependency

        raise MissingDependency(
            f"ampwise.{name} needs torch, which is not installed. Get it with: pip install 'ampwise[torch]'"
        ) from error
    return getattr(home, name)


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(shell: Any) -> None:
    """Called by ``%load_ext ampwise``; then ``%%ampwise`` at the top of a cell watches it."""
    from ampwise.watch.notebook import load_ipython_extension

    load_ipython_extension(shell)
