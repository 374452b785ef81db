"""What a file is called tells nothing about what is in it."""

from pathlib import Path

import pytest

from ampwise.check.source.project import Project
from ampwise.finding.registry import source_rules

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.py"))
MISLEADING = "grad_scaler/upscale_bf16_fp16_half/train_epoch_step_iter_skip_accum.py"


def lines_found(text, path):
    code = Project([path], {path: text}).code(path)
    return {(found.rule.code, found.place.line) for module in source_rules() for found in module.check_source(code)}


@pytest.mark.few_by_day(4)
@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.stem)
def test_findings_are_the_same_under_another_name(fixture):
    text = fixture.read_text()
    assert lines_found(text, MISLEADING) == lines_found(text, "a.py")
