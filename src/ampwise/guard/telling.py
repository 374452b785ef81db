"""What a guard has to say: findings for whoever asks, for alerts, for a watch, and for people."""

from __future__ import annotations

import sys
from collections import Counter

from ampwise.engine.bad_steps import LISTENERS
from ampwise.evidence.faults import Fault
from ampwise.finding import Finding, Severity
from ampwise.guard.alerts import Alerts
from ampwise.printers import print_findings
from ampwise.printers.terminal import say
from ampwise.rules.judging import judged

__all__ = ["Telling", "finding_of"]


class Telling:
    """All findings are kept; of one that comes again and again, the 1st, 2nd, 4th, 8th is printed."""

    def __init__(self, alerts: Alerts | None, *, speaks: bool) -> None:
        self.findings: list[Finding] = []
        self._alerts, self._speaks = alerts, speaks
        self._times: Counter[str] = Counter()

    def tell(self, fault: Fault, step: int) -> Finding:
        """Make a finding of it. Every rank does, and the first speaks."""
        finding = finding_of(fault)
        self.findings.append(finding)
        if self._speaks:
            for listener in LISTENERS:
                listener(finding, step)
            if not LISTENERS:
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

    def say(self, words: str) -> None:
        """A line for people, which is no finding."""
        if self._speaks:
            say("ampwise: {}", words)

    def close(self) -> None:
        if self._alerts is not None:
            self._alerts.close()


def finding_of(fault: Fault) -> Finding:
    """By the rule that is about this kind of event."""
    return judged(fault, "run")[0]
