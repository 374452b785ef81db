"""An engine's bad steps: found and explained, at once or a step late; training goes on as if nobody had looked."""

import copy
import io
import math
import warnings
from contextlib import redirect_stderr
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampwise
from ampwise import BadInput, Capsules, Engine
from ampwise.trace import bad_steps


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


@pytest.mark.few_by_day(3)
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


def test_who_listens_is_reported_instead():
    told = []
    bad_steps.FINDING_LISTENERS.append(lambda finding, step: told.append((finding.rule.name, step)))
    try:
        run = trained(batches(1, 2, 3, 4, 5, 6))
    finally:
        bad_steps.FINDING_LISTENERS.pop()
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
    assert "changed its batch in place" in finding.evidence["note"]


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
    assert finding.fix.startswith(
        "The loss function must give the same result when called again with the same arguments: pass what changes as "
        "an argument."
    )
    assert not any(word in finding.fix for word in ("deterministic", "compile", "memory"))  # of a GPU, or another


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
    assert "step 1 could not be explained: its replay failed with LookupError: no more data" in said.getvalue()
    assert not engine.step(lambda: model(torch.ones(1, 4)).mean()).skipped


def test_a_loss_function_that_takes_from_an_iterator_is_not_run_again():
    model, source = nn.Linear(4, 1), iter([torch.full((3, 4), torch.nan), torch.ones(1, 4)])
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    said = io.StringIO()
    with redirect_stderr(said):
        assert engine.step(lambda: model(next(source)).mean()).skipped
        assert not engine.step(lambda: model(next(source)).mean()).skipped, "the next is still there"
    assert "reads from `source`" in said.getvalue()
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
    """The step is skipped, and the loss is explained."""
    model = nn.Linear(4, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    before = model.weight.detach().clone()

    def loss_fn(x):
        return model(x).mean() + (x * 0).log().detach().mean()

    with redirect_stderr(io.StringIO()):
        step = engine.step(loss_fn, torch.ones(3, 4))
    assert math.isinf(step.loss)
    assert step.skipped
    assert torch.equal(model.weight, before)
    assert [finding.rule.name for finding in engine.findings] == ["unstable-loss"]


def test_facts_that_come_late_are_waited_for_before_the_next_update(monkeypatch):
    """As on a GPU with a fused optimizer: the bad step is replayed in the middle of the next."""
    from ampwise.train.scaler.step_result import StepResult

    monkeypatch.setattr(StepResult, "is_skip_known", property(lambda outcome: False))
    monkeypatch.setattr(bad_steps.BadStepExplainer, "before_update", lambda steps, *_: steps.settle())
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


def test_a_finding_says_what_builds_the_model_of_its_capsule_where_that_is_known(tmp_path):
    run = trained(batches(1, 3), callbacks=[ampwise.Capsules(tmp_path, make="train.py:make")])
    assert run.engine.findings[0].evidence["build"] == "train.py:make"
    run = trained(batches(1, 3), callbacks=[Capsules(tmp_path)])
    assert "build" not in run.engine.findings[0].evidence


def test_a_bad_step_is_saved_and_can_be_read(tmp_path):
    from ampwise.trace.capsule import read

    run = trained(batches(1, 3), callbacks=[Capsules(tmp_path / "capsules")])
    assert run.said.count("saving step") == 2
    (finding,) = run.engine.findings
    contents = read(finding.evidence["capsule"])
    assert (contents.step, contents.precision, contents.scale) == (2, "fp16", 256.0)
    assert math.isnan(contents.args[0][2, 1])
    assert contents.buffers["seen"] == 6, "as the step began: one batch before it"
    assert [each.rule.name for each in contents.findings] == ["bad-batch"]


def test_capsules_that_cannot_be_written_stop_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    run = trained(batches(1), callbacks=[Capsules(tmp_path / "file")])
    assert "could not be saved" in run.said
    assert len(run.engine.findings) == 1


@pytest.mark.parametrize("wrong", [3, ["capsules"]])
def test_capsules_are_a_folder(wrong):
    model = nn.Linear(1, 1)
    with pytest.raises(BadInput, match=r"Capsules\(.*\): expected a folder"):
        Capsules(wrong)
    with pytest.raises(BadInput, match="saving bad steps needs trace=True"):
        Engine(model, torch.optim.SGD(model.parameters()), "fp32", trace=False, callbacks=[Capsules("capsules")])


@pytest.mark.parametrize("wrong", ["make", ":make", "train:", 3])
def test_a_builder_is_named(wrong):
    with pytest.raises(BadInput, match=r"train\.py:make"):
        Capsules("here", make=wrong)


def test_trace_is_public():
    assert ampwise.Capsules is Capsules


# Tensors of odd kinds: nothing bad happens, and tracing must not be what stops the training


class Odd(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        with torch.inference_mode(kind == "inference"):
            self.register_buffer("odd", torch.eye(4).to_sparse() if kind == "sparse" else torch.eye(4))

    def forward(self, x):
        return self.linear(x) + (self.odd.to_dense() if self.odd.is_sparse else self.odd)


@pytest.mark.parametrize("kind", ["sparse", "inference"])
def test_buffers_of_odd_kinds_train(kind):
    model = Odd(kind)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    for _ in range(3):
        engine.step(lambda x: model(x).mean(), torch.ones(4, 4))
    assert engine.applied_steps == 3


def test_sparse_batches_train_in_windows():
    model = nn.Linear(4, 4)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate=2)
    for _ in range(4):
        engine.step(lambda a, x: torch.sparse.mm(a, model(x)).mean(), torch.eye(4).to_sparse(), torch.ones(4, 4))
    assert engine.applied_steps == 2


# What is Python's: a function may count, collect and draw as it likes


class Counts:
    def __init__(self):
        self.calls, self.losses, self.generator = 0, [], numpy.random.default_rng(0)

    def weight(self):
        self.calls += 1
        self.losses.append(self.calls)
        return self.calls * float(self.generator.random())


class Shrinking(nn.Linear):
    """Its weights get other memory in each pass."""

    def forward(self, x):
        self.weight.data = self.weight.data * 0.9
        return super().forward(x)


def counting(trace):
    torch.manual_seed(0)
    model, counts, passes = Shrinking(4, 1), Counts(), 0
    model.register_forward_hook(lambda *_: counts.losses.append(None))
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", trace=trace)

    def loss_fn(x):
        nonlocal passes
        passes += 1
        return model(x).mean() * counts.weight() * passes

    with redirect_stderr(io.StringIO()):
        for x in batches(2, number=5):
            engine.step(loss_fn, x)
    assert len(engine.findings) == trace
    return passes, counts.calls, counts.losses, counts.generator.random(), model.weight.tolist()


def test_variables_that_a_function_can_reach_are_as_if_nobody_had_looked():
    assert counting(trace=True) == counting(trace=False)


# Facts that come late, as on a GPU


@pytest.fixture
def late(monkeypatch):
    from ampwise.train.scaler.step_result import StepResult

    monkeypatch.setattr(StepResult, "is_skip_known", property(lambda outcome: False))
    monkeypatch.setattr(bad_steps.BadStepExplainer, "before_update", lambda steps, *_: steps.settle())


class Adapting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("size", torch.ones(4))

    def forward(self, x):
        y = self.linear(x / self.size)
        self.size.mul_(0.9).add_(0.1 * x.detach().abs().mean(0))
        return y


def test_a_buffer_that_the_bad_step_has_corrupted_is_neither_the_cause_nor_left_so(late):
    run = trained(batches(2), model=Adapting(), precision="fp32", fused=True)
    assert [(each.rule.name, each.place.step) for each in run.engine.findings] == [("bad-batch", 3)]
    assert run.model.size.isfinite().all()


@pytest.mark.parametrize("trace", [False, True])
def test_a_model_that_is_evaluated_before_it_is_known_keeps_its_statistics(late, trace):
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 1))
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), "fp32", trace=trace)
    given = batches(number=3)
    with redirect_stderr(io.StringIO()):
        for number, x in enumerate(given):  # the last loss is bad, and its step is skipped
            engine.step(lambda x, more: model(x).mean() + more, x, torch.inf if number == 2 else 0.0)
        model.eval()
        assert len(engine.findings) == trace
    assert not model[0].training
    torch.testing.assert_close(model[0].running_mean, torch.stack(given[:2]).mean((0, 1)), atol=1e-5, rtol=0)


# What must not get in the way


def test_a_step_that_cannot_be_explained_trains_where_warnings_are_errors(monkeypatch):
    model = nn.Linear(4, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    monkeypatch.setattr(bad_steps.BadStepExplainer, "_look_into", lambda *_: 1 / 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step(lambda x: model(x).mean(), torch.full((2, 4), torch.nan))
    assert engine.skipped_steps == 1


def test_a_variable_that_is_gone_stops_no_explanation():
    model, gone = nn.Linear(4, 1), None
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")

    def loss_fn(x):
        return model(x).mean() if x.dim() == 2 else gone  # noqa: F821

    del gone
    with redirect_stderr(io.StringIO()):
        engine.step(loss_fn, torch.full((2, 4), torch.nan))
    assert [finding.rule.name for finding in engine.findings] == ["bad-batch"]
