"""What an answer claims: statements that are true or false, and the patterns that recognize them in prose.

A pattern is a regular expression over one clause, in lower case, with two shorthands: ``{name}`` for an expression of
``[words]`` in data/statements.toml, and ``~`` for up to 60 characters of the same clause. A negation in or just before
the match turns its meaning round; a pattern that begins with ``=`` has its negation written out and is taken as it is.
What is quoted, asked, supposed, or said by somebody else is not claimed, unless it is refuted: then it is denied.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from evals.scenarios import DATA

PATTERNS = ("says", "denies", "anywhere")
GAP = r"[^.;|]{0,60}?"
NEGATION = re.compile(r"\b(?:not|no|never|neither|nor|cannot|without|nobody|nothing)\b|n't\b|\bdont\b|\bfar from\b")
NOT_NEGATION = re.compile(
    r"\bnot only\b|\bno doubt\b|\bno matter\b|^(?:no|nope)\s*[,:–—-]|\bnot just\b|\bno longer than\b"
)
WRONG = (
    r"(?:not (?:true|correct|right|the case|so)|n't (?:true|correct|right|the case|so)|untrue|false|wrong|"
    r"incorrect|mistaken|nonsense|a myth|a (?:common )?(?:misconception|mistake|error|misunderstanding)|misleading)"
)
REFUTED_BEFORE = re.compile(
    rf"(?:\b(?:it|that|this|they)(?:'s| is| are|) {WRONG}\b(?!\s*[:;,])|"
    r"^\W*(?:myth|wrong|false|misconception|mistake|❌)\b\W|❌|"
    r"\bcontrary to\b|\bdo(?:es)?(?: not|n't) (?:believe|mean|imply|follow)|\bnot mean\b|"
    r"\b(?:claim|idea|belief|advice|myth|misconception|slogan|statement) that\b)"
)
REFUTED_AFTER = re.compile(
    rf"^[\"”'*`)\s]*[^.,;]{{0,30}}?\b(?:is|are|was|would be|'s)(?: simply| just| plainly| also)? {WRONG}\b"
)
REFUTED_NEXT = re.compile(
    r"^\W*(?:but |however,? |sadly,? )?"
    rf"(?:(?:that|this|it|both|they|these|he|she|the claim)(?:'s| is| are|) (?:all |simply |just |plainly )?{WRONG}\b|"
    r"(?:wrong|false|incorrect|untrue|nonsense|not (?:so|true|quite|correct))\b|no[.,!]|"
    r"(?:he|she|they) (?:is|are) (?:wrong|mistaken))"
)
REPORTED = re.compile(
    r"\b(?:guides?|blogs?|posts?|colleagues?|engineers?|leads?|boss|seniors?|managers?|people|some|many|you|they|"
    r"tutorials?|forums?|articles?|others|slides?|vendor|everyone|somebody|someone)\b[^.]{0,40}?"
    r"\b(?:says?|said|claims?|claimed|believes?|thinks?|told|heard|read|suggests?|argues?|insists?|repeats?|quotes?)\b"
)
SUPPOSED = re.compile(r"\b(?:if|whether|suppose|supposing|unless|would|might|may)\b[^,]{0,40}$")
QUOTED = re.compile(r"[\"“](?P<inside>[^\"”]{12,}?)[\"”]")
CLAUSE = re.compile(
    r"(?:,\s+|\s+)(?:but|however|whereas|while|although|though|because|since|so|and then)\s+|[;:]\s+|\s[–—]\s|\s--?\s"
)
REFERS_BACK = re.compile(r"^\W*(?:it|they|this|that|these|those|so|hence|therefore|thus|there|instead|its|their)\b")
CODE_BLOCK = re.compile(
    r"^(?P<fence>```+|~~~+)[ \t]*(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^(?P=fence)[ \t]*$", re.M | re.S
)
SENTENCE_END = re.compile(r"(?<=[.!?])[\"”')*]*\s+|\n+")


class Pattern(NamedTuple):
    """An expression, and whether its negation is written out."""

    expression: re.Pattern[str]
    as_is: bool


class Side(NamedTuple):
    """That an answer asserts a statement, or denies it, and the sentence in which it does."""

    asserts: bool
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """Something that is said about mixed precision; ``see`` is where its truth is tested or explained."""

    name: str
    text: str
    true: bool
    see: str
    says: tuple[Pattern, ...]
    denies: tuple[Pattern, ...]
    anywhere: tuple[Pattern, ...]

    def sides(self, prose: str, *, asked: bool) -> list[Side]:
        """Return the sides that the prose takes; unless it was asked for, only by the patterns that hold anywhere."""
        readings = [(True, self.anywhere), *([(False, self.denies), (True, self.says)] if asked else [])]
        found = []
        sentences = list(_sentences(prose))
        for number, sentence in enumerate(sentences):
            following = sentences[number + 1] if number + 1 < len(sentences) else ""
            before = sentences[number - 1] if number and REFERS_BACK.search(sentence) else ""
            side = _side(readings, sentence, following)
            if side is None and before and not _ignored(before):
                side = _side(readings, f"{before.rstrip('.!? ')} {sentence}", following)
            if side is not None:
                found.append(Side(side, sentence.strip()))
        return found


def _side(readings: Sequence[tuple[bool, Sequence[Pattern]]], sentence: str, following: str) -> bool | None:
    for meaning, patterns in readings:
        for start, clause in _clauses(sentence):
            for expression, as_is in patterns:
                if (match := expression.search(clause)) is None:
                    continue
                refuted = _refuted(sentence, start + match.start(), start + match.end(), following)
                if refuted is not None:
                    return meaning ^ refuted ^ (not as_is and _negated(clause, match))
    return None


def _negated(clause: str, match: re.Match[str]) -> bool:
    words = " ".join(clause[: match.start()].split()[-4:])
    counted = re.sub(rf"{NOT_NEGATION.pattern}|{WRONG}", " ", f"{words} {match[0]}".strip())
    return len(NEGATION.findall(counted)) % 2 == 1


def _refuted(sentence: str, start: int, end: int, following: str) -> bool | None:
    """Return whether what is matched is refuted; None if it is neither claimed nor refuted."""
    before, after = sentence[:start], sentence[end:]
    if REFUTED_BEFORE.search(before) or REFUTED_AFTER.search(after) or REFUTED_NEXT.search(following):
        return True
    quoted = any(quote.start("inside") <= start and end <= quote.end("inside") for quote in QUOTED.finditer(sentence))
    doubtful = quoted or _ignored(sentence) or REPORTED.search(before) or SUPPOSED.search(before)
    return None if doubtful else False


def _ignored(sentence: str) -> bool:
    return sentence.rstrip(" *\"”').").endswith("?") or sentence.lstrip().startswith(">")


def _sentences(prose: str) -> Iterator[str]:
    """Yield sentences, list items and table rows, in lower case."""
    text = re.sub(r"[*_]{2}|(?<=\w)[‐‑](?=\w)", lambda found: "-" if found[0] in "‐‑" else "", prose.replace("’", "'"))
    for sentence in SENTENCE_END.split(text):
        if sentence and sentence.strip():
            quote = sentence.lstrip().startswith(">")
            plain = re.sub(r"^[\s>#*+-]+|^\s*\d+[.)]\s+", "", sentence.lower()).replace("`", "")
            yield f"> {plain}" if quote else plain


def _clauses(sentence: str) -> Iterator[tuple[int, str]]:
    """Yield the clauses of a sentence, each with its place."""
    start = 0
    for border in CLAUSE.finditer(sentence):
        yield start, sentence[start : border.start()]
        start = border.end()
    yield start, sentence[start:]


def prose_of(answer: str) -> str:
    """Return the answer without its code; comments in code are kept, as sentences."""

    def comments(block: re.Match[str]) -> str:
        found = re.findall(r"(?:^|\s)#\s*(\S.*)$", block["code"], re.MULTILINE)
        return "\n" + "\n".join(found) + "\n"

    return CODE_BLOCK.sub(comments, answer)


def code_blocks(answer: str) -> list[str]:
    """Return the Python blocks of an answer, and those without a language."""
    blocks = CODE_BLOCK.finditer(answer)
    python = ("python", "py", "python3", "")
    return [each["code"] for each in blocks if each["language"].lower() in python and each["code"].strip()]


@cache
def all_statements() -> dict[str, Statement]:
    """Return the statements by name."""
    data = tomllib.loads((DATA / "statements.toml").read_text(encoding="utf-8"))
    words = data.pop("words")
    return {
        name: Statement(
            name=name,
            text=row["text"],
            true=row["true"],
            see=row["see"],
            **{field: tuple(_pattern(text, words) for text in row.get(field, ())) for field in PATTERNS},
        )
        for name, row in data.items()
    }


@cache
def excuses() -> dict[str, re.Pattern[str]]:
    """Return the excuses that are counted, with their patterns."""
    data = tomllib.loads((DATA / "excuses.toml").read_text(encoding="utf-8"))
    return {said: re.compile("|".join(patterns)) for said, patterns in data["excuses"].items()}


def _pattern(text: str, words: dict[str, str]) -> Pattern:
    expression = text.removeprefix("=")
    for name, meaning in words.items():
        expression = expression.replace(f"{{{name}}}", f"(?:{meaning})")
    return Pattern(re.compile(expression.replace("~", GAP)), text.startswith("="))
