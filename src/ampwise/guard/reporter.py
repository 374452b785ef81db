"""Reporting of a guard's findings: on stderr, to alerts, and to a watch."""

from __future__ import annotations

import sys
from collections import Counter

from ampwise.finding import Finding, Severity
from ampwise.finding.terminal import say
from ampwise.guard.alerts import Alerts
from ampwise.report.printers import print_findings
from ampwise.rules.dispatch import run_checks
from ampwise.rules.evidence.guard_events import GuardEvent
from ampwise.trace.bad_steps import FINDING_LISTENERS

__all__ = ["FaultReporter", "finding_for_fault"]


class FaultReporter:
    """Records all findings and prints them; of a repeated one, the 1st, 2nd, 4th, 8th and so on."""

    def __init__(self, alerts: Alerts | None, *, prints: bool) -> None:
        self.findings: list[Finding] = []
        self._alerts, self._prints = alerts, prints
        self._times: Counter[str] = Counter()

    def report(self, fault: GuardEvent, step: int) -> Finding:
        """Record a finding about a fault on every rank; rank 0 prints and sends it."""
        finding = finding_for_fault(fault)
        self.findings.append(finding)
        if self._prints:
            for listener in FINDING_LISTENERS:
                listener(finding, step)
            if not FINDING_LISTENERS:
                self._print(finding)
            if self._alerts is not None:
                self._alerts.send(finding)
        return finding

    def _print(self, finding: Finding) -> None:
        self._times[finding.rule.code] += 1
        times = self._times[finding.rule.code]
        if times & (times - 1) and finding.rule.severity is not Severity.ERROR:
            return
        if finding.rule.severity is Severity.INFO:
            at = "" if finding.place.step is None else f"step {finding.place.step:,}: "
            say("ampwise: {}{}", at, finding.message)
        else:
            print_findings([finding], file=sys.stderr)

    def log(self, text: str) -> None:
        """Print a line that is not a finding."""
        if self._prints:
            say("ampwise: {}", text)

    def close(self) -> None:
        if self._alerts is not None:
            self._alerts.close()


def finding_for_fault(fault: GuardEvent) -> Finding:
    """Return the finding of the rule for this kind of fault."""
    return run_checks(fault, "run")[0]
