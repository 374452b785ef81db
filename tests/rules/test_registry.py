"""Rules are found by looking, ours are sound, and a stranger's rules cannot break or replace them."""

import ast
import importlib
import inspect
import os
import shutil
import subprocess
import sys
import tomllib
import types
import zipfile
from pathlib import Path

import pytest

import ampwise.rules
from ampwise.check.source_rules import matching_rules
from ampwise.errors import UnknownName
from ampwise.finding import Rule, Severity, registry
from ampwise.finding.call_site import CallSite
from ampwise.finding.registry import (
    all_rules,
    built_in_rules,
    find_rule,
    rule_groups,
    rule_modules,
    run_checks,
    source_rules,
)
from ampwise.guard.events import GuardEvent
from ampwise.runs.sinks.run_sinks import SINK_FAILED
from ampwise.tune.advise.claims import CLAIMS
from ampwise.watch.run_events import Clip

from ..docs.pages import commands, is_as_shown, pieces
from ..for_each import for_each

RULE_FILE = """
from __future__ import annotations
from ampwise.finding import Rule, Severity, registry
texts = dict(summary="s", why="w", fix="f", bad="b", good="g")
RULE = Rule(code={code!r}, name={name!r}, severity=Severity.INFO, **texts)
def check_source(code: SourceFile):
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
    for cached in (registry.rule_modules, registry.source_rules, registry._checks_by_type, registry._plugins):
        cached.cache_clear()


def rule_file(code="ACME001", name="acme-rule"):
    return RULE_FILE.format(code=code, name=name)


def make_rule(code, name):
    severity = Severity.INFO
    return Rule(code=code, name=name, severity=severity, summary="s", why="w", fix="f", bad="b", good="g")


# Ours


ROOT = Path(ampwise.rules.__file__).parent
FOLDERS = [path.name for path in ROOT.glob("amp*")]
OURS = [module for module in rule_modules() if module.__name__.startswith("ampwise.")]


@for_each("module", OURS)
def test_our_rules_are_sound(module):
    rule = module.RULE
    folder, stem = module.__name__.split(".")[-2:]
    assert stem == rule.name.replace("-", "_"), "a file is named after its rule"
    fitting = [name for name in FOLDERS if rule.code.startswith(name.partition("_")[0].upper().rstrip("X"))]
    assert folder == max(fitting, key=lambda name: len(name.partition("_")[0].rstrip("x"))), (
        f"{rule.code} belongs to another folder"
    )
    cited = rule.name in {claim.rule for claim in CLAIMS}  # a rule about advice may leave its answer to the table
    assert registry.checks_of(module) or cited, f"{module.__name__} has no function whose name begins with check_"
    names = [check.__name__ for check in registry.checks_of(module)]
    assert all(name.startswith(tuple(registry.RUN_BY)) for name in names), "see registry.RUN_BY"
    assert "\n" not in rule.summary
    assert len(rule.summary) <= 110

    # Most types are imported for type checkers only, and checks are called by the name of the type.
    tree = ast.parse(inspect.getsource(module))
    imports = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for check, kinds in registry.checks_of(module).items():
        for kind in kinds:
            assert isinstance(getattr(importlib.import_module(imports[kind]), kind), type), f"{check.__name__}: {kind}"


def test_a_rule_is_in_one_file():
    names = [module.RULE.name for module in OURS]
    assert len(names) == len(set(names))
    files = {path.stem for path in ROOT.glob("amp*/*.py") if "RULE = Rule(" in path.read_text()}
    assert files == {name.replace("-", "_") for name in names}


def test_a_new_rule_file_works_at_once(tmp_path):
    """No list, index or cache needs an entry."""
    package = tmp_path / "ampwise"
    shutil.copytree(ROOT.parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    text = rule_file("AMP199", "print-called").replace("    return iter(())", PRINTS)
    (package / "rules" / "amp1xx_order" / "print_called.py").write_text(text)
    (tmp_path / "train.py").write_text("print(1)\n")
    done = subprocess.run(
        [sys.executable, "-m", "ampwise", "check", "--isolated", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert "AMP199" in done.stdout, done.stderr
    assert done.returncode == 1


PRINTS = """
    import ast
    for node in code.nodes(ast.Call):
        yield RULE.at(code.script.place(node), "print")
"""


def test_rules_are_found_in_a_zip(tmp_path):
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        root = ROOT.parent
        for path in root.rglob("*.py"):
            archive.write(path, f"ampwise/{path.relative_to(root)}")
    code = "import ampwise.finding.registry as r; print(len(r.all_rules()), len(r.source_rules()), r.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "lib.zip")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{len(all_rules())} {len(source_rules())} {tmp_path / 'lib.zip'}")


def test_a_record_goes_to_the_checks_of_its_type():
    clip = Clip(site=CallSite(file="a.py", line=3), function="clip_grad_norm_", scaled=True, backward=CallSite())
    assert [finding.rule.code for finding in run_checks(clip)] == ["AMP101"]
    assert run_checks(object()) == []


def test_rules_are_grouped_under_the_title_of_their_folder():
    grouped = rule_groups(all_rules())
    titles = list(grouped)
    assert titles[0] == "Order of the step: scale, backward, unscale, clip, step, update."
    assert sum(map(len, grouped.values())) == len(all_rules())


def test_rules_are_found_and_sorted():
    codes = [rule.code for rule in all_rules()]
    assert codes
    assert codes == sorted(codes)
    assert len(set(codes)) == len(codes)


def test_codes_of_removed_rules_are_not_used_again():
    assert not set(registry.RETIRED_CODES) & {rule.code for rule in all_rules()}


@pytest.mark.parametrize("name", ["AMP802", "amp802", "step-skipped"])
def test_a_removed_rule_says_what_replaced_it(name):
    with pytest.raises(UnknownName) as caught:
        find_rule(name)
    assert str(caught.value) == f"unknown rule {name!r}. AMP802 became a log event of the guard, `step-skipped`."


def test_what_replaced_a_rule_exists():
    events = {kind.name for kind in GuardEvent.__subclasses__()} | {SINK_FAILED}
    assert set(registry.RETIRED_CODES.values()) <= events


def test_codes_and_names_find_a_rule_in_any_case():
    rule = all_rules()[0]
    for spelling in (rule.code, rule.code.lower(), rule.name, rule.name.upper(), f" {rule.code} "):
        assert find_rule(spelling) is rule


def test_an_unknown_rule_names_the_nearest():
    rule = all_rules()[0]
    with pytest.raises(UnknownName) as caught:
        find_rule(rule.name[:-1])
    assert rule.name in caught.value.nearest
    assert str(caught.value).endswith("`ampwise explain` lists the rules.")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (("AMP900", "other"), "its code AMP900 belongs to one (first)"),
        (("AMP901", "one"), "its name one belongs to AMP900 (first)"),
    ],
)
def test_two_rules_with_one_code_or_name_are_loud(monkeypatch, second, message):
    modules = {"first": types.ModuleType("first"), "second": types.ModuleType("second")}
    modules["first"].RULE, modules["second"].RULE = make_rule("AMP900", "one"), make_rule(*second)
    monkeypatch.setattr(registry, "_rule_files", lambda: [("first", ""), ("second", "")])
    monkeypatch.setattr(registry.importlib, "import_module", modules.get)
    with pytest.raises(RuntimeError) as caught:
        registry._built_in.__wrapped__()
    assert message in str(caught.value)


def test_looking_for_rules_imports_nothing_heavy():
    code = (
        "import sys, ampwise.finding.registry as r; r.all_rules(); r.source_rules();"
        "heavy = ('torch', 'numpy', 'rich', 'pydantic');"
        "records = tuple(f'ampwise.{name}' for name in ('watch', 'guard', 'trace', 'train', 'tune.advise'));"
        "print([name for name in sys.modules if name in heavy or name.startswith(records)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@for_each(
    "text",
    [
        *("scaler.scale(loss).backward(); scaler.step(opt)", "with autocast('cuda'): nn.BCELoss()", "GradScaler()"),
        *("from torch.cuda import amp", "torch.backends.cuda.matmul.allow_tf32 = False", "model.half(); Adam()"),
    ],
)
def test_files_with_the_words_matter_to_some_rule(text):
    assert matching_rules(text.encode(), source_rules())


@for_each("text", ["", "sample, example = clamp(timestamp)", "import torch", "float32"])
def test_files_without_matter_to_none(text):
    assert not matching_rules(text.encode(), source_rules())


# Plugins


def test_the_page_about_plugins_does_what_it_shows(tmp_path):
    page, source = Path(__file__).parents[2] / "docs" / "plugins.md", ROOT.parent.parent
    fences = pieces(page)
    for fence in fences:
        if fence.file:
            (tmp_path / fence.file).write_text(fence.text)
    (tmp_path / "acme-1.0.dist-info").mkdir()
    groups = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in of.items()) for group, of in groups.items()
    ]
    (tmp_path / "acme-1.0.dist-info" / "entry_points.txt").write_text("".join(lines))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{source}"}
    for words, shown in (each for fence in fences if fence.language == "console" for each in commands(fence)):
        told = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert is_as_shown(shown, told.stdout + told.stderr), told.stdout + told.stderr


def test_a_plugin_module_joins(install, capsys):
    install({"acme.py": rule_file()}, "hardware = acme")
    assert find_rule("acme-rule").code == "ACME001"
    assert "acme" in [module.__name__ for module in rule_modules()]
    assert capsys.readouterr().err == ""


def test_a_plugin_about_source_is_listed_with_ours(install):
    ours = len(source_rules())
    install({"acme.py": rule_file() + "NEEDS = (('caler', 'autocast'), ('step',))"}, "anything = acme")
    found = {module.RULE.code: module for module in source_rules()}
    assert len(found) == 1 + ours
    assert found["ACME001"].__name__ == "acme"
    for data, possible in ((b"scaler.step()", True), (b"autocast step", True), (b"scaler", False), (b"step", False)):
        assert ("ACME001" in {rule.RULE.code for rule in matching_rules(data, found.values())}) == possible


def test_a_plugin_may_check_other_things_than_source(install):
    text = rule_file().replace("check_source(code: SourceFile)", "check_event(clip: Clip)")
    install({"acme.py": text.replace("    return iter(())", "    yield RULE.at(clip.site.place, 'seen')")}, "x = acme")
    found = run_checks(Clip(site=CallSite(file="a.py", line=3), function="clip_grad_norm_", scaled=False))
    assert [finding.rule.code for finding in found] == ["ACME001"]
    assert "ACME001" not in {module.RULE.code for module in source_rules()}


def test_an_annotation_may_have_been_evaluated(install):
    text = rule_file().replace(
        "from __future__ import annotations", "from ampwise.watch.run_events import Clip, Unscale"
    )
    text = text.replace("check_source(code: SourceFile)", "check_event(call: Clip | Unscale)")
    install({"acme.py": text}, "x = acme")
    assert find_rule("ACME001")


def test_two_entry_points_for_one_module(install, capsys):
    install({"acme.py": rule_file()}, "one = acme\ntwo = acme")
    assert find_rule("ACME001")
    assert capsys.readouterr().err == ""


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
    assert "ACME001" not in {rule.code for rule in built_in_rules()}


KNOWN = ", ".join(sorted({kind for module in OURS for kinds in registry.checks_of(module).values() for kind in kinds}))


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
            {"acme.py": rule_file() + "del check_source"},
            "hardware = acme",
            "ignored plugin acme: it has a RULE but no function whose name begins with check_",
        ),
        (
            {},
            "hardware = acme-rules",
            "ignored plugin acme-rules: importing it failed with ModuleNotFoundError: No module named 'acme-rules'",
        ),
        (
            {"acme.py": rule_file() + "def __getattr__(name): raise RuntimeError('no ' + name)\ndel RULE"},
            "hardware = acme",
            "ignored plugin acme: looking at it failed with RuntimeError: no RULE",
        ),
        (
            {"acme.py": rule_file() + "import functools\ncheck_source = functools.partial(check_source)"},
            "hardware = acme",
            "ignored plugin acme: it has a RULE but no function whose name begins with check_",
        ),
        (
            {"acme.py": rule_file().replace("check_source", "check_script")},
            "hardware = acme",
            "ignored plugin acme: check_script must be named check_source if, and only if, its argument is a "
            "SourceFile",
        ),
        (
            {"acme.py": rule_file(code="AMP999")},
            "hardware = acme",
            "ignored plugin acme: its code AMP999 starts with AMP, which is reserved for ampwise's own rules",
        ),
        (
            {"acme.py": rule_file().replace("check_source", "check_event").replace("SourceFile", "Kitchen")},
            "hardware = acme",
            "ignored plugin acme: check_event must annotate its argument with the type that it examines, such as "
            f"SourceFile; 'Kitchen' is not one of {KNOWN}",
        ),
        (
            {"acme.py": rule_file().replace("check_source", "check_event").replace(": SourceFile", "")},
            "hardware = acme",
            "ignored plugin acme: check_event must annotate its argument with the type that it examines, such as "
            f"SourceFile; 'no annotation' is not one of {KNOWN}",
        ),
    ],
)
def test_a_broken_plugin_costs_one_line(install, capsys, files, entry_points, line):
    install(files, entry_points)
    assert all_rules() == built_in_rules()
    assert capsys.readouterr().err == f"ampwise: {line}\n"


def test_a_plugin_cannot_take_a_name(install, capsys):
    ours = built_in_rules()[0]
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
    assert not registry.mentioned([str(tmp_path), str(tmp_path / "a.zip"), str(tmp_path / "gone")])
