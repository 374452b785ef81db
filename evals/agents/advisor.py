"""Answers from ampwise alone: advice on the ideas, symptoms and devices that a question names, and fixes of its code.

    python -m evals.agents.advisor < prompt

It knows nothing but word overlap, and it cannot write code: what it fixes is the file in the question.
"""

from __future__ import annotations

import re
import sys

from ampwise import advise
from ampwise.check.config import SettingsByFolder
from ampwise.check.linter import RuleSelection, check_text
from ampwise.check.verified_fixes import fix_findings
from ampwise.hardware import gpus
from ampwise.tune.advise.claims import IDEAS
from ampwise.tune.advise.symptoms import SYMPTOMS
from evals.agents import question_of
from evals.statements import CODE_BLOCK

COMMON = set(re.findall(r"\w+", """
    a an and any are as at be by can do does for from has have how i if in is it its just let me my no not of on or our
    out so that the then there this to too want was we what where which will with work yes you
"""))  # fmt: skip
ENOUGH = 0.34  # of the words of an idea, and two of them
MOST_IDEAS = 3


def words_of(text: str) -> set[str]:
    """Return the words that mean something, without a plural's s."""
    return {word.removesuffix("s") for word in re.findall(r"[a-z0-9_]+", text.lower())} - COMMON


def answer(question: str) -> str:
    """Return what ampwise has to say."""
    asked = words_of(CODE_BLOCK.sub("", question))

    def share(said: str) -> float:
        own = words_of(said)
        return len(own & asked) / len(own) if len(own & asked) > 1 else 0.0

    ideas = sorted((idea for idea in IDEAS if share(IDEAS[idea]) >= ENOUGH), key=lambda idea: -share(IDEAS[idea]))
    symptom = max(SYMPTOMS, key=lambda name: share(SYMPTOMS[name]))
    device = next((gpu.id for gpu in gpus() if gpu.id.split("-")[0] in asked), None)
    advice = advise(
        gpu=device or "h100-sxm",
        ideas=ideas[:MOST_IDEAS],
        symptom=symptom if share(SYMPTOMS[symptom]) >= ENOUGH else None,
        want="bf16" if "bf16" in asked else None,
    )
    said = []
    for finding in advice.findings:
        verdict = "No" if finding.evidence["answer"] == "no" else "Careful"
        said.append(f"{verdict}: {finding.message}. {finding.fix.strip()} ({finding.rule.code})")
    said += [f"{number}. {step.command or ''} {step.tells}." for number, step in enumerate(advice.triage, 1)]
    if not said:
        said = [f"On {advice.choice.target.title}, train in {advice.precision.upper()}: {advice.reasons[0].text}."]
    return "\n\n".join(said + [f"```python\n{code}\n```" for code in fixed(question)]) + "\n"


def fixed(question: str) -> list[str]:
    """Return the last code of the question with the linter's fixes, if it has any."""
    blocks = [block["code"] for block in CODE_BLOCK.finditer(question) if "def " in block["code"]]
    texts = []
    for code in blocks[-1:]:
        report, task = check_text(code, "train.py", RuleSelection(SettingsByFolder(isolated=True)))
        change = fix_findings(report.findings, task, unsafe=True).files.get("train.py")
        texts.append(code if change is None else change.text)
    return texts


if __name__ == "__main__":
    print(answer(question_of(sys.stdin.read())))
