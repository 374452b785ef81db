"""Rules are found by looking, ours are sound, and a stranger's rules cannot break or replace them."""

import subprocess
import sys
import zipfile

import pytest

from ampwise import rules
from ampwise.check.rule_entry import matching_rules
from ampwise.errors import UnknownName
from ampwise.finding import Rule, Severity
from ampwise.rules import (
    RegisteredRule,
    _plugins,
    all_rules,
    built_in,
    categories,
    find_rule,
    list_entries,
    rules_in,
)

RULE_FILE = """
from ampwise.finding import Rule, Severity
texts = dict(summary="s", why="w", fix="f", bad="b", good="g")
RULE = Rule(code={code!r}, name={name!r}, severity=Severity.INFO, **texts)
def check(evidence):
    return iter(())
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a plugin as pip would: modules and a dist-info folder in a folder on sys.path."""

    def install(files, entry_points, name="plugin"):
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[ampwise.rules]\n" + entry_points)
        _forget()

    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield install
    for added in set(sys.modules) - before:
        del sys.modules[added]
    _forget()


def _forget():
    rules.registered.cache_clear()
    _plugins._all_entry_points.cache_clear()


def rule_file(code="ACME001", name="acme-rule"):
    return RULE_FILE.format(code=code, name=name)


def make_rule(code, name):
    severity = Severity.INFO
    return Rule(code=code, name=name, severity=severity, summary="s", why="w", fix="f", bad="b", good="g")


# Ours


@pytest.mark.parametrize("entry", built_in(), ids=lambda entry: entry.rule.code)
def test_our_rules_are_sound(entry: RegisteredRule):
    rule = entry.rule
    assert rule.code.startswith("AMP")
    assert callable(entry.module.check)
    assert entry.module.__name__.rpartition(".")[2] == rule.name.replace("-", "_"), "a file is named after its rule"
    assert "\n" not in rule.summary
    assert len(rule.summary) <= 110


def test_rules_are_found_and_sorted():
    codes = [rule.code for rule in all_rules()]
    assert codes
    assert codes == sorted(codes)
    assert len(set(codes)) == len(codes)


def test_every_rule_is_in_the_package_of_its_category():
    for category in categories():
        assert all(f".rules.{category}." in module.__name__ for module in rules_in(category))
    # What is seen in the source and when it runs is one rule, known once.
    assert {module.RULE.code for category in categories() for module in rules_in(category)} == {
        e.rule.code for e in built_in()
    }


def test_a_rule_of_several_categories_is_listed_under_source():
    shared = next(entry for entry in built_in() if entry.rule.name == "clip-scaled-grads")
    assert shared.category == "source"
    assert [module.RULE for module in rules_in("step")].count(shared.rule) == 1


def test_an_unknown_category_is_refused():
    with pytest.raises(UnknownName, match=r"unknown rule category 'hardwear'\. Did you mean hardware\?"):
        rules_in("hardwear")


def test_codes_and_names_find_a_rule_in_any_case():
    rule = all_rules()[0]
    for spelling in (rule.code, rule.code.lower(), rule.name, rule.name.upper(), f" {rule.code} "):
        assert find_rule(spelling) is rule


def test_an_unknown_rule_names_the_nearest():
    rule = all_rules()[0]
    with pytest.raises(UnknownName) as caught:
        find_rule(rule.name[:-1])
    assert rule.name in caught.value.nearest
    assert str(caught.value).endswith("`ampwise rules` lists the rules.")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (("AMP900", "other"), "its code AMP900 belongs to one (sys)"),
        (("AMP901", "one"), "its name one belongs to AMP900 (sys)"),
    ],
)
def test_two_rules_with_one_code_or_name_are_loud(monkeypatch, second, message):
    clashing = tuple(
        RegisteredRule(rule=make_rule(*names), category="hardware", module=sys) for names in (("AMP900", "one"), second)
    )
    monkeypatch.setattr(rules, "categories", lambda: ["hardware"])
    monkeypatch.setattr(rules, "_rules_in_category", lambda category: clashing)
    with pytest.raises(RuntimeError) as caught:
        built_in.__wrapped__()
    assert message in str(caught.value)


def test_looking_for_rules_imports_nothing_heavy():
    code = (
        "import sys, ampwise.rules as r; r.all_rules(); [r.rules_in(category) for category in r.categories()];"
        "print([name for name in ('torch', 'numpy', 'rich', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "text",
    [
        *("scaler.scale(loss).backward(); scaler.step(opt)", "with autocast('cuda'): nn.BCELoss()", "GradScaler()"),
        *("from torch.cuda import amp", "torch.backends.cuda.matmul.allow_tf32 = False", "model.half(); Adam()"),
    ],
)
def test_files_with_the_words_matter_to_some_rule(text):
    assert matching_rules(text.encode(), list_entries("source"))


@pytest.mark.parametrize("text", ["", "sample, example = clamp(timestamp)", "import torch", "float32"])
def test_files_without_matter_to_none(text):
    assert not matching_rules(text.encode(), list_entries("source"))


# Plugins


def test_a_plugin_module_joins(install, capsys):
    install({"acme.py": rule_file()}, "hardware = acme")
    assert find_rule("acme-rule").code == "ACME001"
    assert "acme" in [module.__name__ for module in rules_in("hardware")]
    assert capsys.readouterr().err == ""


def test_a_plugin_about_source_is_listed_with_ours(install):
    install({"acme.py": rule_file() + "NEEDS = (('caler', 'autocast'), ('step',))"}, "source = acme")
    found = {rule.code: rule for rule in list_entries("source")}
    assert len(found) == 1 + sum(entry.category == "source" for entry in built_in())
    assert found["ACME001"].module.__name__ == "acme"
    for data, possible in ((b"scaler.step()", True), (b"autocast step", True), (b"scaler", False), (b"step", False)):
        assert ("ACME001" in {rule.code for rule in matching_rules(data, found.values())}) == possible


def test_a_plugin_package_is_walked(install):
    files = {
        "acme/__init__.py": "",
        "acme/helper.py": "",
        "acme/one.py": rule_file("ACME001", "one"),
        "acme/deep/__init__.py": "",
        "acme/deep/two.py": rule_file("ACME002", "two"),
    }
    install(files, "hardware = acme")
    assert {"ACME001", "ACME002"} <= {rule.code for rule in all_rules()}


def test_documentation_leaves_plugins_out(install):
    install({"acme.py": rule_file()}, "hardware = acme")
    assert "ACME001" not in {entry.rule.code for entry in built_in()}


@pytest.mark.parametrize(
    ("files", "entry_points", "line"),
    [
        (
            {"acme.py": "raise OSError('no\\nluck')"},
            "hardware = acme",
            "ignored plugin acme: importing it failed with OSError: no",
        ),
        (
            {"acme.py": "raise SystemExit(3)"},
            "hardware = acme",
            "ignored plugin acme: importing it failed with SystemExit: 3",
        ),
        (
            {},
            "hardware = acme_is_gone",
            "ignored plugin acme_is_gone: importing it failed with ModuleNotFoundError: No module named 'acme_is_gone'",
        ),
        (
            {"acme.py": "RULE = 3"},
            "hardware = acme",
            "ignored plugin acme: its RULE is not an ampwise.finding.Rule",
        ),
        (
            {"acme.py": rule_file() + "del check"},
            "hardware = acme",
            "ignored plugin acme: it has a RULE but no check function",
        ),
        (
            {"acme.py": rule_file(code="AMP999")},
            "hardware = acme",
            "ignored plugin acme: its code AMP999 starts with AMP, which is reserved for ampwise's own rules",
        ),
        (
            {"acme.py": rule_file()},
            "kitchen = acme",
            f"ignored plugin acme: 'kitchen' is not a rule category; the categories are {', '.join(categories())}",
        ),
    ],
)
def test_a_broken_plugin_costs_one_line(install, capsys, files, entry_points, line):
    install(files, entry_points)
    assert all_rules() == [entry.rule for entry in built_in()]
    assert capsys.readouterr().err == f"ampwise: warning: {line}\n"


def test_a_plugin_cannot_take_a_name(install, capsys):
    ours = built_in()[0].rule
    install({"acme.py": rule_file(name=ours.name)}, "hardware = acme")
    assert find_rule(ours.name) is ours
    assert f"ignored plugin acme: its name {ours.name} belongs to {ours.code}" in capsys.readouterr().err


def test_two_plugins_cannot_share_a_code(install, capsys):
    install({"a.py": rule_file(name="first"), "b.py": rule_file(name="second")}, "hardware = a")
    install({}, "hardware = b", name="other")
    assert find_rule("ACME001").name == "first"
    assert "ignored plugin b: its code ACME001 belongs to first (a)" in capsys.readouterr().err


def test_a_broken_module_leaves_its_siblings(install, capsys):
    files = {"acme/__init__.py": "", "acme/bad.py": "1/0", "acme/good.py": rule_file()}
    install(files, "hardware = acme")
    assert find_rule("ACME001")
    assert "ignored plugin acme.bad: importing it failed with ZeroDivisionError" in capsys.readouterr().err


def test_odd_entries_on_the_path_are_passed_over(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x.py", "")
    (tmp_path / "b.dist-info" / "entry_points.txt").mkdir(parents=True)
    assert not _plugins.mentioned([str(tmp_path), str(tmp_path / "a.zip"), str(tmp_path / "gone")])
