"""The questions on a terminal: few, each with a default, asked again when the answer makes no sense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ampwise.errors import AmpwiseError, UnknownName
from ampwise.finding.terminal import say
from ampwise.hardware.catalog import gpu_named
from ampwise.rules.evidence.choice.choice import WANTED
from ampwise.rules.evidence.choice.ideas import SYMPTOMS
from ampwise.rules.evidence.choice.model import KINDS, parse_count
from ampwise.rules.evidence.choice.target import target_for_capability

__all__ = ["QUESTIONS", "Question", "ask"]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, under the name of its option; ``check`` raises what is wrong with an answer."""

    name: str
    text: str
    default: str  # what Enter means
    check: Callable[[str], Any]


def ask() -> dict[str, str | None]:
    """Answers by the names of the options; None where Enter was pressed. Ctrl-C and Ctrl-D leave."""
    say("A few questions; Enter accepts the default in brackets, Ctrl-C quits.")
    try:
        return {question.name: _answered(question) for question in QUESTIONS}
    except EOFError:
        say("")
        raise KeyboardInterrupt from None


def _answered(question: Question) -> str | None:
    while True:
        answer = input(f"{question.text} [{question.default}] ").strip()
        if answer.lower() in ("", question.default):
            return None
        try:
            question.check(answer)
        except AmpwiseError as error:
            say("  {}", error)
        else:
            return answer


def _one_of(kind: str, known: tuple[str, ...]) -> Callable[[str], Any]:
    def check(answer: str) -> None:
        if answer.lower() not in known:
            raise UnknownName(kind, answer, known, listing=f"Choose one of {', '.join(known)}.")

    return check


def _gpu(answer: str) -> None:
    if answer.lower() != "cpu" and target_for_capability(answer) is None:
        gpu_named(answer)


QUESTIONS = (
    Question(
        "gpu", "Which device? A name of `ampwise gpu --list`, a compute capability, or cpu.", "this machine", _gpu
    ),
    Question("params", "How many parameters? 124M, 7B, …", "unknown", parse_count),
    Question("arch", f"What kind of model? {', '.join(KINDS)}", "unknown", _one_of("kind of model", tuple(KINDS))),
    Question("want", f"Which precision do you plan to use? {', '.join(WANTED)}", "none", _one_of("precision", WANTED)),
    Question("symptom", f"What goes wrong? {', '.join(SYMPTOMS)}", "nothing", _one_of("symptom", tuple(SYMPTOMS))),
)
