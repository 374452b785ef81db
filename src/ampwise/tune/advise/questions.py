"""The questions on a terminal: few, each with a default, asked again when the answer makes no sense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ampwise.errors import AmpwiseError, UnknownName
from ampwise.evidence.choice.choice import WANTED
from ampwise.evidence.choice.ideas import SYMPTOMS
from ampwise.evidence.choice.model import KINDS, parse_count
from ampwise.evidence.choice.target import of_capability
from ampwise.hardware.catalog import gpu_named
from ampwise.printers.terminal import say

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
    say("A few questions; Enter takes what is in brackets, Ctrl-C leaves.")
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
            raise UnknownName(kind, answer, known, listing=f"There are {', '.join(known)}.")

    return check


def _gpu(answer: str) -> None:
    if answer.lower() != "cpu" and of_capability(answer) is None:
        gpu_named(answer)


QUESTIONS = (
    Question(
        "gpu", "Which device? A name of `ampwise gpu --list`, a compute capability, or cpu.", "this machine", _gpu
    ),
    Question("params", "How many parameters? 124M, 7B, …", "not known", parse_count),
    Question("arch", f"What kind of model? {', '.join(KINDS)}", "not known", _one_of("kind of model", tuple(KINDS))),
    Question("want", f"Which precision do you have in mind? {', '.join(WANTED)}", "none", _one_of("precision", WANTED)),
    Question("symptom", f"What goes wrong? {', '.join(SYMPTOMS)}", "nothing", _one_of("symptom", tuple(SYMPTOMS))),
)
