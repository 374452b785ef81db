"""What rules say in a terminal: short sentences, no text twice, and which faults explain which."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

from ampwise.finding import Place
from ampwise.finding.registry import built_in_rules, find_rule, run_checks, source_rules
from ampwise.report.printers.rule_page import rule_page
from ampwise.report.verdict import worst_first
from ampwise.runs.rows import CountedFinding, fold_consequences
from ampwise.watch.gradient_health import GradientHealth, UpdateCounts
from ampwise.watch.run_events import SchedulerStep

RULES = built_in_rules()
CODES = {rule.code for rule in RULES}


ROOT = Path(__file__).parents[2]


def test_every_rule_has_the_page_that_findings_link_to():
    for rule in RULES:
        assert (ROOT / "docs" / "rules" / str(rule_page(rule)).rpartition("/")[2]).is_file(), rule.code


def test_the_documents_count_the_rules_that_check_source():
    rules = [module.RULE for module in source_rules()]
    off = sum(not rule.on_by_default for rule in rules)
    said = f"{len(rules)} of the [rules](rules/index.md) look at source code, {off} of them only when selected"
    assert said in (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    assert f" {len(rules)} rules for mistakes" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_tired_person_can_read_it():
    for rule in RULES:
        for text in (rule.summary, rule.fix):
            for sentence in re.split(r"(?<=[.!?]) |\n", text):
                assert len(sentence) <= 120, f"{rule.code}: {sentence}"
        assert len(rule.fix.split("\n")) <= 3, rule.code


def test_no_two_rules_give_the_same_advice():
    twice = {text: count for text, count in Counter(rule.fix for rule in RULES).items() if count > 1}
    assert twice == {}


def test_a_consequence_names_rules_that_exist_and_is_never_its_own_cause():
    for rule in RULES:
        causes = [each for each in RULES if each is not rule and each.code.startswith(rule.consequence_of)]
        assert all(any(code.startswith(start) for code in CODES) for start in rule.consequence_of), rule.code
        for cause in causes:
            # Otherwise two findings could explain each other.
            back = rule.code.startswith(cause.consequence_of) and rule.severity.rank <= cause.severity.rank
            assert not (back and cause.severity.rank <= rule.severity.rank), (rule.code, cause.code)


def seen(code, first=None, **place):
    finding = find_rule(code).at(Place(**place), "m")
    return CountedFinding(finding=finding, first_step=first, last_step=first)


def folded(*found):
    return {
        one.finding.rule.code: [each.finding.rule.code for each in one.consequences]
        for one in fold_consequences(worst_first(found))
    }


def test_one_overflow_is_one_finding():
    found = [seen("AMP612", 4), seen("AMP613", 5), seen("AMP607", 6), seen("AMP609", 90), seen("AMP904", 4)]
    assert folded(*found) == {"AMP904": ["AMP612", "AMP613", "AMP607", "AMP609"]}


def test_without_the_operation_the_loss_explains_the_scale():
    assert folded(seen("AMP607", 6), seen("AMP612", 4), seen("AMP915", 4)) == {"AMP612": ["AMP915", "AMP607"]}


def test_faults_of_their_own_stay():
    apart = [seen("AMP101", 1), seen("AMP114", 1), seen("AMP204"), seen("AMP501"), seen("AMP612", 3), seen("AMP904", 9)]
    assert folded(*apart) == {code: [] for code in ("AMP101", "AMP114", "AMP204", "AMP501", "AMP612", "AMP904")}
    assert folded(seen("AMP306", 1), seen("AMP611", 20)) == {"AMP306": ["AMP611"]}
    assert folded(seen("AMP601", 20), seen("AMP602", 30), seen("AMP301", 1)) == {"AMP301": ["AMP601", "AMP602"]}


def test_weights_that_hardly_move_come_before_all_warnings():
    def findings(moved):
        health = GradientHealth(precision="bf16")
        health.updates.extend([{"fc.weight": UpdateCounts(moved=moved, tried=1000)}] * 5)
        (found,) = [each for each in run_checks(health) if each.rule.code == "AMP611"]
        lost = CountedFinding(finding=found, first_step=20, last_step=50)
        return fold_consequences(worst_first([seen("AMP205", 1), seen("AMP306", 1), lost]))

    still, *_ = findings(20)
    assert "changed 100 of 5,000 weights with a gradient (2.0%)" in still.finding.message
    assert [one.finding.rule.code for one in findings(300)] == ["AMP205", "AMP306"]


def test_torchs_warning_about_the_scheduler_is_explained_and_not_another_fault():
    step = SchedulerStep(scheduler="LinearLR", per_step=True, after_skip=True)
    first, later = (list(run_checks(replace(step, before_any_update=is_first))) for is_first in (True, False))
    assert first[0].message == f"{later[0].message}; torch warns of it"


def test_rules_of_a_plugin_that_explain_each_other_end():
    one, other = seen("AMP101"), seen("AMP103")
    one.finding = one.finding.but(rule=one.finding.rule.but(consequence_of=("AMP103",)))
    other.finding = other.finding.but(rule=other.finding.rule.but(consequence_of=("AMP101",)))
    assert set(folded(one, other)) == {"AMP101", "AMP103"}
