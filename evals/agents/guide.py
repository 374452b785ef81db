"""Repeats what popular guides say, also where it is wrong, and returns the code of the question as it is.

python -m evals.agents.guide < prompt
"""

from __future__ import annotations

import sys
import tomllib

from evals.agents import question_of
from evals.scenarios import DATA
from evals.statements import CODE_BLOCK


def answer(question: str) -> str:
    """Return the advice whose words are all in the question, the first that fits, and the question's own code."""
    rows = tomllib.loads((DATA / "guide.toml").read_text(encoding="utf-8"))["advice"]
    asked = question.lower()
    said = next((row["says"] for row in rows if all(word in asked for word in row["words"])), "Yes, that is fine.")
    code = [block["code"] for block in CODE_BLOCK.finditer(question) if "def " in block["code"]]
    return "\n\n".join([said, *(f"```python\n{each}```" for each in code[-1:])]) + "\n"


if __name__ == "__main__":
    print(answer(question_of(sys.stdin.read())))
