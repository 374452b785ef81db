"""Planted rules, that look for calls of certain names, in the place of the real ones."""

import ast
import types

import pytest

from ampwise.finding import Rule, Severity


def plant(code, name, *, called, good=None, safe=True, on_by_default=True):
    """A rule module that complains of calls of ``called``, and would write ``good`` in its place."""
    module = types.ModuleType(f"planted_{name}")
    module.RULE = Rule(
        code=code,
        name=name,
        severity=Severity.WARNING,
        summary="s",
        why="w",
        fix="f",
        bad="b",
        good="g",
        on_by_default=on_by_default,
        fixable="always" if good else "",
    )

    def check(evidence):
        script = evidence.script
        for node in ast.walk(script.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == called:
                if called == "crash":
                    raise RuntimeError("planted\nsecond line")
                edits = (script.replace(node.func, good),) if good else ()
                yield module.RULE.at(script.place(node), f"call of {called}", edits=edits, safe=safe)

    module.check_source = check
    return module


@pytest.fixture
def planted(monkeypatch):
    modules = [
        plant("AMP101", "call-bad", called="bad", good="good"),
        plant("AMP102", "call-risky", called="risky", good="careful", safe=False),
        plant("AMP103", "call-twice", called="twice", good="bad"),
        plant("AMP201", "call-plain", called="plain"),
        plant("AMP202", "call-quiet", called="quiet", on_by_default=False),
        plant("AMP301", "call-crash", called="crash"),
        plant("AMP302", "call-endless", called="endless", good="endless"),
    ]
    monkeypatch.setattr("ampwise.finding.registry.source_rules", lambda: tuple(modules))
    monkeypatch.delenv("AMPWISE_DEBUG", raising=False)
    return modules


@pytest.fixture
def rules(planted):
    return [module.RULE for module in planted]
