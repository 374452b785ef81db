"""The skill holds what the code checks: no number of its own, and no command or rule that is not there."""

from __future__ import annotations

import importlib
import re
import shlex
import string

import pytest

from ampwise.check.config import SettingsByFolder
from ampwise.check.linter import RuleSelection, check_text
from ampwise.cli import build_parser, commands, summaries
from ampwise.finding import Severity
from ampwise.finding.registry import built_in_rules, found_by
from ampwise.hardware import gpus
from ampwise.integrations.skill import CORE, FIND_PITFALLS, NAME, TOPICS, sections, skill_files, slots
from ampwise.numbers.formats import FORMATS, find_format
from ampwise.tune.advise import advise
from ampwise.tune.advise.claims import IDEAS
from ampwise.tune.advise.symptoms import SYMPTOMS

FILES = skill_files(summaries())
CORE_TEXT, TEXT = FILES["SKILL.md"], "\n".join(FILES.values())
PARTS = [part for text in (CORE, *(topic.text for topic in TOPICS.values())) for part in string.Formatter().parse(text)]
LITERAL = "".join(literal for literal, *_ in PARTS)
USED = [name for _, name, *_ in PARTS if name is not None]
COMMANDS = sorted(set(re.findall(r"`(ampwise [^`]+)`", TEXT)))
MOST_BYTES = 8_000  # of what every agent pays for
MOST_BYTES_OF_A_TOPIC = 14_000
NEEDED = {
    "explain": ["AMP101"],
    "replay": ["capsule"],
    **{name: ["train.py"] for name in ("init", "run")},
    **{name: ["RUN"] for name in ("report", "watch", "checkpoints")},
    **{name: ["train:make"] for name in ("align", "bench", "diff", "search")},
}


# --- the prose


def test_the_prose_has_no_number_and_names_no_rule():
    assert not re.search(r"\d", LITERAL)
    assert not re.search(
        r"AMP[A-Z0-9]|\b(one|two|three|four|five|ten|twice|hundred|thousand)\b (bits|steps|times|percent)", LITERAL
    )


def test_every_slot_is_a_record():
    made = set(sections(summaries()))
    assert made <= set(USED) <= set(slots(summaries())) | made, "a section is not shown, or a slot has no value"


def test_a_number_in_a_slot_is_the_formats_own():
    filled = slots(summaries())
    for name, fmt in FORMATS.items():
        if name != "fp64":  # whose largest, rounded to three digits, is none
            assert float(filled[f"{name}_max"]) == pytest.approx(fmt.max, rel=5e-3)
        if f"{name}_zero" in filled:
            assert filled[f"{name}_zero"] == f"2^{fmt.flush_exponent}"
    torch = pytest.importorskip("torch")
    scaler = torch.amp.GradScaler("cpu")
    assert float(filled["scale_start"]) == scaler._init_scale
    assert int(filled["scale_interval"]) == scaler.get_growth_interval()
    for name in ("fp16", "bf16", "fp32"):
        limits = torch.finfo(getattr(torch, FORMATS[name].torch_dtype))
        assert float(filled[f"{name}_max"]) == pytest.approx(limits.max, rel=5e-3)
        assert 2.0 ** (1 - int(filled[f"{name}_bits"])) == limits.eps


# --- what it names


def test_every_command_rule_and_device_it_names_is_there():
    codes = {rule.code for rule in built_in_rules()}
    assert set(re.findall(r"AMP\d+", TEXT)) <= codes
    assert set(re.findall(r"`ampwise ([a-z]+)", TEXT)) == set(commands())
    shown = TEXT.partition("| train in | on |")[2].partition("\n\n")[0]
    ids = [word.strip() for line in shown.splitlines() for word in line.split("|")[2:3] for word in word.split(",")]
    assert sorted(filter(None, ids)) == sorted([*(gpu.id for gpu in gpus()), "---"])


def test_every_command_can_be_given():
    for command in COMMANDS:
        words = shlex.split(command)[1:]
        parser = build_parser(words)
        module = importlib.import_module(f"ampwise.cli.{words[0]}")
        if all(word.startswith("-") for word in words[1:]):  # the command as such
            words += NEEDED.get(words[0], [])
        args, unknown = parser.parse_known_args(words)
        assert not unknown, command
        assert args.command is module, command


def test_the_devices_are_as_advise_says():
    for line in re.findall(r"^\| (FP32|FP16|BF16|TF32) \| ([a-z].*) \|$", TEXT, re.MULTILINE):
        precision, ids = find_format(line[0].lower()).name, line[1].split(", ")
        assert {advise(gpu=name).precision for name in ids} == {precision}


def test_every_precision_of_the_engine_is_one():
    pytest.importorskip("torch")
    from ampwise.train.precision.precision import EXTRA_PRECISIONS, precision_named

    named = set(re.findall(r'Engine\(model, optimizer, "([^"]+)"\)', TEXT))
    assert all(precision_named(name) for name in named)  # UnknownName otherwise
    # Whoever adds a precision has it told here, too.
    assert set(EXTRA_PRECISIONS) <= named
    assert any(name.startswith("emulate:") for name in named)


def test_every_symptom_and_excuse_is_answered():
    for symptom, said in SYMPTOMS.items():
        assert f"--symptom {symptom}`" in TEXT
        assert said in TEXT
    for idea, said in IDEAS.items():
        assert f'"{said}"' in TEXT, f"{idea} has no answer"


def test_every_pitfall_is_reported_once_with_the_command_that_shows_it():
    pitfalls = "".join(text.partition("\n## Mistakes\n")[2] for text in FILES.values())
    for rule in built_in_rules():
        told = pitfalls.count(f"- {rule.code} {rule.name}: ")
        is_found = bool(set(found_by(rule)) & set(FIND_PITFALLS))
        assert told == (is_found and rule.severity is not Severity.INFO and rule.on_by_default), rule.code
    assert set(FIND_PITFALLS) <= {f"ampwise {command}" for command in commands()}


def test_the_code_it_shows_is_clean():
    pieces = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(pieces) == 2
    for piece in pieces:
        report, _ = check_text(piece, "train.py", RuleSelection(SettingsByFolder(isolated=True)))
        assert not [finding for finding in report.findings if finding.severity is not Severity.INFO]


# --- the file


def test_the_front_matter_is_what_agents_read():
    yaml = pytest.importorskip("yaml")
    head = yaml.safe_load(CORE_TEXT.split("---\n")[1])
    assert set(head) == {"name", "description"}
    assert head["name"] == NAME
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", NAME)
    assert len(head["description"]) <= 1024


def test_the_core_leads_to_every_topic_and_back_to_none():
    links = re.findall(r"\]\((.*?)\)", CORE_TEXT)
    assert [*links] == [name for name in FILES if name != "SKILL.md"]
    assert not re.findall(r"\]\(.*?\)", TEXT.removeprefix(CORE_TEXT)), "a topic is one step away from the core"


def test_it_is_short_and_always_the_same():
    assert len(CORE_TEXT.encode()) <= MOST_BYTES
    assert max(len(text.encode()) for text in FILES.values()) <= MOST_BYTES_OF_A_TOPIC
    assert skill_files(summaries()) == FILES
    assert all(text.endswith("\n") for text in FILES.values())
    assert "{" not in re.sub(r"```.*?```|`[^`]*`", "", TEXT, flags=re.DOTALL)
