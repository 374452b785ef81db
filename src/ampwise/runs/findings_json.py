"""Findings as JSON data and back, with the texts of their rules, for versions that do not have those rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ampwise.errors import UnknownName
from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.finding.registry import find_rule
from ampwise.finding.strict_json import to_json_types
from ampwise.runs.json_lines import is_count
from ampwise.runs.rows import CountedFinding

PLACE_TEXTS = ("file", "module", "parameter", "device")
RULE_TEXTS = ("code", "name", "severity", "summary", "why", "fix", "bad", "good")

Kind = TypeVar("Kind")


def findings_data(found: Iterable[CountedFinding]) -> dict[str, Any]:
    """Return the contents of findings.json."""
    listed = list(found)
    rules = {seen.finding.rule.code: seen.finding.rule.as_dict() for seen in listed}
    return {"findings": [to_json_types(seen.as_dict()) for seen in listed], "rules": dict(sorted(rules.items()))}


def read_findings(data: Any) -> tuple[list[CountedFinding], list[str]]:
    """Return the findings in the contents of findings.json, and messages about invalid ones."""
    parts = data if isinstance(data, dict) else {}
    entries, rules = parts.get("findings"), parts.get("rules")
    if not isinstance(entries, list) or not isinstance(rules, dict):
        return [], ["findings.json is invalid and was ignored."]
    found: list[CountedFinding] = []
    for entry in entries:
        try:
            found.append(_read_finding(_expect(dict, entry), rules))
        except (ValueError, KeyError):
            continue
    broken = len(entries) - len(found)
    return found, [f"findings.json: {broken} of {len(entries)} findings are invalid and were ignored."] * bool(broken)


# --- parts of a finding; each raises ValueError or KeyError if it is invalid ---------------------------------------


def _read_finding(data: Mapping[str, Any], rules: Mapping[str, Any]) -> CountedFinding:
    excerpt = _expect(dict, data.get("excerpt", {}))
    if excerpt:
        _count(excerpt.get("first_line"))
        for line in _expect(list, excerpt.get("lines")):
            _expect(str, line)
    steps = [None if data.get(name) is None else _count(data[name]) for name in ("first_step", "last_step")]
    diff = data.get("diff")  # missing in older records
    rule = _rule(_expect(str, data["code"]), _expect(str, data["name"]), rules)
    if data.get("severity", str(rule.severity)) != str(rule.severity):  # its evidence made it more serious
        rule = replace(rule, severity=Severity(data["severity"]))
    return CountedFinding(
        finding=Finding(
            rule=rule,
            place=_place(_expect(dict, data["place"])),
            message=_expect(str, data["message"]),
            evidence=_expect(dict, data["evidence"]),
            fix=_expect(str, data["fix"]),
        ),
        count=_count(data["count"]),
        first_step=steps[0],
        last_step=steps[1],
        ranks=[_count(rank) for rank in _expect(list, data.get("ranks", []))],
        excerpt=excerpt,
        diff=diff if isinstance(diff, str) else "",
        diff_is_safe=data.get("diff_is_safe") is not False,
    )


def _rule(code: str, name: str, stored: Mapping[str, Any]) -> Rule:
    """Return the installed rule, or the stored one if the code is unknown or belongs to another rule now."""
    try:
        rule = find_rule(code)
        if rule.name == name or code not in stored:
            return rule
    except UnknownName:
        pass
    texts = {part: value for part, value in _expect(dict, stored[code]).items() if part in Rule.__slots__}
    if missing := [part for part in RULE_TEXTS if not isinstance(texts.get(part), str)]:
        raise ValueError(f"a rule without {missing[0]}")
    if not isinstance(texts.get("on_by_default", True), bool) or not isinstance(texts.get("url"), str | None):
        raise ValueError("an invalid rule")
    codes = tuple(_expect(str, code) for code in _expect(list, texts.get("consequence_of", [])) if code)
    return Rule(**{**texts, "severity": Severity(texts["severity"]), "consequence_of": codes})


def _place(data: Mapping[str, Any]) -> Place:
    for name, value in data.items():
        is_valid = isinstance(value, str) if name in PLACE_TEXTS else name in Place.__slots__ and is_count(value)
        if not is_valid and not (value is None and name in Place.__slots__):
            raise ValueError(f"{value!r:.80} is not a valid {name[:20]} of a place")
    return Place(**data)


def _count(value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"{value!r:.80} is not a count")
    return value  # type: ignore[no-any-return]


def _expect(kind: type[Kind], value: Any) -> Kind:
    if not isinstance(value, kind):
        raise ValueError(f"expected {kind.__name__}, got {value!r:.80}")
    return value
