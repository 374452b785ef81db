"""The parts of the skill that are records and nothing else: verbs, devices, formats, code, rules, triage, excuses."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from ampwise.cli import verbs
from ampwise.cli.formats import number
from ampwise.evidence.choice.choice import Choice
from ampwise.evidence.choice.ideas import IDEAS, SYMPTOMS
from ampwise.evidence.choice.target import Target, of_gpu, unknown
from ampwise.finding import Finding, Rule, Severity
from ampwise.formats import BLOCK_FORMATS, FORMATS
from ampwise.hardware import gpus
from ampwise.rules import built_in
from ampwise.rules.judging import judged
from ampwise.tune.advise.deciding import decide

__all__ = ["PROVED_BY", "SECTIONS"]

# Which verb shows that a rule is broken, by the rule's room. Those of the other rooms come with an answer that the user
# asked for: what a measurement, a difference or an alignment is worth, what a guarded run did, and excuses (see below).
PROVED_BY = {
    "source": "check",
    "step": "run",
    "gradient": "run",
    "float8": "run",
    "time": "run",
    "hardware": "gpu",
    "op": "replay",
}
TRAINED_IN = ("fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3fn")
ANYWHERE = unknown("any")


def _verbs() -> str:
    lines = [f"| `ampwise {verb}` | {_summary(verb)} |" for verb in verbs()]
    return _table(("verb", "what it tells"), lines)


def _summary(verb: str) -> str:
    return str(importlib.import_module(f"ampwise.cli.{verb}").__doc__).strip().partition("\n")[0].rstrip(".")


def _symptoms() -> str:
    return "; ".join(SYMPTOMS.values())


def _devices() -> str:
    """What `ampwise advise --gpu` says of each device of the catalog when nothing else is known."""
    by_precision: dict[str, list[str]] = {}
    for gpu in gpus():
        by_precision.setdefault(decide(Choice(target=of_gpu(gpu))).precision, []).append(gpu.id)
    lines = [f"| {FORMATS[name].title} | {', '.join(ids)} |" for name, ids in by_precision.items()]
    return _table(("train in", "on"), lines)


def _with_fp8() -> str:
    return ", ".join(gpu.id for gpu in gpus() if gpu.has_matrix_units("fp8"))


def _formats() -> str:
    lines = []
    for name in TRAINED_IN:
        fmt = FORMATS[name]
        figures = (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.epsilon)
        cells = [fmt.title, *map(number, figures), "yes" if fmt.needs_loss_scale else "no", fmt.since, fmt.training]
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    heads = ("format", "largest", "smallest normal", "smallest subnormal", "epsilon", "needs scaling", "since", "")
    return _table(heads, lines)


def _blocks() -> str:
    return _items(
        f"{fmt.title}: {fmt.block_size} values of {fmt.element.title} share a scale; since {fmt.since}. {fmt.training}"
        for fmt in BLOCK_FORMATS.values()
    )


def _by_hand() -> str:
    return decide(Choice(target=ANYWHERE)).by_hand.rstrip()


def _with_engine() -> str:
    return decide(Choice(target=ANYWHERE)).with_engine.rstrip()


def _pitfalls() -> str:
    """The rules that cost correctness or speed, under the verb that finds them."""
    by_verb: dict[str, list[Rule]] = {}
    for entry in built_in():
        verb, rule = PROVED_BY.get(entry.room), entry.rule
        if verb and rule.severity is not Severity.INFO and rule.on_by_default:
            by_verb.setdefault(verb, []).append(rule)
    parts = []
    for verb, rules in by_verb.items():
        once = {rule.code: rule for rule in rules}
        parts.append(f"### Found by `ampwise {verb}`\n\n{_items(map(_pitfall, once.values()))}")
    return "\n\n".join(parts)


def _pitfall(rule: Rule) -> str:
    return f"{rule.code} {rule.name}: {rule.summary} Fix: {_in_short(rule.fix, rule)}"


def _in_short(fix: str, rule: Rule) -> str:
    """The first sentence; where that is code, the way to it."""
    text = fix.strip()
    return f"`ampwise explain {rule.code}`." if "\n" in text else f"{text.partition('. ')[0].rstrip('.')}."


def _triage() -> str:
    parts = []
    for symptom, said in SYMPTOMS.items():
        steps = decide(Choice(target=ANYWHERE, symptom=symptom)).triage
        lines = [f"`{step.command}`: {step.tells}" if step.command else step.tells for step in steps]
        numbered = "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
        parts.append(f"### {said[0].upper()}{said[1:]} (`ampwise advise --symptom {symptom}`)\n\n{numbered}")
    return "\n\n".join(parts)


def _excuses() -> str:
    """What people propose, and what the rules answer; one answer to several is given once."""
    excuses: dict[str, list[str]] = {}
    answers: dict[str, Finding] = {}
    for idea, said in IDEAS.items():
        for finding in _answers(idea):
            excuses.setdefault(finding.message, []).append(said)
            answers[finding.message] = finding
    return _items(_excuse(excuses[message], finding) for message, finding in answers.items())


def _answers(idea: str) -> Sequence[Finding]:
    """Of any device; where the answer depends on the device, of one that has FP16 and no BF16."""
    old = next(gpu for gpu in gpus() if gpu.has_matrix_units("fp16") and gpu.has_matrix_units("bf16") is False)
    targets: tuple[Target, ...] = (ANYWHERE, of_gpu(old))
    found = (judged(Choice(target=target, ideas=(idea,)), "choice") for target in targets)
    return next((each for each in found if each), ())


def _excuse(said: Sequence[str], finding: Finding) -> str:
    quoted = " / ".join(f'"{text}"' for text in said)
    command = finding.evidence["to_know"]["command"].replace(", then ", "`, then `")
    code, fix = finding.rule.code, _in_short(finding.fix, finding.rule)
    return f"{quoted}: {finding.message}. {fix} Prove it: `{command}` ({code})."


def _table(heads: Sequence[str], lines: Iterable[str]) -> str:
    return "\n".join([f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *lines])


def _items(texts: Iterable[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _named() -> Iterator[tuple[str, Callable[[], str]]]:
    made = (_verbs, _symptoms, _devices, _with_fp8, _formats, _blocks, _by_hand, _with_engine)
    for make in (*made, _pitfalls, _triage, _excuses):
        yield f"all{make.__name__}", make


SECTIONS: dict[str, Callable[[], str]] = dict(_named())
