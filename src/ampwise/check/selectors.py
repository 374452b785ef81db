"""Select rules by codes, prefixes of codes, names and ALL, with ruff's semantics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.errors import BadInput, UnknownName
from ampwise.finding import Rule, registry

ALL = "ALL"
LISTING = "A selector is a code, the start of a code, a rule's name, or ALL; `ampwise explain` lists the rules."
PREFIX = LazyPattern(r"[A-Z]+[0-9]*")
CODE = LazyPattern(r"[A-Z]{2,10}[0-9]{3}")
MOST_SPECIFIC = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorLayer:
    """Selectors from one source: a settings file or the command line. The later layer wins."""

    select: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()
    extend_select: tuple[str, ...] = ()
    where: str = ""  # for error messages: " in pyproject.toml"


def chosen_codes(rules: Sequence[Rule], layers: Iterable[SelectorLayer]) -> frozenset[str]:
    """Return the codes of the rules to check.

    Without selectors, these are the rules that are on by default. In each layer the more specific selector wins and,
    between equally specific ones, the one that ignores: ``select AMP1, ignore AMP101`` leaves AMP102, ``ignore AMP1,
    select AMP101`` has AMP101. A layer with ``select`` starts over; one without changes the earlier selection.
    """
    chosen = {rule.code for rule in rules if rule.on_by_default}
    for layer in layers:
        selectors = [(selector, True) for selector in (*(layer.select or ()), *layer.extend_select)]
        selectors += [(selector, False) for selector in layer.ignore]
        wanted: dict[str, bool] = {}
        for selector, is_wanted in sorted(selectors, key=lambda entry: (_specificity(entry[0]), not entry[1])):
            wanted.update(dict.fromkeys(matching_codes(selector, rules, layer.where), is_wanted))
        kept = set() if layer.select is not None else chosen
        chosen = {rule.code for rule in rules if wanted.get(rule.code, rule.code in kept)}
    return frozenset(chosen)


def matching_codes(selector: str, rules: Sequence[Rule], where: str = "") -> list[str]:
    """Return the codes that a selector matches; UnknownName if it matches none."""
    name = selector.strip()
    if name.upper() == ALL:
        return [rule.code for rule in rules]
    found = [rule.code for rule in rules if _matches(name, rule)]
    if found:
        return found
    if any(_matches(name, rule) for rule in registry.all_rules()):
        raise BadInput(
            f"{name}{where}: `ampwise check` cannot look for this, it is not visible in source code; "
            f"`ampwise explain {name}` says what it is."
        )
    known = [key for rule in rules for key in (rule.code, rule.name)]
    raise UnknownName(f"rule selector{where}", name, known, listing=LISTING)


def check_selectors(selectors: Iterable[str], rules: Sequence[Rule], where: str = "") -> None:
    """Raise for the first selector that matches no rule."""
    for selector in selectors:
        matching_codes(selector, rules, where)


def _specificity(selector: str) -> int:
    name = selector.strip()
    if name.upper() == ALL:
        return 0
    # A whole code and a name both match one rule, and no prefix of a code is longer than this.
    is_start = PREFIX.fullmatch(name.upper()) and not CODE.fullmatch(name.upper())
    return len(name) if is_start else MOST_SPECIFIC


def _matches(name: str, rule: Rule) -> bool:
    is_code_like = PREFIX.fullmatch(name.upper()) is not None
    return rule.name == name.lower() or (is_code_like and rule.code.startswith(name.upper()))
