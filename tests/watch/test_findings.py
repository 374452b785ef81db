"""Findings as they come up: judged once, counted, replaced as what they rest on grows."""

from ampwise.finding.call_site import CallSite
from ampwise.finding.registry import checks_for
from ampwise.runs.rows import StepRow
from ampwise.watch.findings import MOST, Findings
from ampwise.watch.gradient_health import GradientHealth
from ampwise.watch.run_events import Clip


def clip(line):
    return Clip(
        site=CallSite(file="train.py", line=line), function="clip_grad_norm_", scaled=True, backward=CallSite(line=1)
    )


def skipping(optimizer, steps):
    health = GradientHealth(optimizer, precision="fp16")
    for step in range(1, steps + 1):
        health.add_step(StepRow(optimizer=optimizer, step=step, scale=2.0 ** (20 - step), skipped=True, loss=1.0))
    return health


def collapse(findings):
    (found,) = [seen for seen in findings if seen.finding.rule.code == "AMP607"]
    return found


def test_each_check_says_by_its_argument_what_it_takes():
    assert len(checks_for(Clip)) == 1
    assert len(checks_for(GradientHealth)) > 10
    assert not checks_for(int)


def test_an_equal_call_is_counted_and_another_line_is_another_finding():
    findings = Findings()
    for step in (1, 2, 5):
        findings.judge(clip(10), step)
    findings.judge(clip(11), 3)
    first, second = findings
    assert (first.finding.place.line, first.count, first.first_step, first.last_step) == (10, 3, 1, 5)
    assert (second.finding.place.line, second.count) == (11, 1)


def test_there_is_an_end_to_them():
    findings = Findings()
    for line in range(1, MOST + 50):
        findings.judge(clip(line), 1)
        findings.judge(clip(line), 2)
    assert len(findings) == MOST


def test_what_is_judged_again_replaces_what_it_was():
    findings = Findings()
    health = skipping(0, 30)
    findings.judge_whole(health)
    before = collapse(findings).count
    for step in range(31, 41):
        health.add_step(StepRow(step=step, scale=2.0 ** (20 - step), skipped=True, loss=1.0))
    findings.judge_whole(health)
    after = collapse(findings)
    assert (before, after.count) == (30, 40)
    assert "times" not in after.finding.evidence


def test_optimizers_have_findings_of_their_own():
    findings = Findings()
    for optimizer in (0, 1):
        findings.judge_whole(skipping(optimizer, 30))
    assert [seen.finding.rule.code for seen in findings].count("AMP607") == 2


def test_what_is_no_longer_so_is_gone():
    findings = Findings()
    findings.judge_whole(skipping(0, 30))
    findings.judge_whole(GradientHealth(0))
    assert not len(findings)
