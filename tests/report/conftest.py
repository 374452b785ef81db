"""Runs made by hand, as a record is read into."""

from pathlib import Path

import pytest

from ampwise.finding import Place, Rule, Severity
from ampwise.numbers.census.algebra import Census
from ampwise.runs.reader import Run
from ampwise.runs.rows import CountedFinding, LayerSample, StepBucket, StepRow

CLIP = Rule(
    code="AMP101",
    name="clip-scaled-grads",
    severity=Severity.ERROR,
    summary="Gradients are clipped while still scaled.",
    why="The threshold is 65536 times too small.",
    fix="Call scaler.unscale_(optimizer) before clipping.",
    bad="clip()",
    good="unscale(); clip()",
)
SAVE = Rule(
    code="AMP204",
    name="scaler-not-checkpointed",
    severity=Severity.WARNING,
    summary="A checkpoint lacks the scaler.",
    why="The scale starts over.",
    fix="Save scaler.state_dict() too.",
    bad="save()",
    good="save(scaler)",
)
LINES = [
    "    scaler.scale(loss).backward()",
    "    clip_grad_norm_(model.parameters(), 1.0)",
    "    scaler.step(optimizer)",
]


def steps(count, optimizer=0):
    """Skips at every fiftieth step, a NaN at step 7."""
    return [
        StepBucket.of(
            StepRow(
                optimizer=optimizer,
                step=step,
                loss=float("nan") if step == 7 else 4.0 / step,
                scale=65536.0 if step < 50 else 32768.0,
                norm=1.0 + (step % 10) / 10,
                skipped=step % 50 == 0,
                lr=1e-3,
            )
        )
        for step in range(1, count + 1)
    ]


def sample(step, layers, **other):
    return LayerSample(first=step, last=step, scale=65536.0, layers=layers, **other)


HEALTHY = Census(binades={-12: 60, -11: 30, -8: 10}, amax=2**-7.5, amin=2**-11.5, sum_squares=0.0025)
# Out of FP16 at a scale of 65536: nothing is below 2**-40, and what was there is among the zeros.
FADING = Census(
    binades={-41: 60, -40: 60, -39: 60, -38: 60, -37: 40, -20: 20},
    zeros=120,
    amax=2**-19.5,
    amin=2**-40,
    sum_squares=1e-10,
)
DEAD = Census(zeros=50)


@pytest.fixture
def rules():
    return {"clip": CLIP, "save": SAVE}


@pytest.fixture
def make_run():
    """A run of 120 steps with two findings; what is given replaces what it would be, in the manifest or the run."""

    def make(facts=None, manifest=None, **changed):
        clip = CountedFinding(
            finding=CLIP.at(
                Place(file="train.py", line=31),
                "`clip_grad_norm_` sees gradients multiplied by 65536",
                evidence={"norm": 1.52587890625e-05, "scale": 65536},
            ),
            count=120,
            first_step=1,
            last_step=120,
            ranks=[0],
            excerpt={"first_line": 30, "lines": LINES},
        )
        save = CountedFinding(
            finding=SAVE.at(Place(file="train.py", line=40), "The state of the scaler is not saved"), ranks=[0]
        )
        layers = {"head.weight": HEALTHY, "blocks.0.weight": FADING, "blocks.1.bias": DEAD}
        plain = {
            "folder": Path("runs/one"),
            "manifest": {
                "status": "finished",
                "script": "train.py",
                "command": ["train.py", "--epochs", "3"],
                "created": "2026-11-15T10:00:00Z",
                "finished": "2026-11-15T10:05:00Z",
                "exit_code": 0,
                "error": None,
                "environment": {"torch": "2.13.0", "gpu": {"name": "H200", "count": 1}},
                "facts": {
                    "steps": 120,
                    "precision": "fp16",
                    "what_was_fine": ["Every step was followed by one update of the scaler."],
                    "not_measured": ["Activations: run with --activations."],
                    "timing": {"half_share": 0.873, "syncs_per_step": 1, "cast_share": None},
                    "settings": [{"name": "init_scale", "value": 32768.0, "reason": "65536 overflowed twice."}],
                    "modules": [{"name": "head", "kind": "Linear", "precision": "fp16"}],
                },
            },
            "steps": steps(120),
            "layers": [sample(1, layers), sample(50, layers)],
            "findings": [save, clip],
        }
        plain["manifest"]["facts"] |= facts or {}
        plain["manifest"] |= manifest or {}
        return Run(**plain | changed)

    return make


@pytest.fixture
def make_steps():
    return steps


@pytest.fixture
def make_sample():
    return sample
