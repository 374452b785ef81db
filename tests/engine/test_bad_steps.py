"""An engine's bad steps: found and explained, at once or a step late; training goes on as if nobody had looked."""

import copy
import io
import math
from contextlib import redirect_stderr
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampwise
from ampwise import BadInput, Capsules, Engine
from ampwise.engine import bad_steps


class Moody(nn.Module):
    """Running statistics, other buffers, counters, dropout."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8))
        self.norm, self.dropout, self.last = nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.seen += len(x)
        return self.last(self.dropout(self.norm(self.first(x))).relu())


def batches(*bad, number=8, generator=None):
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(6, 4, generator=generator) for _ in range(number)]
    for index in bad:
        made[index][2, 1] = torch.nan
    return made


def trained(given, *, precision="fp16", model=None, fused=False, late=False, monkeypatch=None, **options):
    """A run over batches, and all that it left."""
    torch.manual_seed(0)
    model = model or Moody()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaling = {"scaling": {"init_scale": 2.0**8}} if precision == "fp16" else {}
    engine = Engine(model, optimizer, precision, **scaling, **options)

    def loss_fn(x):
        return F.mse_loss(model(x).float(), x.sum(1, keepdim=True))

    said = io.StringIO()
    with redirect_stderr(said):
        for x in given:
            engine.step(loss_fn, x)
        engine.close()
    return SimpleNamespace(engine=engine, model=model, optimizer=optimizer, said=said.getvalue())


def state_of(run):
    counters = {name: module.calls for name, module in run.model.named_modules() if hasattr(module, "calls")}
    return copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()["state"], counters, torch.get_rng_state()))


def assert_equal(one, other):
    leaves = torch.utils._pytree.tree_leaves
    for left, right in zip(leaves(one), leaves(other), strict=True):
        assert torch.equal(torch.as_tensor(left), torch.as_tensor(right))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_goes_on_to_the_bit_as_if_nobody_had_looked(precision, fused, accumulate):
    given = batches(1, 4, 5)
    plain = trained(given, precision=precision, fused=fused, accumulate=accumulate, trace=False)
    left = state_of(plain)
    looked = trained(given, precision=precision, fused=fused, accumulate=accumulate)
    assert_equal(state_of(looked), left)
    assert [finding.rule.name for finding in looked.engine.findings] == ["bad-batch"]
    assert plain.engine.findings == []


def test_what_was_found_is_said_once_and_kept():
    run = trained(batches(1, 2, 4))
    (finding,) = run.engine.findings
    assert run.said.count("AMP901") == 1
    assert finding.place.step == 2
    assert finding.evidence["trace"]["source"]["samples"] == [2]


def test_who_listens_is_told_instead():
    told = []
    bad_steps.LISTENERS.append(lambda finding, step: told.append((finding.rule.name, step)))
    try:
        run = trained(batches(1, 2, 3, 4, 5, 6))
    finally:
        bad_steps.LISTENERS.pop()
    assert told == [("bad-batch", 2), ("bad-batch", 3), ("bad-batch", 5)], "the 1st, the 2nd, the 4th"
    assert "AMP9" not in run.said


def test_ordinary_overflow_is_silent():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine = Engine(model, optimizer, "fp16", scaling={"init_scale": 2.0**24})
    said = io.StringIO()
    with redirect_stderr(said):
        for x in batches(number=20):
            engine.step(lambda x: model(x).float().square().mean() * 100, x)
    assert engine.skipped_steps > 3
    assert engine.findings == []
    assert said.getvalue() == ""


def test_the_guilty_micro_batch_is_found():
    run = trained(batches(2), accumulate=4)
    (finding,) = run.engine.findings
    assert finding.place.step == 1
    assert finding.rule.name == "bad-batch"


def test_a_batch_that_was_written_to_is_said():
    model = nn.Linear(4, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")

    def loss_fn(x):
        return model(x.sub_(1).log()).mean()

    with redirect_stderr(io.StringIO()):
        engine.step(loss_fn, torch.ones(3, 4))
    (finding,) = engine.findings
    assert "changed in place" in finding.evidence["note"]


def test_what_does_not_come_again_is_said_not_to():
    model, calls = nn.Linear(4, 1), []
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")

    def loss_fn(x):
        calls.append(1)
        return model(x).mean() * (torch.nan if len(calls) == 1 else 1.0)

    with redirect_stderr(io.StringIO()):
        engine.step(loss_fn, torch.ones(3, 4))
    (finding,) = engine.findings
    assert finding.rule.name == "not-reproduced"
    assert "3 of 3 replays" in finding.message


def test_a_loss_function_that_cannot_be_run_again():
    model, calls = nn.Linear(4, 1), []
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")

    def loss_fn(x):
        if calls:
            raise LookupError("no more data")
        calls.append(1)
        return model(x).mean()

    said = io.StringIO()
    with redirect_stderr(said):
        engine.step(loss_fn, torch.full((3, 4), torch.nan))
    assert "step 1 could not be explained: run again, it fails with LookupError: no more data" in said.getvalue()
    assert not engine.step(lambda: model(torch.ones(1, 4)).mean()).skipped


def test_a_loss_function_that_takes_from_an_iterator_is_not_run_again():
    model, source = nn.Linear(4, 1), iter([torch.full((3, 4), torch.nan), torch.ones(1, 4)])
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    said = io.StringIO()
    with redirect_stderr(said):
        assert engine.step(lambda: model(next(source)).mean()).skipped
        assert not engine.step(lambda: model(next(source)).mean()).skipped, "the next is still there"
    assert "takes items from `source`" in said.getvalue()
    assert "engine.step(loss_fn, x, y)" in said.getvalue()


def test_a_function_that_changes_its_batch_is_known_for_it_from_its_second_step_on():
    model = nn.Linear(4, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")

    def loss_fn(x):
        x.div_(x.amax(1, keepdim=True))
        return model(x).mean()

    last = torch.zeros(3, 4)
    with redirect_stderr(io.StringIO()):
        for x in (torch.ones(3, 4), torch.ones(3, 4), last):
            engine.step(loss_fn, x)
    (finding,) = engine.findings
    assert finding.rule.name == "division-by-zero"
    assert "note" not in finding.evidence
    assert last.isnan().all(), "as the function has left it"


def test_a_step_in_pieces_says_what_can_be_explained():
    model = nn.Linear(4, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    said = io.StringIO()
    with redirect_stderr(said):
        for _ in range(3):
            with engine.autocast():
                loss = model(torch.full((3, 4), torch.nan)).mean()
            engine.backward(loss)
            engine.apply()
    assert said.getvalue().count("engine.step(loss_fn, x, y)") == 1


def test_a_loss_that_is_bad_with_gradients_that_are_not():
    """The step is taken, as torch would; and the loss is explained with the weights it was computed with."""
    model = nn.Linear(4, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    before = model.weight.detach().clone()

    def loss_fn(x):
        return model(x).mean() + (x * 0).log().detach().mean()

    with redirect_stderr(io.StringIO()):
        step = engine.step(loss_fn, torch.ones(3, 4))
    assert math.isinf(step.loss)
    assert not step.skipped
    assert not torch.equal(model.weight, before)
    assert [finding.rule.name for finding in engine.findings] == ["unstable-loss"]


def test_facts_that_come_late_are_waited_for_before_the_next_update(monkeypatch):
    """As on a GPU with a fused optimizer: the bad step is replayed in the middle of the next."""
    from ampwise.engine.scaling.outcome import Outcome

    monkeypatch.setattr(Outcome, "skip_known", property(lambda outcome: False))
    monkeypatch.setattr(bad_steps.BadSteps, "before_update", lambda steps, *_: steps.settle())
    given = batches(1, 4)
    plain = trained(given, fused=True, trace=False)
    left = state_of(plain)
    looked = trained(given, fused=True)
    assert_equal(state_of(looked), left)
    assert [(each.rule.name, each.place.step) for each in looked.engine.findings] == [("bad-batch", 2)]


def test_an_engine_goes_away_without_a_collector():
    import gc
    import weakref

    gc.disable()
    try:
        run = trained(batches(1))
        gone = weakref.ref(run.engine)
        del run
        assert gone() is None
    finally:
        gc.enable()


# Capsules


def make():
    torch.manual_seed(0)
    model = Moody()
    return model, lambda x: F.mse_loss(model(x).float(), x.sum(1, keepdim=True))


def test_a_bad_step_is_saved_and_can_be_read(tmp_path):
    from ampwise.trace.capsule import read

    run = trained(batches(1, 3), capsules=tmp_path / "capsules")
    assert run.said.count("saving step") == 2
    (finding,) = run.engine.findings
    contents = read(finding.evidence["capsule"])
    assert (contents.step, contents.precision, contents.scale) == (2, "fp16", 256.0)
    assert math.isnan(contents.args[0][2, 1])
    assert contents.buffers["seen"] == 6, "as the step began: one batch before it"
    assert [each.rule.name for each in contents.findings] == ["bad-batch"]


def test_capsules_that_cannot_be_written_stop_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    run = trained(batches(1), capsules=Capsules(tmp_path / "file"))
    assert "could not be saved" in run.said
    assert len(run.engine.findings) == 1


@pytest.mark.parametrize("wrong", [3, ["capsules"]])
def test_capsules_are_a_folder(wrong):
    model = nn.Linear(1, 1)
    with pytest.raises(BadInput, match=r"Engine\(capsules="):
        Engine(model, torch.optim.SGD(model.parameters()), "fp32", capsules=wrong)


@pytest.mark.parametrize("wrong", ["make", ":make", "train:", 3])
def test_a_builder_is_named(wrong):
    with pytest.raises(BadInput, match="module:function"):
        Capsules("here", build=wrong)


def test_trace_is_public():
    assert ampwise.Capsules is Capsules
