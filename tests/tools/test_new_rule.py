"""`make new-rule`: two files, which tests reject until they are filled in."""

import re
import shutil
from pathlib import Path

import pytest
from tools.new_rule import new_rule

import ampwise.rules
from ampwise.errors import BadInput, UnknownName
from ampwise.finding.registry import RETIRED_CODES, all_rules
from tools import new_rule as module

RULES = Path(ampwise.rules.__file__).parent
GROUPS = ("speed", "differences", "fp8")


@pytest.fixture
def root(tmp_path):
    shutil.copytree(RULES, tmp_path / module.RULES, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / module.FIXTURES).mkdir(parents=True)
    return tmp_path


def test_the_files_are_where_the_rules_and_fixtures_are(root):
    rule, fixture = new_rule("clip-by-value", "order", root)
    assert rule == root / "src/ampwise/rules/amp1xx_order/clip_by_value.py"
    assert fixture == root / "tests/rules/fixtures/clip_by_value.py"
    code = re.search(r'code="(AMP1\d\d)"', rule.read_text())[1]
    assert code not in {rule.code for rule in all_rules()}
    assert code in fixture.read_text()
    compile(rule.read_text(), str(rule), "exec")
    compile(fixture.read_text(), str(fixture), "exec")


def test_the_next_rule_gets_the_next_code(root):
    codes = [
        int(re.search(r'code="AMP(\d+)"', new_rule(name, "state", root)[0].read_text())[1]) for name in ("one", "two")
    ]
    assert codes[1] == codes[0] + 1


def test_a_group_within_a_hundred_keeps_its_codes(root):
    codes = {group: re.search(r'code="(AMP\d+)"', new_rule(group, group, root)[0].read_text())[1] for group in GROUPS}
    assert codes["speed"].startswith("AMP52")
    assert codes["differences"].startswith("AMP53")
    assert codes["fp8"].startswith("AMP54")


def test_codes_of_removed_rules_are_not_used_again(root):
    (rule, _) = new_rule("again", "guard", root)
    code = re.search(r'code="(AMP\d+)"', rule.read_text())[1]
    assert code > max(RETIRED_CODES)


def test_what_is_to_be_done_fails_a_test(root):
    for path in new_rule("clip-by-value", "order", root):
        assert "TODO" in path.read_text(), "test_nothing_is_left_to_do looks for it"


def test_mistakes_are_refused(root):
    with pytest.raises(BadInput, match="expected lower-case words joined by hyphens"):
        new_rule("Clip_By_Value", "order", root)
    with pytest.raises(UnknownName, match=r"unknown group 'ordr'\. Did you mean order\?"):
        new_rule("clip-by-value", "ordr", root)
    new_rule("clip-by-value", "order", root)
    with pytest.raises(BadInput, match=r"clip_by_value\.py exists already"):
        new_rule("clip-by-value", "order", root)
