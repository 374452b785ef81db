"""Cases that ours must get right, run with others' software too; docs/peers.md is made from what was seen.

The way in: a module here named ``*_peers.py`` with ``NAME = Case("short-name", title=..., why=...)`` at its top level
and, under ``@NAME.by("ampwise", "torch")``, a function of the contender's name that runs the real thing and returns
``Outcome(right, seen)``. ``seen`` is one plain sentence, the same on every machine. An exception is an outcome too, a
wrong one: functions need not catch. Then ``make peers`` and ``make docs``; test_peers.py takes it up by itself.
Nothing is imported from a peer at the top of a module, since it may not be installed.
"""

import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent

# The distribution of each. "lightning + ampwise" is Lightning's loop with our scaler in the place of torch's.
DISTRIBUTIONS = {
    "ampwise": "ampwise",
    "torch": "torch",
    "accelerate": "accelerate",
    "lightning": "pytorch-lightning",
    "fabric": "pytorch-lightning",  # which it comes with
    "deepspeed": "deepspeed",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    right: bool
    seen: str


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    title: str = field(kw_only=True)
    why: str = field(kw_only=True)
    runs: dict[str, Callable[[str], Outcome]] = field(default_factory=dict, kw_only=True)

    def by(self, *contenders):
        """Decorator: this function runs the case for these contenders."""

        def add(function):
            self.runs.update(dict.fromkeys(contenders, function))
            return function

        return add

    def outcome(self, contender):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peers warn when imported, and of faults this suite is about
            try:
                return self.runs[contender](contender)
            except Exception as error:
                sentence = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
                return Outcome(False, f"raises {type(error).__name__}: {sentence}")


def all_cases():
    """By name, in the order of the modules' names and of the cases in them."""
    names = sorted(file.stem for file in HERE.glob("*_peers.py") if not file.stem.startswith("test_"))
    modules = [importlib.import_module(f"{__package__}.{name}") for name in names]
    cases = [value for module in modules for value in vars(module).values() if isinstance(value, Case)]
    by_name = {case.name: case for case in cases}
    assert len(by_name) == len(cases), "two cases of one name"
    return by_name


def parts(contender):
    return contender.split(" + ")


def installed(contender):
    # Not the distribution's word alone: a folder of that name may be left from an uninstalled one.
    modules = [DISTRIBUTIONS[part].replace("-", "_") for part in parts(contender)]
    return all(importlib.util.find_spec(module) is not None for module in modules)


def versions(contender):
    """Versions that decide what is seen: the contender's own and torch's, without build tags such as +cpu."""
    names = {*parts(contender), "torch"} - {"ampwise"}
    return {name: importlib.metadata.version(DISTRIBUTIONS[name]).partition("+")[0] for name in sorted(names)}
