"""The skill of `ampwise skill`: what an agent should know, with every fact taken from the code's own data.

``CORE`` is the prose of SKILL.md, which an agent reads whenever the skill applies; ``TOPICS`` are files that it reads
on demand. Numbers, codes and commands are slots in the prose, so that none can be wrong: ``slots`` fills them from
formats, rules and commands, and ``sections`` makes the lists and tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ampwise.finding import Finding, Rule, Severity
from ampwise.finding.registry import built_in_rules, found_by
from ampwise.hardware import gpus
from ampwise.hardware.catalog import COMMON_FORMATS
from ampwise.hardware.target import target_for_gpu, unknown_target
from ampwise.numbers.formats import BLOCK_FORMATS, FORMATS, short_number
from ampwise.tune.advise.advice import LossScale
from ampwise.tune.advise.choice import PrecisionChoice
from ampwise.tune.advise.claims import IDEAS, objections
from ampwise.tune.advise.decide import decide
from ampwise.tune.advise.symptoms import SYMPTOMS

NAME = "mixed-precision"
# The commands that find pitfalls. Rules of other commands are part of an answer: about a measurement, a difference, an
# alignment or a guarded run, or to an excuse (see below).
FIND_PITFALLS = ("ampwise check", "ampwise run", "ampwise gpu", "ampwise replay")
TRAINED_IN = ("fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3fn")
# Precisions beyond autocast's; listed here, since importing the engine needs torch.
ENGINE_PRECISIONS = {"fp8": "fp8", "pure": "bf16-pure", "emulated": "emulate:mxfp8"}
ANYWHERE = unknown_target("any")
# In the core: the mistakes that users report most often, and that silently cost the most.
MATTER_MOST = (
    "clip-scaled-grads",
    "optimizer-step-bypasses-scaler",
    "fp16-no-scaler",
    "half-params-with-scaler",
    "pure-bf16-plain-optimizer",
    "half-mask-literal",
    "bceloss-autocast",
    "accum-not-normalised",
    "scaler-not-checkpointed",
    "bf16-without-tensor-cores",
)


@dataclass(frozen=True, slots=True)
class Topic:
    """A file that an agent reads on demand."""

    when: str  # it should be read
    text: str  # with slots
    codes: tuple[str, ...] = ()  # the rules it lists: how their codes begin


def skill_files(commands: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of the skill by path, SKILL.md first, given the commands, each with what it does."""
    filled = slots(commands) | sections(commands)
    texts = {"SKILL.md": CORE.format_map(filled)}
    for name, topic in TOPICS.items():
        listed = f"\n## Mistakes\n\n{_pitfalls(topic.codes)}\n" if topic.codes else ""
        texts[f"references/{name}.md"] = f"{topic.text.format_map(filled)}{listed}\n{FOOTER.format_map(filled)}"
    return texts


def slots(commands: Iterable[str]) -> dict[str, str]:
    """Return the text of each slot in the prose; ValueError if two have the same name."""
    scale = LossScale()
    pairs = [(name, name.upper()) for name in COMMON_FORMATS]
    for fmt in FORMATS.values():
        pairs += [
            (fmt.name, fmt.title),
            (f"{fmt.name}_dtype", fmt.torch_dtype or fmt.name),
            (f"{fmt.name}_max", short_number(fmt.max)),
            (f"{fmt.name}_bits", str(fmt.mantissa_bits + 1)),
            (f"{fmt.name}_normal", short_number(fmt.smallest_normal)),
        ]
        if fmt.flush_exponent is not None:
            pairs.append((f"{fmt.name}_zero", f"2^{fmt.flush_exponent}"))
    pairs += [(f"run_{name}", f"`ampwise {name}`") for name in commands]
    pairs += [(rule.name.replace("-", "_"), rule.code) for rule in built_in_rules()]
    pairs += [("scale_start", short_number(scale.init_scale)), ("scale_interval", str(scale.growth_interval))]
    for name, precision in ENGINE_PRECISIONS.items():
        pairs.append((f"engine_{name}", f'`ampwise.Engine(model, optimizer, "{precision}")`'))
    found: dict[str, str] = {}
    for name, text in pairs:
        if found.setdefault(name, text) != text:
            raise ValueError(f"two slots are called {name}")
    return found


def sections(commands: Mapping[str, str]) -> dict[str, str]:
    """Return the lists, tables and code of the skill, by the name of their slot."""
    anywhere = decide(PrecisionChoice(target=ANYWHERE))
    by_precision: dict[str, list[str]] = {}  # what `ampwise advise --gpu` recommends
    for gpu in gpus():
        by_precision.setdefault(decide(PrecisionChoice(target=target_for_gpu(gpu))).precision, []).append(gpu.id)
    return {
        "all_commands": _table(
            ("command", "what it does"), ((f"`ampwise {name}`", what) for name, what in commands.items())
        ),
        "all_symptoms": "; ".join(SYMPTOMS.values()),
        "all_devices": _table(
            ("train in", "on"), ((FORMATS[name].title, ", ".join(ids)) for name, ids in by_precision.items())
        ),
        "all_with_fp8": ", ".join(gpu.id for gpu in gpus() if gpu.has_tensor_cores("fp8")),
        "all_formats": _formats(),
        "all_blocks": _items(
            f"{fmt.title}: {fmt.block_size} values of {fmt.element.title} share a scale; since {fmt.since}. "
            f"{fmt.training}"
            for fmt in BLOCK_FORMATS.values()
        ),
        "all_with_torch": anywhere.by_hand.rstrip(),
        "all_with_engine": anywhere.with_engine.rstrip(),
        "all_topics": _table(
            ("read", "when"), ((f"[{name}](references/{name}.md)", topic.when) for name, topic in TOPICS.items())
        ),
        "all_that_matter": _items(
            _pitfall(rule) for name in MATTER_MOST for rule in built_in_rules() if rule.name == name
        ),
        "all_excuses": _excuses(),
        **{f"when_{symptom.replace('-', '_')}": _triage(symptom) for symptom in SYMPTOMS},
    }


def _formats() -> str:
    rows = []
    for fmt in map(FORMATS.__getitem__, TRAINED_IN):
        figures = map(short_number, (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.epsilon))
        cells = (fmt.title, *figures, "yes" if fmt.needs_loss_scale else "no", fmt.since, fmt.training)
        rows.append([cell.replace("|", "\\|") for cell in cells])
    heads = ("format", "largest", "smallest normal", "smallest subnormal", "epsilon", "needs scaling", "since", "")
    return _table(heads, rows)


def _pitfalls(codes: tuple[str, ...]) -> str:
    """Return the rules about correctness or speed whose codes begin so, under the command that finds them."""
    by_command: dict[str, list[str]] = {}
    for rule in built_in_rules():
        command = next((command for command in found_by(rule) if command in FIND_PITFALLS), None)
        if command and rule.code.startswith(codes) and rule.severity is not Severity.INFO and rule.on_by_default:
            by_command.setdefault(command, []).append(_pitfall(rule))
    return "\n\n".join(f"Found by `{command}`:\n\n{_items(lines)}" for command, lines in by_command.items())


def _pitfall(rule: Rule) -> str:
    return f"{rule.code} {rule.name}: {rule.summary} Fix: {_in_short(rule.fix, rule)}"


def _triage(symptom: str) -> str:
    steps = decide(PrecisionChoice(target=ANYWHERE, symptom=symptom)).triage
    lines = [f"`{step.command}`: {step.tells}" if step.command else step.tells for step in steps]
    numbered = "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
    said = SYMPTOMS[symptom]
    return f"## {said[0].upper()}{said[1:]}\n\n`ampwise advise --symptom {symptom}`\n\n{numbered}"


def _excuses() -> str:
    """Return what people propose and what the rules answer, with proposals that get the same answer together.

    The answers are for any device or, if there are none, for a device that has FP16 and no BF16.
    """
    old = next(gpu for gpu in gpus() if gpu.has_tensor_cores("fp16") and gpu.has_tensor_cores("bf16") is False)
    excuses: dict[str, list[str]] = {}
    answers: dict[str, Finding] = {}
    for idea, said in IDEAS.items():
        targets = (ANYWHERE, target_for_gpu(old))
        found = (objections(PrecisionChoice(target=target, ideas=(idea,))) for target in targets)
        for finding in next((each for each in found if each), ()):
            excuses.setdefault(finding.message, []).append(f'"{said}"')
            answers[finding.message] = finding
    lines = []
    for message, finding in answers.items():
        command = finding.evidence["to_know"]["command"].replace(", then ", "`, then `")
        answer = f"{message}. {_in_short(finding.fix, finding.rule)} Prove it: `{command}` ({finding.rule.code})."
        lines.append(f"{' / '.join(excuses[message])}: {answer}")
    return _items(lines)


def _in_short(fix: str, rule: Rule) -> str:
    """Return the first sentence of a fix or, if the fix is code, the command that shows it."""
    text = fix.strip()
    return f"`ampwise explain {rule.code}`." if "\n" in text else f"{text.partition('. ')[0].rstrip('.')}."


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(heads)}", *lines[1:]])


def _items(texts: Iterable[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)


FOOTER = "Generated by {run_skill} from the rules, formats and devices that ampwise checks with; do not edit.\n"

CORE = (
    """\
---
name: mixed-precision
description: >-
  Use for PyTorch training in {fp16}, {bf16}, TensorFloat or narrower formats: to review or write a loop with autocast
  or GradScaler, to choose a precision for a GPU, to find where NaN or inf comes from, why training is not faster or
  takes as much memory, or before saying that a precision is safe. Each claim is proved with an ampwise command.
---

# Mixed precision in PyTorch

Most mistakes here raise no error: the model only trains worse, or slower. So do not argue from memory. Run the command
that a line names on the user's own script, device or run, and report what it says.

## When to use

- A script has autocast, a GradScaler, `.half()`, `.{bf16_dtype}()`, switches for {tf32}, or {fp8} layers.
- Somebody asks which precision, which GPU, how much faster, or how much memory.
- Something is wrong: {all_symptoms}.
- You are about to say that a precision is faster, safe or to blame.

Not for quantized inference, and not for problems that precision does not cause: if a step is bad in {fp32}, too, look
at the data, the learning rate and the loss.

## Which command answers

| question | command |
|---|---|
| is this script right? can it be fixed? | {run_check}, with `--diff` or `--fix` |
| what does this code mean? | {run_explain} |
| what goes wrong while it trains? | {run_run}, then {run_report} |
| where did the NaN come from? | {run_run} with `--capsule`, then {run_replay} |
| which precision on this device, for this model? | {run_gpu}, {run_advise} |
| how much faster is it? | {run_bench} |
| how much memory does it take? | {run_memory} |
| where do two precisions differ, and what must stay wide? | {run_diff}, {run_search} |
| what can a format hold? | {run_formats} |
| which checkpoint will it resume from? | {run_checkpoints} |

Commands that run a script, or take a `make` function or a capsule, load the user's code; the others only read, and
write only what `--fix` or `-o` request. Most have `--json`.

## The mistakes that matter most

{all_that_matter}

`ampwise explain CODE` shows the reason, and bad and good code.

## Rules for you

- The device first ({run_gpu}), then the model ({run_advise}, {run_memory}), then the script ({run_check}, {run_run}),
  then the clock ({run_bench}).
- {fp16} needs a loss scale, {bf16} does not; weights stay in {fp32} in both. Autocast shrinks saved activations only
  ({memory_wont_halve}).
- Do not switch autocast off because of a NaN that nobody has located ({autocast_off_as_a_cure}).
- Do not promise a speedup or halved memory without {run_bench} or {run_memory} ({gain_not_measured}).
- Do not call something fixed because it no longer raises: say which command was run, and what it reported.

## Topics

{all_topics}

{run_skill} followed by a topic's name prints it.

"""
    + FOOTER
)

TOPICS = {
    "step": Topic(
        "you write or review a training step: its order, the scaler, clipping, accumulation, the scheduler",
        """\
# A correct step

With torch alone:

```python
{all_with_torch}
```

The same with ampwise, which handles unscaling, clipping, accumulation, skipped steps and ranks:

```python
{all_with_engine}
```

torch's scale starts at {scale_start}, halves when gradients overflow, and doubles after {scale_interval} clean steps.
The first overflows are how it finds its level; they are not a problem. `from ampwise import GradScaler` adds a floor.
""",
        codes=("AMP1",),
    ),
    "formats": Topic(
        "you need a format's range and precision, or which dtype goes with which scaler, optimizer and API",
        """\
# What the formats hold

{fp16} has {fp16_bits} significant bits and ends at {fp16_max}; values at or below {fp16_zero} round to zero, so it
needs a loss scale. {bf16} has the range of {fp32} and {bf16_bits} bits: no loss scale, and weights stay in {fp32}
(except with {engine_pure}). {tf32} is for matmuls of {fp32} tensors, and saves no memory.

{all_formats}

There are two smallest numbers: below the smallest normal a value loses bits, at or below half the smallest subnormal it
is zero. {run_formats} shows more.
""",
        codes=("AMP3",),
    ),
    "gpus": Topic(
        "you choose a precision for a device",
        """\
# Which precision on which device

- The device first: {run_gpu}. A format without tensor cores gains nothing, whoever recommends it
  ({bf16_without_tensor_cores}, {format_without_tensor_cores}). What torch reports as supported may be emulated.
- Then the model: {run_advise} with `--params` and `--arch`, and {run_memory}. Autocast shrinks only saved activations;
  weights, gradients and the optimizer's state stay as they are ({memory_wont_halve}).
- Then the script: {run_check} before it runs, {run_run} while it does, {run_report} after.
- Then the clock: {run_bench} times whole steps in each precision and says why when little is gained. No number from a
  datasheet or from another model takes its place ({gain_not_measured}).
- What must stay in a wide format: {run_diff} shows where two precisions diverge, {run_search} finds the cheapest policy
  within a tolerance, also for formats that this machine does not have.

What {run_advise} recommends:

{all_devices}
""",
        codes=("AMP7",),
    ),
    "fp8": Topic(
        "FP8 or a block format (MX, NVFP) is proposed",
        """\
# {fp8} and block formats

These have tensor cores for {fp8}: {all_with_fp8}. On NVIDIA's, {engine_fp8} trains in it. That is no reason to use it:
only large models gain ({fp8_gains_little}), so time it against compiled {bf16} with {run_bench}. Training in block
formats is experimental ({format_not_ready}); {engine_emulated} emulates how a model would learn in one, on any device
including the CPU, but says nothing about speed.

{all_blocks}
""",
    ),
    "nan": Topic(
        "the loss is NaN or inf, or dtypes do not match",
        """\
# Where a NaN comes from

Do these in order, and stop at the one that finds the cause. A fix without a known cause costs more time than it saves.

{when_nan}

{when_mismatch}
""",
        codes=("AMP4", "AMP9"),
    ),
    "gradients": Topic(
        "the scale falls, steps are skipped, the loss jumps or plateaus, or the result is worse than in FP32",
        """\
# Gradients and the loss scale

Do these in order, and stop at the one that finds the cause.

{when_scale_collapse}

{when_skipped}

{when_underflow}

{when_spikes}

{when_worse}
""",
        codes=("AMP6",),
    ),
    "speed": Topic(
        "it is not faster, or takes as much memory as before",
        """\
# Speed and memory

{when_slow}

{when_memory}
""",
        codes=("AMP5",),
    ),
    "checkpoints": Topic(
        "the scaler's state, accumulation over micro-batches, several ranks, or resuming a run",
        """\
# State that must last

{run_checkpoints} shows which checkpoint a run would resume from, and why not from a newer one. The scaler's state goes
into the checkpoint ({scaler_not_checkpointed}), one scaler lasts the whole run ({scaler_recreated}), and each process
makes its own ({shared_scaler}). `ampwise.Guard(engine, "checkpoints")` writes checkpoints, and rolls back after bad
steps.
""",
        codes=("AMP2", "AMP8"),
    ),
    "claims": Topic(
        "somebody proposes a shortcut, or you are about to claim something",
        """\
# Red flags and excuses

Stop when you are about to:

- switch autocast off, or change the precision, because of a NaN that nobody has located ({autocast_off_as_a_cure});
  {run_replay} names the operation, and usually one module in {fp32} is enough;
- recommend a precision for being newer, or because somebody senior did ({precision_by_reputation}); {run_advise} with
  `--gpu` and `--want` says yes or no, with reasons;
- clip, log or compare gradients between backward and `unscale_` ({clip_scaled_grads}, {grad_inspect_before_unscale});
  {run_check} finds it;
- multiply the loss by a constant instead of using a scaler ({manual_loss_scale}), or tune the scaler's settings before
  looking at a run ({scale_tuned_blind}); {run_run} shows the scale over time;
- take zeros in gradients for underflow ({zeros_taken_for_underflow}): what counts is what the format loses at the
  current scale, which {run_run} counts ({gradient_underflow});
- cast a whole model to half to save memory ({pure_bf16_plain_optimizer}, {half_params_with_scaler}): updates get lost
  ({lost_updates}) unless the rounding keeps them, as {engine_pure} does; {run_memory} shows what would shrink;
- promise a speedup or halved memory without {run_bench} or {run_memory};
- leave accumulation, clipping, the scheduler or several ranks for later ({simplified_step}): each breaks silently;
  {run_check} finds it;
- call something fixed because it no longer raises: name the command and its output.

## Excuses, and what to answer

Time pressure, authority and complexity are not evidence. `ampwise advise --idea NAME` gives these answers for a device.

{all_excuses}
""",
    ),
    "commands": Topic(
        "you look for a command",
        """\
# The commands

All of them have `--help`; most have `--json`.

{all_commands}
""",
    ),
}
"""The topics by name, in the order in which the core lists them."""
