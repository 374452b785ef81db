"""Versions of other frameworks that the integrations support, and a clear error if another one is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from types import ModuleType

from ampwise.errors import MissingDependency

__all__ = ["ACCELERATE", "LIGHTNING", "TRANSFORMERS", "SupportedFramework", "lightning_name", "require"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportedFramework:
    """Framework with its package name and supported versions; ``tested`` is the version that the tests ran with."""

    ours: str  # the module that needs it
    package: str
    since: str
    before: str
    tested: str

    @property
    def wanted(self) -> str:
        return f"{self.package}>={self.since},<{self.before}"

    def takes(self, version: str) -> bool:
        """Whether a version is supported, compared number by number.

        >>> [LIGHTNING.takes(version) for version in ("2.5.9", "2.6.0.post1", "2.10", "3.0.0rc1")]
        [False, True, True, False]
        """
        return _numbers(self.since) <= _numbers(version) < _numbers(self.before)


LIGHTNING = SupportedFramework(
    ours="ampwise.integrations.lightning",
    package="pytorch-lightning",
    since="2.6",
    before="3",
    tested="2.6.6 with torch 2.13.0",
)
TRANSFORMERS = SupportedFramework(
    ours="ampwise.integrations.transformers",
    package="transformers",
    since="5",
    before="6",
    tested="5.22.2 with torch 2.13.0",
)
ACCELERATE = SupportedFramework(
    ours="ampwise.integrations.accelerate",
    package="accelerate",
    since="1.15",
    before="2",
    tested="1.15.0 with torch 2.13.0",
)


def require(framework: SupportedFramework, module: str) -> None:
    """Raise if the framework, imported as ``module``, is missing or its version is not supported."""
    package = framework.package if module != "lightning.pytorch" else "lightning"
    try:
        version = importlib.metadata.version(package) if _is_there(module) else None
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None:
        raise MissingDependency(
            f"{framework.ours} needs {framework.package}, which is not installed. "
            f"Install it with: pip install '{framework.wanted}'"
        )
    if not framework.takes(version):
        raise MissingDependency(
            f"{framework.ours} needs {package} {framework.since} or later, below {framework.before}, but {version} is "
            f"installed. Install a supported version with: pip install '{framework.wanted}'"
        )


def lightning_name() -> str:
    """Return the name of Lightning that the script uses: it has two, each with its own classes."""
    names = ("lightning.pytorch", "pytorch_lightning")
    loaded = [name for name in names if isinstance(sys.modules.get(name), ModuleType)]
    return next(iter(loaded or [name for name in names if _is_there(name)]), names[-1])


def _is_there(module: str) -> bool:
    if sys.modules.get(module) is not None:
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # the parent package is missing, or sys.modules blocks it
        return False


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version up to its first letter."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split("[a-z]", version)[0]))
