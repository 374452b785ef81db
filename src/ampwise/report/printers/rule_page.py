"""The page of a rule in the documentation."""

from __future__ import annotations

from ampwise.finding import Rule

RULES = "https://github.com/ampwise/ampwise/blob/main/docs/rules"


def rule_page(rule: Rule) -> str | None:
    """Return the address of a rule's page: its own, or that of ampwise's documentation; None for a plugin's without."""
    return rule.url or (f"{RULES}/{rule.code}-{rule.name}.md" if rule.code.startswith("AMP") else None)
