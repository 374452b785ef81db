"""Messages of the library: through logging where the program has configured it, else on stderr."""

import ast
import logging
from pathlib import Path

import pytest
import torch

import ampwise
from ampwise.finding import log as logs
from ampwise.finding.log import log
from ampwise.hardware.cpu import Cpu
from ampwise.report.printers import log_findings
from ampwise.train.precision import precision as precisions

SOURCE = Path(ampwise.__file__).parent
# What writes itself: commands, what runs a script for one, what shows a page or a notebook; and warnings of torch's own
# kind, in the class that replaces torch's.
ALLOWED = {
    "print": set(),
    "say": {"cli", "watch/script.py", "watch/watched_run.py", "integrations/mcp_worker.py", "report/live",
            "tune/bench", "tune/search", "finding"},
    "warnings.warn": {"train/scaler"},
}  # fmt: skip


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append((record.levelname, record.getMessage()))


@pytest.fixture
def kept():
    handler, logger = Kept(), logging.getLogger("ampwise")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def finding():
    place = ampwise.finding.registry.find_rule("AMP101").at
    return place(ampwise.finding.Place(file="nowhere\x1b.py", line=3), "clipped")


def test_a_program_that_configured_logging_gets_records(kept, capsys):
    log("warning", "{} is bad", "x\n\x1b[2J")
    log("info", "fine")
    log_findings([finding()])
    assert capsys.readouterr() == ("", "")
    assert kept.said[:2] == [("WARNING", r"x\n\x1b[2J is bad"), ("INFO", "fine")]
    level, text = kept.said[2]
    assert (level, text.isprintable(), "AMP101" in text, "\x1b" in text) == ("WARNING", False, True, False)


def test_others_read_them_on_stderr_unless_the_level_says_no(capsys):
    log("info", "{}", "fine")
    logging.getLogger("ampwise").setLevel(logging.ERROR)
    try:
        log("warning", "not this")
        log_findings([finding()])
        log("error", "but this")
    finally:
        logging.getLogger("ampwise").setLevel(logging.NOTSET)
    assert capsys.readouterr() == ("", "ampwise: fine\nampwise: but this\n")


@pytest.mark.parametrize(
    ("features", "slow"),
    [
        ((), {"bf16", "fp16", "bf16-pure"}),
        (("avx512_bf16",), {"fp16"}),
        (("amx_bf16", "amx_fp16"), set()),
        (None, set()),
    ],
)
def test_a_cpu_without_the_instructions_is_warned_of_once(monkeypatch, kept, features, slow):
    monkeypatch.setattr(precisions, "describe_cpu", lambda: Cpu(model="Some CPU", features=features))
    for precision in ("bf16", "fp16", "bf16-pure", "fp32", "emulate:e4m3"):
        monkeypatch.setattr(logs, "_SAID", set())
        kept.said.clear()
        for _ in range(2):
            model = torch.nn.Linear(2, 1)
            ampwise.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
        if precision not in slow:
            assert kept.said == []
            continue
        ((level, text),) = kept.said
        title = precision[:4].upper()
        assert (level, text.partition(": ")[0]) == ("WARNING", f"Some CPU has no {title} matmul instructions")
        assert "Use precision='auto' or 'fp32'" in text


def test_what_auto_chooses_is_a_warning_if_it_is_fp32(monkeypatch, kept):
    model = torch.nn.Linear(2, 1)
    for features in (("amx_bf16",), ()):
        monkeypatch.setattr(precisions, "describe_cpu", lambda features=features: Cpu(model="C", features=features))
        ampwise.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [(level, text[:9]) for level, text in kept.said] == [("INFO", "bf16 on C"), ("WARNING", "fp32 on C")]


def test_nothing_but_commands_writes_by_itself():
    found = {name: [] for name in ALLOWED}
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        names = [name for name in ALLOWED if f"{name.rpartition('.')[2]}(" in text]
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)] if names else []
        for name in names:
            if any(ast.unparse(call.func) == name for call in calls):
                found[name].append(path.relative_to(SOURCE).as_posix())
    for name, files in found.items():
        assert files or not ALLOWED[name], f"nothing calls {name}"
        assert [each for each in files if not each.startswith(tuple(ALLOWED[name]))] == [], name
