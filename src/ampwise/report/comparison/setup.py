"""What two runs were given: script, arguments, precision, versions, devices; only what differs."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampwise.report.facts import environment, mapping, settings
from ampwise.report.wording import short

if TYPE_CHECKING:
    from ampwise.record.reader import Run

__all__ = ["Difference", "differences", "file_name", "same_script"]

VERSIONS = ("torch", "cuda", "ampwise", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that two runs did not have in common; None where a run does not say."""

    what: str
    before: str | None
    after: str | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"what": self.what, "before": self.before, "after": self.after}


def differences(before: Run, after: Run) -> list[Difference]:
    """What differs, in the order in which one would ask."""
    old, new = _setup(before), _setup(after)
    found = [
        Difference(what=what, before=old.get(what), after=new.get(what)) for what in old if old[what] != new.get(what)
    ]
    return [*found, *_suggestions(before, after)]


def same_script(before: Run, after: Run) -> bool:
    """Whether both ran a script of the same name, in whatever folder, or neither has one."""
    return file_name(before.manifest.get("script")) == file_name(after.manifest.get("script"))


def file_name(path: object) -> str:
    """The name without its folder: a checkout lies somewhere else on another machine, which may be a Windows.

    >>> file_name("/home/a/train.py"), file_name("C:\\\\work\\\\train.py"), file_name(None)
    ('train.py', 'train.py', '')
    """
    return str(path or "").replace("\\", "/").rpartition("/")[2]


def _setup(run: Run) -> dict[str, str | None]:
    where, manifest = environment(run), run.manifest
    scaled = any(bucket.scale.known for bucket in run.steps)
    told = {
        "script": manifest.get("script"),
        "arguments": _arguments(run),
        "precision": run.facts.get("precision"),
        "loss scale": ("in use" if scaled else "none") if run.steps else None,
        "device": _device(run, where),
        "processes": manifest.get("world_size"),
        **{name: where.get(name) for name in VERSIONS},
        "platform": where.get("platform"),
    }
    # A text stays whole: cut short, two long ones could look the same.
    return {what: value if value is None or isinstance(value, str) else short(value) for what, value in told.items()}


def _suggestions(before: Run, after: Run) -> list[Difference]:
    """Settings of the scaler that ampwise suggests after one run and not after the other, or otherwise."""
    old, new = ({one.name: short(one.value) for one in settings(run)} for run in (before, after))
    # Only a run that came to its end has said what it suggests, and that may be nothing.
    none = ["none" if "settings" in run.facts else None for run in (before, after)]
    return [
        Difference(what=f"suggested {name}", before=old.get(name, none[0]), after=new.get(name, none[1]))
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def _arguments(run: Run) -> str | None:
    """The script's own: what comes before it in the command, such as the folder of the record, is ampwise's."""
    command, script = run.manifest.get("command"), run.manifest.get("script")
    if not isinstance(command, list):
        return None
    words = [str(word) for word in command]
    own = words[words.index(script) + 1 :] if script in words else words
    return shlex.join(own) or "none"


def _device(run: Run, where: Mapping[str, Any]) -> str | None:
    """The devices by their names, counted; else the kind that the steps ran on."""
    found = where.get("devices")
    if isinstance(found, (list, tuple)) and found:
        counts = Counter(map(str, found))
        return ", ".join(name if times == 1 else f"{times} × {name}" for name, times in counts.items())
    kind = mapping(run, "timing").get("device")
    return None if kind is None else str(kind)
