"""Sections of the skill that are made from data: commands, devices, formats, code, rules, triage, excuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ampwise.finding import Finding, Rule, Severity
from ampwise.hardware import gpus
from ampwise.hardware.target import Target, target_for_gpu, unknown_target
from ampwise.numbers.formats import BLOCK_FORMATS, FORMATS, short_number
from ampwise.rules import built_in_rules, found_by
from ampwise.tune.advise.choice import PrecisionChoice
from ampwise.tune.advise.claims import IDEAS, objections
from ampwise.tune.advise.decide import decide
from ampwise.tune.advise.symptoms import SYMPTOMS

__all__ = ["FIND_PITFALLS", "SECTIONS", "commands_table"]

# The commands that find pitfalls. Rules of other commands are part of an answer: about a measurement, a difference, an
# alignment or a guarded run, or to an excuse (see below).
FIND_PITFALLS = ("ampwise check", "ampwise run", "ampwise gpu", "ampwise replay")
TRAINED_IN = ("fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3fn")
ANYWHERE = unknown_target("any")


def commands_table(commands: Mapping[str, str]) -> str:
    """Return the table of the commands, given each with what it does."""
    return _table(("command", "what it does"), [f"| `ampwise {name}` | {what} |" for name, what in commands.items()])


def _symptoms() -> str:
    return "; ".join(SYMPTOMS.values())


def _devices() -> str:
    """Return what `ampwise advise --gpu` recommends for each device of the catalog."""
    by_precision: dict[str, list[str]] = {}
    for gpu in gpus():
        by_precision.setdefault(decide(PrecisionChoice(target=target_for_gpu(gpu))).precision, []).append(gpu.id)
    lines = [f"| {FORMATS[name].title} | {', '.join(ids)} |" for name, ids in by_precision.items()]
    return _table(("train in", "on"), lines)


def _with_fp8() -> str:
    return ", ".join(gpu.id for gpu in gpus() if gpu.has_tensor_cores("fp8"))


def _formats() -> str:
    lines = []
    for name in TRAINED_IN:
        fmt = FORMATS[name]
        figures = (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.epsilon)
        cells = [
            fmt.title,
            *map(short_number, figures),
            "yes" if fmt.needs_loss_scale else "no",
            fmt.since,
            fmt.training,
        ]
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    heads = ("format", "largest", "smallest normal", "smallest subnormal", "epsilon", "needs scaling", "since", "")
    return _table(heads, lines)


def _blocks() -> str:
    return _items(
        f"{fmt.title}: {fmt.block_size} values of {fmt.element.title} share a scale; since {fmt.since}. {fmt.training}"
        for fmt in BLOCK_FORMATS.values()
    )


def _with_torch() -> str:
    return decide(PrecisionChoice(target=ANYWHERE)).by_hand.rstrip()


def _with_engine() -> str:
    return decide(PrecisionChoice(target=ANYWHERE)).with_engine.rstrip()


def _pitfalls() -> str:
    """Return the rules about correctness or speed, under the command that finds them."""
    by_command: dict[str, list[Rule]] = {}
    for rule in built_in_rules():
        command = next((command for command in found_by(rule) if command in FIND_PITFALLS), None)
        if command and rule.severity is not Severity.INFO and rule.on_by_default:
            by_command.setdefault(command, []).append(rule)
    parts = []
    for command, rules in by_command.items():
        parts.append(f"### Found by `{command}`\n\n{_items(map(_pitfall, rules))}")
    return "\n\n".join(parts)


def _pitfall(rule: Rule) -> str:
    return f"{rule.code} {rule.name}: {rule.summary} Fix: {_in_short(rule.fix, rule)}"


def _in_short(fix: str, rule: Rule) -> str:
    """Return the first sentence of a fix or, if the fix is code, the command that shows it."""
    text = fix.strip()
    return f"`ampwise explain {rule.code}`." if "\n" in text else f"{text.partition('. ')[0].rstrip('.')}."


def _triage() -> str:
    parts = []
    for symptom, said in SYMPTOMS.items():
        steps = decide(PrecisionChoice(target=ANYWHERE, symptom=symptom)).triage
        lines = [f"`{step.command}`: {step.tells}" if step.command else step.tells for step in steps]
        numbered = "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
        parts.append(f"### {said[0].upper()}{said[1:]} (`ampwise advise --symptom {symptom}`)\n\n{numbered}")
    return "\n\n".join(parts)


def _excuses() -> str:
    """Return what people propose and what the rules answer, with proposals that get the same answer together."""
    excuses: dict[str, list[str]] = {}
    answers: dict[str, Finding] = {}
    for idea, said in IDEAS.items():
        for finding in _answers(idea):
            excuses.setdefault(finding.message, []).append(said)
            answers[finding.message] = finding
    return _items(_excuse(excuses[message], finding) for message, finding in answers.items())


def _answers(idea: str) -> Sequence[Finding]:
    """Return the answers for any device or, if there are none, for a device that has FP16 and no BF16."""
    old = next(gpu for gpu in gpus() if gpu.has_tensor_cores("fp16") and gpu.has_tensor_cores("bf16") is False)
    targets: tuple[Target, ...] = (ANYWHERE, target_for_gpu(old))
    found = (objections(PrecisionChoice(target=target, ideas=(idea,))) for target in targets)
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
    made = (_symptoms, _devices, _with_fp8, _formats, _blocks, _with_torch, _with_engine)
    for make in (*made, _pitfalls, _triage, _excuses):
        yield f"all{make.__name__}", make


SECTIONS: dict[str, Callable[[], str]] = dict(_named())
