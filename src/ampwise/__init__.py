"""Find and fix mixed-precision bugs in PyTorch training.

The public names are those in ``__all__``. They are loaded on first use: ``import ampwise`` imports neither torch
nor anything else that is slow, so that ``ampwise check`` works on a machine without torch.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any

    from ampwise.errors import AmpwiseError as AmpwiseError
    from ampwise.errors import BadInput as BadInput
    from ampwise.errors import PrecisionUnavailable as PrecisionUnavailable
    from ampwise.errors import ScaleCollapsed as ScaleCollapsed
    from ampwise.finding import Finding as Finding
    from ampwise.guard.guard import Guard as Guard
    from ampwise.guard.ladder import Ladder as Ladder
    from ampwise.guard.stopping import Stopped as Stopped
    from ampwise.hardware import find_gpu as find_gpu
    from ampwise.integrations.plain_loop import watch as watch
    from ampwise.numbers.census.algebra import Census as Census
    from ampwise.numbers.census.device_census import DeviceCensus as DeviceCensus
    from ampwise.numbers.census.measure import census as census
    from ampwise.numbers.formats import find_format as find_format
    from ampwise.numbers.formats.cast import cast as cast
    from ampwise.report.notebook import Run as Run
    from ampwise.trace.capsule.saving import Capsules as Capsules
    from ampwise.trace.tracing import trace as trace
    from ampwise.train.callback import Callback as Callback
    from ampwise.train.engine import Engine as Engine
    from ampwise.train.float8.recipe import Fp8 as Fp8
    from ampwise.train.low_bit.optimizers import make_optimizer as make_optimizer
    from ampwise.train.precision.call_in_precision import keep as keep
    from ampwise.train.precision.policy import Policy as Policy
    from ampwise.train.scaler.grad_scaler import GradScaler as GradScaler
    from ampwise.train.sinks import Sinks as Sinks
    from ampwise.tune.advise.advise import advise as advise
    from ampwise.tune.align.align import align as align
    from ampwise.tune.align.pad import pad_ as pad_
    from ampwise.tune.align.pad import unpad_ as unpad_
    from ampwise.tune.bench.bench import bench as bench
    from ampwise.tune.diff.diff import diff as diff
    from ampwise.tune.memory.estimate import memory as memory
    from ampwise.tune.search.result import SearchResult as SearchResult
    from ampwise.tune.search.search import search as search

_HOMES = {
    "AmpwiseError": "errors",
    "BadInput": "errors",
    "Callback": "train.callback",
    "Capsules": "trace.capsule.saving",
    "Census": "numbers.census.algebra",
    "DeviceCensus": "numbers.census.device_census",
    "Engine": "train.engine",
    "Finding": "finding",
    "Fp8": "train.float8.recipe",
    "GradScaler": "train.scaler.grad_scaler",
    "Guard": "guard.guard",
    "Ladder": "guard.ladder",
    "Policy": "train.precision.policy",
    "PrecisionUnavailable": "errors",
    "Run": "report.notebook",
    "ScaleCollapsed": "errors",
    "SearchResult": "tune.search.result",
    "Sinks": "train.sinks",
    "Stopped": "guard.stopping",
    "advise": "tune.advise.advise",
    "align": "tune.align.align",
    "bench": "tune.bench.bench",
    "cast": "numbers.formats.cast",
    "census": "numbers.census.measure",
    "diff": "tune.diff.diff",
    "find_format": "numbers.formats",
    "find_gpu": "hardware",
    "keep": "train.precision.call_in_precision",
    "make_optimizer": "train.low_bit.optimizers",
    "memory": "tune.memory.estimate",
    "pad_": "tune.align.pad",
    "search": "tune.search.search",
    "trace": "trace.tracing",
    "unpad_": "tune.align.pad",
    "watch": "integrations.plain_loop",
}

_FRAMEWORKS = ("accelerate", "lightning", "transformers")  # short names of modules in ``ampwise.integrations``


class _Frameworks:
    """Finder for the short names: ``import ampwise.lightning`` loads ``integrations/lightning.py``."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        head, _, tail = name.rpartition(".")
        if head != __name__ or tail not in _FRAMEWORKS:
            return None
        from importlib.util import spec_from_file_location

        return spec_from_file_location(name, f"{__path__[0]}/integrations/{tail}.py")


sys.meta_path.append(_Frameworks)


class _Names(type(sys)):  # type: ignore[misc]
    """The type of this module: importing the package ``ampwise.trace`` does not hide the function of that name."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, type(sys))):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Names

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from ampwise.finding.version import installed_version

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
        from ampwise.errors import needs_torch

        raise needs_torch(f"ampwise.{name}") from error
    return getattr(home, name)


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(shell: Any) -> None:
    """Load the extension for ``%load_ext ampwise``; then ``%%ampwise`` at the top of a cell watches it."""
    from ampwise.watch.notebook import load_ipython_extension

    load_ipython_extension(shell)
