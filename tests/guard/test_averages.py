"""Averages of weights: a run that met bad batches has the average of one that never saw them."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ampwise
from ampwise import Engine, Guard, Ladder

PAGE = Path(__file__).parents[2] / "docs" / "guard.md"
LADDER = Ladder(skips=2, rollbacks=5, change_precision=False, healthy=2)


def examples():
    """The fences of Python of the page's part on averages."""
    part = PAGE.read_text(encoding="utf-8").partition("## Averages of weights")[2].partition("\n## ")[0]
    return [fence.partition("```")[0] for fence in part.split("```python\n")[1:]]


def batch(number, *, bad=False):
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)
    return (x * torch.nan if bad else x), y


def started(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    engine = Engine(model, torch.optim.AdamW(model.parameters(), 0.05, fused=True), "fp32", trace=False)
    return model, engine, lambda x, y: F.cross_entropy(model(x), y)


def bits(state):
    return {name: (value.dtype, value.tolist()) for name, value in state.items()}


BAD = {"one": {3}, "a rollback": {5, 6}, "two rollbacks and a skip": {2, 5, 6, 10, 11}, "the last": {12, 13}}


@pytest.mark.half_by_day
@pytest.mark.parametrize("bad", list(BAD.values()), ids=list(BAD))
@pytest.mark.parametrize("example", [0, 1])
def test_the_examples_of_the_page_are_as_if_bad_batches_had_not_been(example, bad, tmp_path, monkeypatch, capsys):
    ends = []
    for name, seen in (("with", range(14)), ("without", [number for number in range(14) if number not in bad])):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        model, engine, loss_fn = started()
        names = {"ampwise": Guarding, "model": model, "engine": engine, "loss_fn": loss_fn}
        names["loader"] = [batch(number, bad=number in bad) for number in seen]
        exec(examples()[example], names)
        average = names["ema"].state_dict() if example == 0 else names["average"].state_dict()
        ends.append((bits(average), bits(model.state_dict()), engine.applied_steps))
        assert sum(event.name == "rolled-back" for event in names["guard"].events) == (
            sum(number + 1 in bad for number in bad) if name == "with" else 0
        )
    assert ends[0] == ends[1]


class Guarding:
    """As the page has it, with snapshots often enough for a short run."""

    @staticmethod
    def Guard(engine, directory, **options):  # noqa: N802
        return ampwise.Guard(engine, directory, ladder=LADDER, snapshot_every=1, **options)


def test_a_step_says_what_became_of_it(tmp_path, capsys):
    _, engine, loss_fn = started()
    said = []
    with Guard(engine, tmp_path, ladder=LADDER, snapshot_every=1) as guard:
        for number in range(8):
            step = guard.step(loss_fn, *batch(number, bad=number in (4, 6, 7)))
            said.append((step.skipped, step.undone, step.applied))
    good, skipped, undone = (False, False, True), (True, False, False), (True, True, False)
    assert said == [good, good, good, good, skipped, good, skipped, undone]
    assert "undone" in repr(step)


def test_a_jump_of_the_loss_that_is_gone_back_from_is_undone_and_not_skipped(tmp_path, capsys):
    model, engine, loss_fn = started()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ladder = Ladder(on_spike="rollback", healthy=2)
    with Guard(engine, tmp_path, ladder=ladder, snapshot_every=1, state={"ema": ema}) as guard:
        for number in range(40):
            guard.step(loss_fn, *batch(number))
            ema.update_parameters(model)
        x, y = batch(3)
        step = guard.step(lambda x, y: loss_fn(x, y) * 1e6, x, y)
        assert (step.skipped, step.undone, step.applied) == (False, True, False)
        then, weights = int(ema.n_averaged), bits(ema.state_dict())
        ema.update_parameters(model)
        assert (int(ema.n_averaged), bits(ema.state_dict())) == (then, weights)


def test_an_average_is_its_own_again_when_the_guard_is_gone_and_so_is_a_copy(tmp_path):
    model, engine, loss_fn = started()
    ema = AveragedModel(model)
    with Guard(engine, tmp_path, state={"ema": ema}) as guard:
        guard.step(loss_fn, *batch(0, bad=True))
        ema.update_parameters(model)
        assert ema.n_averaged == 0
        for other in (copy.deepcopy(ema), pickle.loads(pickle.dumps(ema))):
            other.update_parameters(model)
            assert (other.n_averaged, ema.n_averaged) == (1, 0)
    ema.update_parameters(model)
    assert ema.n_averaged == 1
    assert "update_parameters" not in vars(ema)


def test_before_the_first_step_an_average_may_be_updated(tmp_path):
    model, engine, _ = started()
    ema = AveragedModel(model)
    guard = Guard(engine, tmp_path, state={"ema": ema})
    guard.begin()
    ema.update_parameters(model)
    assert ema.n_averaged == 1
    guard.close()


def test_an_average_does_not_hold_the_guard(tmp_path):
    """Which lets go of its directory when nobody has it any more."""
    model, engine, _ = started()
    ema = AveragedModel(model)
    with Guard(engine, tmp_path / "a", state={"ema": ema}):
        assert all(not isinstance(each, Guard) for each in vars(vars(ema)["update_parameters"]).values())
