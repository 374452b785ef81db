"""Which versions of other frameworks the integrations are tested with, and a plain word where another is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from types import ModuleType

from ampwise.errors import MissingDependency

__all__ = ["ACCELERATE", "LIGHTNING", "TRANSFORMERS", "Framework", "lightning_name", "require"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework: what it is installed as, and the versions that are taken. ``tested`` is what the tests ran with."""

    ours: str  # the module that needs it
    package: str
    since: str
    before: str
    tested: str

    @property
    def wanted(self) -> str:
        return f"{self.package}>={self.since},<{self.before}"

    def takes(self, version: str) -> bool:
        """Compared number by number, as far as the limits have them.

        >>> [LIGHTNING.takes(version) for version in ("2.5.9", "2.6.0.post1", "2.10", "3.0.0rc1")]
        [False, True, True, False]
        """
        return _numbers(self.since) <= _numbers(version) < _numbers(self.before)


LIGHTNING = Framework(
    ours="ampwise.lightning", package="pytorch-lightning", since="2.6", before="3", tested="2.6.6 with torch 2.13.0"
)
TRANSFORMERS = Framework(
    ours="ampwise.transformers", package="transformers", since="5", before="6", tested="5.22.2 with torch 2.13.0"
)
ACCELERATE = Framework(
    ours="ampwise.accelerate", package="accelerate", since="1.15", before="2", tested="1.15.0 with torch 2.13.0"
)


def require(framework: Framework, module: str) -> None:
    """Raise where the framework, imported as ``module``, is not there or of a version that is not taken."""
    package = framework.package if module != "lightning.pytorch" else "lightning"
    try:
        version = importlib.metadata.version(package) if _is_there(module) else None
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None:
        raise MissingDependency(
            f"{framework.ours} needs {framework.package}, which is not installed. "
            f"Get it with: pip install '{framework.wanted}'"
        )
    if not framework.takes(version):
        raise MissingDependency(
            f"{framework.ours}: {package} {version} is installed, and it works with {framework.since} up to, but not "
            f"including, {framework.before}. Get one of those with: pip install '{framework.wanted}'"
        )


def lightning_name() -> str:
    """Lightning goes by two names, with classes of its own under each: the one that the script uses."""
    names = ("lightning.pytorch", "pytorch_lightning")
    loaded = [name for name in names if isinstance(sys.modules.get(name), ModuleType)]
    return next(iter(loaded or [name for name in names if _is_there(name)]), names[-1])


def _is_there(module: str) -> bool:
    if sys.modules.get(module) is not None:
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # of a package that is not there; or one that was barred
        return False


def _numbers(version: str) -> tuple[int, ...]:
    """Of a version, those before its first letter; "5" is as good as "5.0.0"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
