"""Which rules to look for: codes, the beginnings of codes, names, and ALL, as ruff understands them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ampwise.errors import BadInput, UnknownName
from ampwise.frozen import Frozen
from ampwise.source.pattern import Pattern

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from ampwise.finding import Rule
    from ampwise.rules import Listed

__all__ = ["Layer", "check_selectors", "chosen_codes", "matching_codes"]

ALL = "ALL"
LISTING = "A selector is a code, the start of one, a rule's name, or ALL; `ampwise rules` lists the rules."
PREFIX = Pattern(r"[A-Z]+[0-9]*")
CODE = Pattern(r"[A-Z]{2,10}[0-9]{3}")
MOST_SPECIFIC = 13


class Layer(Frozen):
    """What one place says: a file of settings, or the command line. The later layer wins."""

    __slots__ = ("select", "ignore", "extend_select", "where")  # noqa: RUF023 (the order they are shown in)

    def __init__(
        self,
        *,
        select: tuple[str, ...] | None = None,
        ignore: tuple[str, ...] = (),
        extend_select: tuple[str, ...] = (),
        where: str = "",
    ) -> None:
        self.select, self.ignore, self.extend_select = select, ignore, extend_select
        self.where = where  # to name it in an error: " in pyproject.toml"


def chosen_codes(rules: Sequence[Rule | Listed], layers: Iterable[Layer]) -> frozenset[str]:
    """The codes of the rules to look for.

    Without a word those that are on by default. In each layer the more specific selector wins, and of two as
    specific the one that ignores: ``select AMP1, ignore AMP101`` leaves AMP102, ``ignore AMP1, select AMP101``
    has AMP101. A layer with ``select`` starts anew; one without changes what the earlier ones chose.
    """
    chosen = {rule.code for rule in rules if rule.on_by_default}
    for layer in layers:
        wanted = _decisions(rules, layer)
        kept = set() if layer.select is not None else chosen
        chosen = {rule.code for rule in rules if wanted.get(rule.code, rule.code in kept)}
    return frozenset(chosen)


def matching_codes(selector: str, rules: Sequence[Rule | Listed], where: str = "") -> list[str]:
    """The codes a selector means; UnknownName when it means none."""
    name = selector.strip()
    if name.upper() == ALL:
        return [rule.code for rule in rules]
    found = [rule.code for rule in rules if _means(name, rule)]
    if not found:
        _complain(name, rules, where)
    return found


def check_selectors(selectors: Iterable[str], rules: Sequence[Rule | Listed], where: str = "") -> None:
    """Complain of the first that means nothing."""
    for selector in selectors:
        matching_codes(selector, rules, where)


def _decisions(rules: Sequence[Rule | Listed], layer: Layer) -> dict[str, bool]:
    said = [(selector, True) for selector in (*(layer.select or ()), *layer.extend_select)]
    said += [(selector, False) for selector in layer.ignore]
    decisions: dict[str, bool] = {}
    for selector, wanted in sorted(said, key=lambda entry: (_specificity(entry[0]), not entry[1])):
        decisions.update(dict.fromkeys(matching_codes(selector, rules, layer.where), wanted))
    return decisions


def _specificity(selector: str) -> int:
    name = selector.strip()
    if name.upper() == ALL:
        return 0
    # A whole code and a name both mean one rule, and no start of a code is longer than this.
    is_start = PREFIX.fullmatch(name.upper()) and not CODE.fullmatch(name.upper())
    return len(name) if is_start else MOST_SPECIFIC


def _means(name: str, rule: Rule | Listed) -> bool:
    is_code_like = PREFIX.fullmatch(name.upper()) is not None
    return rule.name == name.lower() or (is_code_like and rule.code.startswith(name.upper()))


def _complain(name: str, rules: Sequence[Rule | Listed], where: str) -> None:
    from ampwise.rules import registered

    for entry in registered():
        if _means(name, entry.rule) and entry.room != "source":
            raise BadInput(f"{name}{where} is about {entry.room}, and `ampwise check` looks at source only. {LISTING}")
    known = [key for rule in rules for key in (rule.code, rule.name)]
    raise UnknownName(f"rule selector{where}", name, known, listing=LISTING)
