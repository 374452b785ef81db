"""A healthy run: nothing is said of it, and its bits are those of a run without a guard."""

import pytest
import torch

from ampwise import Engine, Guard
from ampwise.guard.disk.catalog import checkpoints

from ..night import by_night
from .conftest import written
from .programs import BATCHES, Plan, Run, train

pytestmark = pytest.mark.usefixtures("way")

DAY_S = 86_400


@written("engine", "loop", *by_night("own steps"))
@pytest.mark.parametrize(
    ("model", "precision"), [("mlp", "fp16"), *by_night(("mlp", "fp32"), ("mlp", "bf16"), ("gpt", "bf16"))]
)
def test_a_guard_changes_no_bit_and_says_nothing(tmp_path, model, precision):
    guarded = train(tmp_path / "run", model=model, precision=precision)
    plain = train(tmp_path / "none", model=model, precision=precision, guarded=False)
    assert guarded.told == []
    assert guarded.weights == plain.weights
    assert guarded.lineage == plain.lineage
    assert not (tmp_path / "none").exists()


@written("engine")
def test_the_engines_own_step_is_guarded_as_well(tmp_path):
    run = Run(Plan(directory=str(tmp_path)))

    def step(*args):
        taken = run.engine.step(*args)
        run.be_written()  # else the next one is not begun, on a machine that is busy
        return taken

    run.guard.step = step
    assert run.to_the_end().weights == train(tmp_path / "none", guarded=False).weights
    assert len(checkpoints(tmp_path)) == 3


@written("engine")
def test_a_window_of_micro_batches_and_a_last_one_that_is_shorter(tmp_path):
    options = {"engine": {"accumulate": 5}, "guard": {"every": "3 steps", "snapshot_every": 1}}
    guarded = train(tmp_path, **options)
    assert guarded.told == []
    assert checkpoints(tmp_path)[0].step == -(-4 * BATCHES // 5)


@written("engine")
def test_the_initial_search_for_a_loss_scale_is_no_fault(tmp_path):
    """Ordinary overflows are an FP16 run's way to its scale."""
    outcome = train(tmp_path, precision="fp16", engine={"scaling": {"init_scale": 2.0**40}})
    assert outcome.told == []
    assert 5 < sum(skipped for _, _, skipped in outcome.steps) < 40
    assert outcome.passed_over == []


@pytest.mark.parametrize("days", [-400, *by_night(400)])
def test_a_clock_that_is_moved_changes_nothing(tmp_path, monkeypatch, days):
    """It decides neither when a checkpoint is due nor which is the newest."""
    expected = train(tmp_path / "whole", epochs=3)
    real = Run.write_down

    def moving(self, number, samples):
        real(self, number, samples)
        if number == 15:
            now = __import__("time").time
            monkeypatch.setattr("time.time", lambda: now() + days * DAY_S)

    monkeypatch.setattr(Run, "write_down", moving)
    first = train(tmp_path / "run", epochs=2)
    assert first.told == []
    steps = [each.step for each in checkpoints(tmp_path / "run")]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < 15 < steps[0], "on both sides of the move"
    monkeypatch.undo()
    second = train(tmp_path / "run", epochs=3)
    assert second.began_at == 24
    assert second.told == []
    assert second.weights == expected.weights


def test_a_clock_that_is_moved_makes_no_checkpoint_due(tmp_path, monkeypatch):
    now = __import__("time").time
    monkeypatch.setattr("time.time", lambda: now() + 10 * DAY_S)
    train(tmp_path, guard={"every": "1h"})
    assert [each.step for each in checkpoints(tmp_path)] == [4 * BATCHES], "the one at the end"


def test_a_run_that_is_over_goes_on_with_nothing(tmp_path):
    first = train(tmp_path)
    second = train(tmp_path)
    assert second.steps == []
    assert second.weights == first.weights
    assert second.told == []


@written("engine")
def test_two_guards_on_one_engine_are_one_too_many(tmp_path):
    model = torch.nn.Linear(2, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), "fp32")
    with Guard(engine, tmp_path / "one"), pytest.raises(ValueError, match="already has a guard"):
        Guard(engine, tmp_path / "two").begin()


def test_what_a_kill_left_behind_is_gone_though_nothing_is_left_to_do(tmp_path):
    train(tmp_path)
    left = tmp_path / ".step-00000023.a5cd1e31.old"
    left.mkdir()
    (left / "tensors-00000.safetensors").write_text("half of it")
    train(tmp_path)
    assert not left.exists()
    assert checkpoints(tmp_path)
