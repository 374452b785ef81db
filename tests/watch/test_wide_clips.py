"""Clips by a norm that includes gradients of a parameter that no optimizer has."""

import runpy

import pytest

from ampwise.report.verdict import worst_first
from ampwise.runs.findings_json import findings_data, read_findings
from ampwise.runs.rows import fold_consequences
from ampwise.watch.watch import Watch

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.temperature = nn.Linear(8, 4), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.head(x) * self.temperature


model = Net()
trained = PARAMETERS
optimizer = torch.optim.AdamW(trained, lr=1e-3)
scaler = torch.amp.GradScaler("cpu", enabled=SCALED)
x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
for step in range(60):
    ZERO.zero_grad()
    p = model(x).softmax(1).gather(1, y[:, None])
    if step in BAD:
        p = p * 0
    scaler.scale(-torch.log(p).mean()).backward()
    UNSCALE
    nn.utils.clip_grad_norm_(CLIPPED, 1e-2)
    scaler.step(optimizer)
    scaler.update()
"""
USUAL = {
    "PARAMETERS": "model.head.parameters()",
    "SCALED": "True",
    "ZERO": "optimizer",
    "BAD": "()",
    "UNSCALE": "scaler.unscale_(optimizer)",
    "CLIPPED": "model.parameters()",
}


@pytest.fixture
def findings_of(tmp_path):
    """Return the findings of the script with some words replaced, as a report shows them: by code, worst first."""

    def run(**changes):
        text = SCRIPT
        for word, code in {**USUAL, **changes}.items():
            text = text.replace(word, code)
        path = tmp_path / "train.py"
        path.write_text(text)
        with Watch(every=1) as watch:
            runpy.run_path(str(path))
        assert not watch.failures
        stored, trouble = read_findings(findings_data(watch.findings))
        assert not trouble
        return {one.finding.rule.code: one for one in fold_consequences(worst_first(stored))}

    return run


def consequences(found):
    return [each.finding.rule.code for each in found.consequences]


@pytest.mark.parametrize("unscale", ["pass", "scaler.unscale_(optimizer)"])
def test_a_nan_that_the_clip_keeps_alive_is_the_cause_of_what_follows(unscale, findings_of):
    found = findings_of(BAD="(30,)", UNSCALE=unscale)
    assert next(iter(found)) == "AMP620"
    cause = found["AMP620"]
    assert cause.finding.severity == "error"
    said = "its gradient is never zeroed nor unscaled, and is part of the norm that you clip at train.py:"
    assert said in cause.finding.message
    assert "not finite since step 31" in cause.finding.message
    assert cause.finding.place.parameter == "Net.temperature"
    assert "AMP607" in consequences(cause)
    assert "AMP607" not in consequences(found["AMP918"])


def test_a_loss_that_stays_bad_explains_the_skipped_steps(findings_of):
    found = findings_of(PARAMETERS="model.parameters()", BAD="range(30, 60)")
    assert "AMP607" in consequences(found["AMP918"])
    assert "AMP620" not in found


def test_a_scale_that_falls_after_the_loss_was_finite_again_is_not_blamed_on_it(findings_of):
    never = "(optimizer if step < 20 else nn.Linear(1, 1))"  # the gradients stay, and all parameters are trained
    found = findings_of(PARAMETERS="model.parameters()", BAD="(30,)", ZERO=never)
    assert "though the loss was finite in 29 of these steps" in found["AMP607"].finding.message


def test_scaled_gradients_that_add_up_make_the_clip_too_hard(findings_of):
    cause = findings_of()["AMP620"].finding
    assert cause.severity == "error"
    assert "never zeroed nor unscaled" in cause.message
    low, _, rest = cause.message.partition(": effective clip ")[2].partition(" to ")
    high, _, limit = rest.partition(" instead of ")
    assert float(low) < float(high) < float(limit) == 0.01


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({"CLIPPED": "model.head.parameters()"}, "warning"),  # the clip leaves it out
        ({"ZERO": "model", "SCALED": "False", "UNSCALE": "pass"}, "warning"),  # cleared with the others
        ({"PARAMETERS": "model.parameters()"}, None),
    ],
)
def test_what_does_no_harm_to_the_clip_is_no_error(changes, severity, findings_of):
    found = findings_of(**changes)
    assert (str(found["AMP620"].finding.severity) if "AMP620" in found else None) == severity
    assert all("never" not in one.finding.message for one in found.values())
