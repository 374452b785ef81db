"""Findings as plain data, and back; with the texts of their rules, for readers that do not have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ampwise.errors import UnknownName
from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.record.rows import Seen
from ampwise.rules import find_rule
from ampwise.strict_json import plain

__all__ = ["findings_data", "read_findings"]


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
    try:
        entries, rules = list(data["findings"]), dict(data["rules"])
    except (KeyError, TypeError, ValueError):
        return [], ["findings.json does not have the shape of findings, and was left out."]
    found: list[Seen] = []
    broken = 0
    for entry in entries:
        try:
            found.append(_read_seen(entry, rules))
        except (KeyError, TypeError, ValueError, AttributeError):
            broken += 1
    return found, [f"findings.json: {broken} of {len(entries)} findings make no sense and were left out."] * bool(
        broken
    )


def _read_seen(data: Mapping[str, Any], rules: Mapping[str, Any]) -> Seen:
    finding = Finding(
        rule=_rule(data["code"], data["name"], rules),
        place=Place(**data["place"]),
        message=_text(data["message"]),
        evidence=dict(data["evidence"]),
        fix=_text(data["fix"]),
    )
    diff = data.get("diff")  # which older records do not have
    return Seen(
        finding=finding,
        count=int(data["count"]),
        first_step=_step(data.get("first_step")),
        last_step=_step(data.get("last_step")),
        ranks=[int(rank) for rank in data.get("ranks", [])],
        excerpt=dict(data.get("excerpt") or {}),
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
    texts = {part: value for part, value in stored[code].items() if part in Rule.__slots__}
    return Rule(**{**texts, "severity": Severity(texts["severity"])})


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def _step(value: Any) -> int | None:
    return None if value is None else int(value)
