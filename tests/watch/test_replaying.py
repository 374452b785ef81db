"""A bad step of a watched script is replayed: the operation is named, and the script does not notice."""

import copy
import json
import math
import random
import re
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampwise
from ampwise.trace.python_state import attributes_restored
from ampwise.watch.bad_step_watch import APART
from ampwise.watch.call_replay import _backward
from ampwise.watch.findings import is_cause
from ampwise.watch.model_calls import MOST
from ampwise.watch.step_replay import _reset_bad_statistics
from ampwise.watch.watch import Watch

HERE = Path(__file__).name
OPS = "AMP9"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.gain, self.calls = 1.0, 0

    def forward(self, x):
        self.calls += 1
        h = self.drop(self.norm(self.fc(x)))
        return h * self.gain  # overflow


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.block(x))


def line_of(word):
    """Of this file: the line with a remark."""
    return next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if f"# {word}" in line)


def watched(script, **options):
    with Watch(every=1, timing=False, **options) as watch:
        script()
    assert not watch.failures
    return watch


def ops_in(watch):
    return [seen.finding for seen in watch.findings if seen.finding.rule.code.startswith(OPS)]


def only_op_in(watch):
    (found,) = ops_in(watch)
    return found


def traced(finding):
    return finding.evidence["trace"]


def about_replays(watch):
    return [sentence for sentence in watch.not_measured() if "replayed" in sentence]


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(32, 16, generator=generator), torch.randint(0, 4, (32,), generator=generator)


def train_in_half(steps=8, bad=(4,), model=None, before_backward=lambda x: None, fused=False, loss_of=F.cross_entropy):
    """FP16 on the CPU, with a scaler; in the bad steps a product leaves FP16."""
    torch.manual_seed(0)
    model = model or Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step, (x, y) in enumerate(batches(steps), 1):
        for block in (each for each in model.modules() if isinstance(each, Block)):
            block.gain = 1e5 if step in bad else 1.0
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model(x), y)
        before_backward(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model, optimizer, scaler


# What is found


@pytest.mark.parametrize("fused", [False, True])
def test_a_product_that_leaves_fp16_is_named_with_line_module_and_step(fused):
    watch = watched(lambda: train_in_half(fused=fused))
    found = only_op_in(watch)
    assert found.rule.name == "half-overflow"
    assert (Path(found.place.file).name, found.place.line) == (HERE, line_of("overflow"))
    assert (found.place.module, found.place.step) == ("block", 4)
    assert traced(found)["op"] == "aten.mul.Tensor"
    assert traced(found)["symptom"] == "loss"
    assert any(trial["finite"] for trial in traced(found)["trials"])
    assert not about_replays(watch)


def test_modules_of_a_library_are_at_the_line_that_called_the_model():
    def script():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        nn.init.ones_(model[0].weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for size in (1.0, 6e4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = model(torch.full((2, 4), size))  # called here
            scaler.scale((out - out).mean()).backward()
            scaler.step(optimizer)
            scaler.update()

    found = only_op_in(watched(script))
    assert (Path(found.place.file).name, found.place.line) == (HERE, line_of("called here"))
    assert (found.rule.name, found.place.module, found.place.step) == ("half-overflow", "0", 2)


def test_a_batch_with_nan_is_named_by_the_models_own_word_for_it():
    def script():
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step, (x, y) in enumerate(batches(4), 1):
            if step == 3:
                x[5, 2] = math.nan
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()

    found = only_op_in(watched(script))
    assert found.rule.name == "bad-batch"
    assert found.place.step == 3
    assert traced(found)["source"] | {"values": None} == {
        "what": "batch", "name": "x", "values": None, "samples": [5], "bad_samples": 1,
    }  # fmt: skip


def test_without_a_scaler_the_step_is_replayed_before_its_weights_are_gone():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, offset):
            return (self.fc(x) - offset).sqrt()  # root

    def script():
        torch.manual_seed(0)
        model = Root()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for offset in (-10.0, -10.0, 10.0, -10.0):
            optimizer.zero_grad()
            model(torch.ones(2, 4), offset=offset).sum().backward()
            optimizer.step()

    watch = watched(script)
    found = only_op_in(watch)
    assert (found.rule.name, found.place.line, found.place.step) == ("outside-domain", line_of("root"), 3)
    assert not about_replays(watch)  # all later steps are bad for the weights' sake, which is known


@pytest.mark.parametrize("fused", [False, True])
def test_a_derivative_that_is_infinite_is_found_by_going_back_from_what_came_in(fused):
    class Length(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.fc(x).square().sum(-1).sqrt()  # derivative

    def script():
        torch.manual_seed(0)
        model = Length()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for size in (1.0, 1.0, 0.0, 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((2, 4), size)).mean()).backward()
            scaler.step(optimizer)
            scaler.update()

    found = only_op_in(watched(script))
    assert (found.rule.name, found.place.line, found.place.step) == ("infinite-derivative", line_of("derivative"), 3)
    assert traced(found)["symptom"] == "gradients"
    assert traced(found)["phase"] == "backward"


@pytest.mark.parametrize("divided", [False, True])
def test_a_part_of_the_loss_that_follows_the_loss_scale_is_not_a_gradient_too_large_at_every_scale(divided):
    def script():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        for _ in range(4):
            x = torch.randn(8, 4, requires_grad=True)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = model(x).float()
            (slope,) = torch.autograd.grad(scaler.scale(out.mean()), x, create_graph=True)  # left scaled
            if divided:
                slope = slope / scaler.get_scale()
            penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
            scaler.scale(out.mean() + (1e5 if divided else 10) * penalty).backward()
            scaler.step(optimizer)
            scaler.update()

    found = [each.finding for each in watched(script).seen() if each.finding.rule.code in ("AMP112", "AMP911")]
    expected = [] if divided else [("AMP112", line_of("left scaled"))]
    assert [(each.rule.code, each.place.line) for each in found] == expected
    assert all("scaler.get_scale()" in each.fix for each in found)


@pytest.mark.parametrize("source", ["torch", "python", "numpy"])
def test_a_fault_of_chance_comes_again_with_the_same_random_numbers(source):
    draw = {"torch": lambda: torch.rand(()).item(), "python": random.random, "numpy": numpy.random.rand}[source]

    class Unlucky(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 4)

        def forward(self, x):
            return self.fc(x) / (draw() > 0.2)  # chance

    def script():
        torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
        model = Unlucky()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for x, y in batches(40):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            _ = [draw() for _ in range(7)]
            scaler.step(optimizer)
            scaler.update()

    watch = watched(script)
    assert only_op_in(watch).place.line == line_of("chance")
    assert not about_replays(watch)


def test_one_of_several_micro_batches_is_found():
    def script():
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            for part, (x, y) in enumerate(batches(3)):
                if (step, part) == (1, 1):
                    x[7] = math.inf
                scaler.scale(F.cross_entropy(model(x), y) / 3).backward()
            scaler.step(optimizer)
            scaler.update()

    found = only_op_in(watched(script))
    assert (found.rule.name, found.place.step, traced(found)["source"]["samples"]) == ("bad-batch", 2, [7])


def test_a_model_that_gives_logits_and_a_loss_is_gone_back_through_once():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 4)

        def forward(self, x, y, size):
            logits = self.fc(x)
            return {"logits": logits, "loss": (F.cross_entropy(logits, y) * size).abs().sqrt()}  # loss within

    def script():
        torch.manual_seed(0)
        model = Both()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step, (x, y) in enumerate(batches(3)):
            optimizer.zero_grad()
            scaler.scale(model(x, y, 0.0 if step == 1 else 1.0)["loss"]).backward()
            scaler.step(optimizer)
            scaler.update()

    found = only_op_in(watched(script))
    assert (found.rule.name, found.place.line) == ("infinite-derivative", line_of("loss within"))


def test_gradients_of_outputs_that_others_are_made_of_are_counted_once():
    fc = nn.Linear(4, 2)
    kept = {}

    def run():
        logits = fc(torch.ones(3, 4))
        return [logits, logits.square().mean()]

    logits, loss = run()
    logits.register_hook(lambda gradient: kept.update({0: gradient}))
    loss.backward()
    alone, fc.weight.grad = fc.weight.grad, None
    _backward(run(), {**kept, 1: torch.ones(())})
    assert torch.equal(fc.weight.grad, alone)


def test_statistics_that_the_bad_step_has_left_are_put_aside():
    trained, other = nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval()
    for each in (trained, other):
        each.running_mean.fill_(math.nan)
    buffer = trained.running_mean
    with attributes_restored([trained, other]):
        _reset_bad_statistics([trained, other])
        assert trained.running_mean.tolist() == [0.0, 0.0]
        assert other.running_mean.isnan().all()  # these are read, and may be the cause
    assert trained.running_mean is buffer


def test_a_fault_of_the_loss_function_is_at_its_line():
    def loss_of(out, y):
        shifted = out.float().sum() * 0 - 1
        return F.cross_entropy(out, y) + shifted.log()  # of the loss

    found = only_op_in(watched(lambda: train_in_half(bad=(), loss_of=loss_of)))
    assert (Path(found.place.file).name, found.place.line) == (HERE, line_of("of the loss"))


def test_what_the_script_computes_between_two_models_is_at_its_line():
    def script():
        torch.manual_seed(0)
        first, second = nn.Linear(16, 16), nn.Linear(16, 4)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        x, y = next(batches(1))
        hidden = first(x).log()  # between
        F.cross_entropy(second(hidden), y).backward()
        optimizer.step()

    found = only_op_in(watched(script))
    assert (Path(found.place.file).name, found.place.line) == (HERE, line_of("between"))


# What is not found, and said


def test_a_fault_of_code_that_cannot_be_read_is_said_to_lie_behind_the_model():
    unread = """
def losses(model):
    for x, y in batches(2):
        out = model(x)
        yield F.cross_entropy(out, y) + (out.sum() * 0 - 1).log()
"""
    exec(unread, names := {"batches": batches, "F": F})  # it has no file

    def script():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for loss in names["losses"](model):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    watch = watched(script)
    assert not ops_in(watch)
    (sentence, *_) = about_replays(watch)
    assert sentence == (
        "Step 1 was replayed, and Net is finite. The bad value arises after its output, which cannot be replayed, or "
        "is not reproducible; `ampwise.trace(loss_fn, batch)` can look there."
    )
    (loss,) = [seen.finding for seen in watch.seen() if seen.finding.rule.code == "AMP612"]
    assert loss.fix == (
        "The model's output is finite: the bad value arises between it and the loss. Put that code into a function and "
        "run `ampwise.trace(loss_fn, x, y)`."
    )


def test_where_the_operation_is_named_the_symptoms_point_to_it():
    symptoms = {"AMP612", "AMP613"}
    found = [seen.finding for seen in watched(train_in_half).seen()]
    assert {each.fix for each in found if each.rule.code in symptoms} == {"See the finding about the operation."}
    assert "--activations" not in " ".join(each.fix for each in found)


@pytest.mark.parametrize(
    ("read_up_to", "said"),
    [
        (2, "the weights were finite, so the data or an operation of this step is the cause"),
        (1, "whether the weights were finite before is unknown"),
    ],
)
def test_weights_whose_last_gradients_nobody_has_read_are_not_called_finite(read_up_to, said):
    with Watch(timing=False) as watch:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in (1, 2, 3):
            watch.step_watch.gradients._reads.is_due = lambda step=step: step <= read_up_to
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).mean() + (math.nan if step == 3 else 0.0)).backward()
            optimizer.step()
    (loss,) = [seen.finding.message for seen in watch.findings if seen.finding.rule.code == "AMP612"]
    assert loss == f"the loss is nan: {said}"


def test_a_part_that_alone_is_trained_is_seen_within_the_whole():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x, size=1.0):
            with torch.no_grad():
                hidden = (self.body(x) * size).exp()  # frozen
            return self.head(hidden)

    def script():
        torch.manual_seed(0)
        model = Frozen()
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
        for step, (x, y) in enumerate(batches(4), 1):
            optimizer.zero_grad()
            F.cross_entropy(model(x, size=1e4 if step == 3 else 1.0), y).backward()
            optimizer.step()

    found = only_op_in(watched(script))
    assert (found.rule.name, found.place.line, found.place.step) == ("overflow", line_of("frozen"), 3)


def test_a_wrapped_model_is_replayed_as_a_whole():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 4)

        def forward(self, x):
            return self.fc(x).log()  # whole

    def script():
        torch.manual_seed(0)
        model = nn.DataParallel(Whole())
        list(model.module.fc.parameters())  # which is then known, too, and has all parameters
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, _ = next(batches(1))
        model(x).mean().backward()
        optimizer.step()

    found = only_op_in(watched(script))
    assert (found.rule.name, found.place.line) == ("outside-domain", line_of("whole"))


def test_inputs_that_were_written_to_are_not_replayed():
    watch = watched(lambda: train_in_half(before_backward=lambda x: x.zero_()))
    assert not ops_in(watch)
    assert about_replays(watch) == ["Step 4 could not be replayed: the inputs of Net have been modified since."]


def test_a_batch_that_a_script_empties_is_still_there():
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 4)

        def forward(self, batch):
            return self.fc(batch["x"])

    def script():
        torch.manual_seed(0)
        model = Takes()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        batch = {"x": torch.full((2, 16), math.nan)}
        scaler.scale(model(batch).mean()).backward()
        batch.clear()
        scaler.step(optimizer)

    assert traced(only_op_in(watched(script)))["source"]["name"] == "batch['x']"


def test_a_model_that_fails_when_it_runs_again_is_said_to():
    class Once(nn.Module):
        def __init__(self, source):
            super().__init__()
            self.fc, self.__dict__["source"] = nn.Linear(16, 4), source

        def forward(self):
            return self.fc(next(self.source))

    def script():
        model = Once(iter([torch.full((2, 16), math.nan)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model().mean().backward()
        optimizer.step()

    with Watch(every=1, timing=False) as watch:
        script()
    assert about_replays(watch) == ["Step 1 could not be replayed: running the model again failed with StopIteration."]


# Ordinary overflow


@pytest.mark.parametrize("half", [True, False])
def test_a_scaler_that_looks_for_its_scale_is_left_alone(half):
    """The scale is far too high for what comes in (in half precision), or for a product within (in FP32)."""

    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 4)

        def forward(self, x):
            return self.fc(x) if half else self.fc(x * 1e12)

    def script():
        torch.manual_seed(0)
        model = Steep()
        model.fc.weight.data *= 1.0 if half else 1e-12
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24 if half else 2.0**100, growth_interval=1000)
        for x, y in batches(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert 1 < scaler.get_scale() < 2.0 ** (21 if half else 97)  # skipped, three times at least, and found

    watch = watched(script)
    assert not ops_in(watch)
    assert not about_replays(watch)


def test_no_more_than_a_few_steps_are_replayed(monkeypatch):
    from ampwise.watch import bad_step_watch

    replayed = []

    def counted(calls, losses, step):
        replayed.append(step.number)
        return explain(calls, losses, step)

    explain = bad_step_watch.replay_step
    monkeypatch.setattr(bad_step_watch, "replay_step", counted)
    watched(lambda: train_in_half(steps=20, bad=range(2, 21)))
    assert replayed == [2, 3, 5, 9, 17]
    assert APART > 20


# The script does not notice


class Restless(Net):
    """Draws from every source there is, counts, keeps, prints, and changes its buffers and a buffer's place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4))
        self.kept, self.own = [], torch.Generator().manual_seed(3)

    def forward(self, x):
        print("runs")
        self.kept.append(len(self.kept))
        self.seen += 1
        noise = random.random() + numpy.random.rand() + torch.rand((), generator=self.own)
        out = super().forward(x) + noise.to(x.dtype) * torch.randn(4)
        self.last = out.detach().float().mean(0)
        return out


def everything(model, optimizer, scaler):
    states = {
        **model.state_dict(),
        **{f"{n}{k}": v for n, s in optimizer.state_dict()["state"].items() for k, v in s.items()},
    }
    bits = {name: each.double().nan_to_num(1e9, 2e9, 3e9).sum().item().hex() for name, each in states.items()}
    counters = getattr(model, "kept", None), model.block.calls, scaler.get_scale()
    return bits, counters, torch.rand(1).item(), random.random(), numpy.random.rand()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [Net, Restless])
def test_all_goes_on_as_it_would_have(kind, fused, capfd):
    def run():
        torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
        model = kind()
        return everything(*train_in_half(steps=10, bad=(3, 4, 8), model=model, fused=fused))

    plain = run()
    alone = capfd.readouterr()
    with Watch(every=1, timing=False) as watch:
        under_watch = run()
    assert under_watch == plain
    assert capfd.readouterr() == alone
    assert not watch.failures
    assert {each.rule.name for each in ops_in(watch)} == {"half-overflow"}


def test_the_watch_does_not_count_what_it_runs_itself():
    watch = watched(lambda: train_in_half(steps=8, bad=(2,), model=None))
    assert sum(watch._tracker.run_events.forwards.values()) == 8
    assert watch._kinds["Backward"] == 8
    assert watch.steps == 8


@pytest.mark.half_by_day
@pytest.mark.parametrize("part", [False, True])
def test_a_compiled_model_is_replayed_as_written_and_compiled_once(part):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def script():
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fast = model if part else torch.compile(model, backend=backend)
        model.block.fc = torch.compile(model.block.fc, backend=backend) if part else model.block.fc
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step, (x, y) in enumerate(batches(5), 1):
            if step == 3:
                x[0] = math.nan
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(fast(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()

    torch._dynamo.reset()
    script()
    alone = len(compiled)
    torch._dynamo.reset()
    found = only_op_in(watched(script))
    assert len(compiled) == 2 * alone
    assert found.rule.name == "bad-batch"
    assert "The model is compiled; the eager replay fails too." in traced(found)["remarks"]


def test_a_step_within_the_scripts_own_autocast():
    def script():
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step, (x, y) in enumerate(batches(4), 1):
            with torch.autocast("cpu", torch.float16):
                model.block.gain = 1e5 if step == 2 else 1.0
                optimizer.zero_grad()
                scaler.scale(F.cross_entropy(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
        return [each.sum().item() for each in model.parameters()]

    plain, results = script(), []
    found = only_op_in(watched(lambda: results.append(script())))
    assert results == [plain]
    assert (found.rule.name, found.place.line) == ("half-overflow", line_of("overflow"))


def test_nothing_is_kept_once_a_step_is_over():
    def script():
        train_in_half(bad=())
        assert not list(watch.step_watch.calls)

    with Watch(every=1, timing=False) as watch:
        script()


def test_of_passes_without_a_step_the_last_few_are_kept():
    with Watch(every=1, timing=False) as watch:
        model = Net()
        _ = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, _ in batches(MOST + 5):
            model(x)
        kept = [call.args[0] for call in watch.step_watch.calls]
        assert len(kept) == MOST
        assert kept[-1] is x
    assert not list(watch.step_watch.calls)


def test_a_sparse_gradient_of_the_output_stops_no_backward_pass():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self):
            return self.weight * 2

    with Watch(every=1, timing=False) as watch:
        model = Table()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        F.embedding(torch.tensor([1, 2]), model(), sparse=True).sum().backward()
        optimizer.step()
    assert watch.failures == []


def test_copies_of_a_model_and_its_output_bear_nothing_of_ours(tmp_path):
    with Watch(every=1, timing=False):
        model = Net()
        torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(next(batches(1))[0])
        torch.save(model, tmp_path / "model.pt")
        copy.deepcopy(model)
        assert not out._backward_hooks


def test_our_engine_explains_its_steps_itself():
    def script():
        model = nn.Linear(4, 1)
        engine = ampwise.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
        for step in range(1, 6):
            x = torch.full((2, 4), math.inf if step == 3 else 1.0)
            engine.step(lambda x=x: model(x).square().mean())

    watch = watched(script)
    assert [(seen.finding.place.step, seen.first_step) for seen in watch.findings if is_cause(seen.finding)] == [(3, 3)]
    assert not list(watch.step_watch.calls)


# The command


SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for step in range(3):
    x = torch.full((3, 4), float("nan") if step == 1 else 1.0)
    optimizer.zero_grad()
    scaler.scale(model(x).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_what_a_capsule_has_no_form_for_is_said(tmp_path):
    class Odd(nn.Linear):
        def forward(self, batch):
            return super().forward(batch.x)

    class Batch:
        __slots__ = ("x",)

    def script():
        model, batch = Odd(4, 2), Batch()
        batch.x = torch.full((3, 4), math.nan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch).mean().backward()
        optimizer.step()

    watch = watched(script, capsules=tmp_path / "saved")
    assert len(ops_in(watch)) == 1
    (sentence,) = [each for each in watch.not_measured() if "saved" in each]
    assert sentence.startswith("Step 1 could not be saved: ")
    assert not list(tmp_path.glob("saved/*"))


@pytest.mark.parametrize("weights", [True, False])
def test_capsules_are_written_where_they_are_asked_for(warm, tmp_path, weights):
    from ampwise.trace.capsule import read

    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--capsule", "saved", *([] if weights else ["--no-weights", "--quiet"])]
    done = warm.run("-m", "ampwise", "run", "-o", "out", *words, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if weights:
        assert "AMP901" in done.stderr
        assert "  ampwise replay saved/step-000002 MAKE" in done.stderr
        assert re.search(r"^ampwise: saving step 2 in \S+saved \([\d.]+ \w+\)$", done.stderr, re.MULTILINE)
    else:
        assert done.stderr == ""
    (capsule,) = (tmp_path / "saved").iterdir()
    contents = read(capsule)
    assert contents.step == 2
    assert contents.args[0].isnan().all()
    assert contents.args[0].shape == (3, 4)
    assert set(contents.weights) == ({"weight", "bias"} if weights else set())
    assert [each.rule.code if hasattr(each, "rule") else each["code"] for each in contents.findings] == ["AMP901"]
    found = json.loads((tmp_path / "out" / "findings.json").read_text())["findings"]
    assert "AMP901" in json.dumps(found)
