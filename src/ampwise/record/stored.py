"""Findings as plain data, and back; with the texts of their rules, for readers that do not have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ampwise.errors import UnknownName
from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.record.lines import is_count
from ampwise.record.rows import Seen
from ampwise.rules import find_rule
from ampwise.strict_json import plain

__all__ = ["findings_data", "read_findings"]

PLACE_TEXTS = ("file", "module", "parameter", "device")
RULE_TEXTS = ("code", "name", "severity", "summary", "why", "fix", "bad", "good")

Kind = TypeVar("Kind")


def findings_data(found: Iterable[Seen]) -> dict[str, Any]:
    """What findings.json holds."""
    listed = list(found)
    rules = {seen.finding.rule.code: seen.finding.rule.as_dict() for seen in listed}
    return {"findings": [_seen_data(seen) for seen in listed], "rules": {code: rules[code] for code in sorted(rules)}}


def _seen_data(seen: Seen) -> dict[str, Any]:
    finding = seen.finding.as_dict()
    told = ("code", "name", "severity", "place", "message")
    return {
        **{name: plain(finding[name]) for name in told},
        "count": seen.count,
        "fix": seen.finding.fix,
        "evidence": plain(seen.finding.evidence),
        "first_step": seen.first_step,
        "last_step": seen.last_step,
        "ranks": list(seen.ranks),
        "excerpt": plain(seen.excerpt),
        "diff": seen.diff,
        "diff_is_safe": seen.diff_is_safe,
    }


def read_findings(data: Any) -> tuple[list[Seen], list[str]]:
    """The findings of a findings.json, and what is to be said of those that make no sense."""
    parts = data if isinstance(data, dict) else {}
    entries, rules = parts.get("findings"), parts.get("rules")
    if not isinstance(entries, list) or not isinstance(rules, dict):
        return [], ["findings.json does not have the shape of findings, and was left out."]
    found: list[Seen] = []
    broken = 0
    for entry in entries:
        try:
            found.append(_read_seen(_a(dict, entry), rules))
        except (ValueError, KeyError):
            broken += 1
    return found, [f"findings.json: {broken} of {len(entries)} findings make no sense and were left out."] * bool(
        broken
    )


# --- the parts of a finding, each of the kind that it is written as: ValueError or KeyError ------------------------


def _read_seen(data: Mapping[str, Any], rules: Mapping[str, Any]) -> Seen:
    finding = Finding(
        rule=_rule(_a(str, data["code"]), _a(str, data["name"]), rules),
        place=_place(_a(dict, data["place"])),
        message=_a(str, data["message"]),
        evidence=_a(dict, data["evidence"]),
        fix=_a(str, data["fix"]),
    )
    diff = data.get("diff")  # which older records do not have
    return Seen(
        finding=finding,
        count=_count(data["count"]),
        first_step=_step(data.get("first_step")),
        last_step=_step(data.get("last_step")),
        ranks=[_count(rank) for rank in _a(list, data.get("ranks", []))],
        excerpt=_excerpt(_a(dict, data.get("excerpt", {}))),
        diff=diff if isinstance(diff, str) else "",
        diff_is_safe=data.get("diff_is_safe") is not False,
    )


def _rule(code: str, name: str, stored: Mapping[str, Any]) -> Rule:
    """Ours, or the stored one where there is none, or another one has taken its code since."""
    try:
        rule = find_rule(code)
    except UnknownName:
        rule = None
    if rule is not None and (rule.name == name or code not in stored):
        return rule
    texts = {part: value for part, value in _a(dict, stored[code]).items() if part in Rule.__slots__}
    if missing := [part for part in RULE_TEXTS if not isinstance(texts.get(part), str)]:
        raise ValueError(f"a rule without {missing[0]}")
    if not isinstance(texts.get("on_by_default", True), bool) or not isinstance(texts.get("url"), str | None):
        raise ValueError("a rule that makes no sense")
    return Rule(**{**texts, "severity": Severity(texts["severity"])})


def _place(data: Mapping[str, Any]) -> Place:
    for name, value in data.items():
        is_one = isinstance(value, str) if name in PLACE_TEXTS else name in Place.__slots__ and is_count(value)
        if not is_one and not (value is None and name in Place.__slots__):
            raise ValueError(f"{value!r:.80} is no {name[:20]} of a place")
    return Place(**data)


def _excerpt(data: dict[str, Any]) -> dict[str, Any]:
    if data:
        _count(data.get("first_line"))
        for line in _a(list, data.get("lines")):
            _a(str, line)
    return data


def _step(value: Any) -> int | None:
    return None if value is None else _count(value)


def _count(value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"{value!r:.80} is not a count")
    return value  # type: ignore[no-any-return]


def _a(kind: type[Kind], value: Any) -> Kind:
    if not isinstance(value, kind):
        raise ValueError(f"{value!r:.80} is no {kind.__name__}")
    return value
