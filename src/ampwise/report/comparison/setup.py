"""Differences between the setups of two runs: script, arguments, precision, versions, devices."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampwise.report.formatting import format_short
from ampwise.report.run_facts import environment, mapping, settings

if TYPE_CHECKING:
    from ampwise.runs.reader import Run

__all__ = ["SetupDifference", "file_name", "same_script", "setup_differences"]

VERSIONS = ("torch", "cuda", "ampwise", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupDifference:
    """A setting that differs between two runs; None if a run has not recorded it."""

    what: str
    before: str | None
    after: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"what": self.what, "before": self.before, "after": self.after}


def setup_differences(before: Run, after: Run) -> list[SetupDifference]:
    """Return what differs, the most important first."""
    old, new = _setup(before), _setup(after)
    found = [
        SetupDifference(what=what, before=old.get(what), after=new.get(what))
        for what in old
        if old[what] != new.get(what)
    ]
    return [*found, *_suggestions(before, after)]


def same_script(before: Run, after: Run) -> bool:
    """Return whether both ran a script of the same name, in any folder, or neither has one."""
    return file_name(before.manifest.get("script")) == file_name(after.manifest.get("script"))


def file_name(path: object) -> str:
    """Return a file's name without its folder, also for a Windows path: the folder differs between machines.

    >>> file_name("/home/a/train.py"), file_name("C:\\\\work\\\\train.py"), file_name(None)
    ('train.py', 'train.py', '')
    """
    return str(path or "").replace("\\", "/").rpartition("/")[2]


def _setup(run: Run) -> dict[str, str | None]:
    where, manifest = environment(run), run.manifest
    scaled = any(bucket.scale.known for bucket in run.steps)
    values = {
        "script": manifest.get("script"),
        "arguments": _arguments(run),
        "precision": run.facts.get("precision"),
        "loss scale": ("in use" if scaled else "none") if run.steps else None,
        "device": _device(run, where),
        "processes": manifest.get("world_size"),
        **{name: where.get(name) for name in VERSIONS},
        "platform": where.get("platform"),
    }
    # Strings are not shortened: two long ones could become equal.
    return {
        what: value if value is None or isinstance(value, str) else format_short(value)
        for what, value in values.items()
    }


def _suggestions(before: Run, after: Run) -> list[SetupDifference]:
    """Return the GradScaler settings that were suggested differently after the two runs."""
    old, new = ({one.name: format_short(one.value) for one in settings(run)} for run in (before, after))
    # Only a run that reached its end has recorded suggestions, and there may be none.
    none = ["none" if "settings" in run.facts else None for run in (before, after)]
    return [
        SetupDifference(what=f"suggested {name}", before=old.get(name, none[0]), after=new.get(name, none[1]))
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def _arguments(run: Run) -> str | None:
    """Return the script's own arguments, without ampwise's, which come before the script in the command."""
    command, script = run.manifest.get("command"), run.manifest.get("script")
    if not isinstance(command, list):
        return None
    words = [str(word) for word in command]
    own = words[words.index(script) + 1 :] if script in words else words
    return shlex.join(own) or "none"


def _device(run: Run, where: Mapping[str, Any]) -> str | None:
    """Return the devices by name, counted; else the device type that the steps ran on."""
    found = where.get("devices")
    if isinstance(found, (list, tuple)) and found:
        counts = Counter(map(str, found))
        return ", ".join(name if times == 1 else f"{times} × {name}" for name, times in counts.items())
    kind = mapping(run, "timing").get("device")
    return None if kind is None else str(kind)
