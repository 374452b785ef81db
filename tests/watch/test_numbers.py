"""The numbers of a watched run against those that the script itself can compute."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampwise
from ampwise import census
from ampwise.watch.watch import Watch

STEPS = 12


class Kept:
    """A record that stays in memory."""

    def __init__(self):
        self.rows, self.samples, self.facts = [], [], {}

    def step(self, row):
        self.rows.append(row)

    def layers(self, sample):
        self.samples.append(sample)

    def findings(self, found):
        self.found = list(found)

    def fact(self, name, value):
        self.facts[name] = value

    def sample_every(self, step):
        return 1

    def close(self, *end):
        self.end = end


class Trained:
    """A small training loop that writes down what a watch should see."""

    def __init__(self, *, scaler=None, fused=False, accumulate=1, unscale=False, clip=False, dtype=torch.float16):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=fused)
        self.scaler, self.accumulate, self.unscale, self.clip, self.dtype = scaler, accumulate, unscale, clip, dtype
        self.truth, self.censuses = [], []

    def gradients(self, scale):
        return {name: each.grad.double() / scale for name, each in self.model.named_parameters()}

    def step(self):
        losses, scaler = [], self.scaler
        self.optimizer.zero_grad()
        for _ in range(self.accumulate):
            x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))
            with torch.autocast("cpu", dtype=self.dtype):
                loss = F.cross_entropy(self.model(x), y) / self.accumulate
            losses.append(loss.item())
            (loss if scaler is None else scaler.scale(loss)).backward()
        scale = 1.0 if scaler is None else scaler.get_scale()
        true = self.gradients(scale)
        norm = math.sqrt(sum(float(each.square().sum()) for each in true.values()))
        self.censuses.append({name: census(each.float()) for name, each in true.items()})
        if self.unscale:
            scaler.unscale_(self.optimizer)
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        before = [each.detach().clone() for each in self.model.parameters()]
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        moved = any(not torch.equal(one, other) for one, other in zip(before, self.model.parameters(), strict=True))
        self.truth.append((sum(losses), norm, None if scaler is None else scale, not moved))


WAYS = {
    "FP16": {"scaler": 2.0**10},
    "FP16, from far too high a scale": {"scaler": 2.0**27},
    "FP16, fused, from far too high a scale": {"scaler": 2.0**27, "fused": True},
    "FP16, unscaled and clipped": {"scaler": 2.0**10, "unscale": True, "clip": True},
    "FP16, accumulated": {"scaler": 2.0**10, "accumulate": 3},
    "BF16": {"dtype": torch.bfloat16},
    "BF16, clipped, accumulated": {"dtype": torch.bfloat16, "clip": True, "accumulate": 2},
}


@pytest.mark.half_by_day
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ampwise.GradScaler], ids=["torch", "ours"])
@pytest.mark.parametrize("way", WAYS)
def test_rows_say_what_the_script_computes(way, kind):
    options = dict(WAYS[way])
    record = Kept()
    with Watch(record, every=1, timing=False) as watch:
        if "scaler" in options:
            options["scaler"] = kind("cpu", init_scale=options["scaler"])
        trained = Trained(**options)
        for _ in range(STEPS):
            trained.step()
    assert not watch.failures
    assert [row.step for row in record.rows] == list(range(1, STEPS + 1))
    for row, (loss, norm, scale, skipped) in zip(record.rows, trained.truth, strict=True):
        assert row.skipped == skipped
        assert row.scale == scale
        assert row.loss == pytest.approx(loss, rel=1e-3)
        assert row.norm == pytest.approx(norm, rel=1e-5, nan_ok=True) or (skipped and not math.isfinite(row.norm))
        assert row.lr == 1e-3


@pytest.mark.parametrize(
    "way", ["FP16", "FP16, unscaled and clipped", "FP16, accumulated", "BF16, clipped, accumulated"]
)
def test_samples_are_of_true_gradients_before_clipping(way):
    options = dict(WAYS[way])
    record = Kept()
    with Watch(record, every=1, timing=False):
        if "scaler" in options:
            options["scaler"] = torch.amp.GradScaler("cpu", init_scale=options["scaler"])
        trained = Trained(**options)
        for _ in range(3):
            trained.step()
    assert [sample.first for sample in record.samples] == [1, 2, 3]
    for sample, truth in zip(record.samples, trained.censuses, strict=True):
        assert dict(sample.layers) == truth


def test_samples_of_steps_that_were_skipped_are_taken_at_the_next():
    record = Kept()
    with Watch(record, every=4, timing=False):
        trained = Trained(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**27))
        for _ in range(STEPS):
            trained.step()
    skipped = {number for number, (*_, skipped) in enumerate(trained.truth, start=1) if skipped}
    assert skipped
    assert record.samples
    assert not skipped & {sample.first for sample in record.samples}
    assert all(census.finite for sample in record.samples for census in sample.layers.values())


def test_the_engine_is_watched_through_its_own_reading():
    record = Kept()
    with Watch(record, every=1, timing=False) as watch:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        engine = ampwise.Engine(
            model, torch.optim.AdamW(model.parameters(), fused=True), "fp16", clip_norm=0.1, accumulate=2
        )
        steps = [
            step
            for _ in range(10)
            if (step := engine.step(lambda: F.cross_entropy(model(torch.ones(2, 8)), torch.tensor([0, 1])))).closed
        ]
    assert not watch.failures
    assert not list(watch.findings)
    assert [(row.norm, row.skipped) for row in record.rows] == [
        (pytest.approx(step.grad_norm, rel=1e-6), step.skipped) for step in steps
    ]
    assert [row.loss for row in record.rows] == [pytest.approx(step.loss, rel=1e-6) for step in steps]
    assert dict(record.samples[-1].layers) == dict(engine.census())


def test_each_scaler_has_its_own_scale():
    record = Kept()
    truth = []
    with Watch(record, every=1, timing=False):
        models = [nn.Linear(4, 2), nn.Linear(4, 2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**n) for n in (4, 12)]
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            gradients = [each.grad / scaler.get_scale() for each in model.parameters()]
            truth.append(float(torch.stack([each.norm() for each in gradients]).norm()))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert [row.norm for row in record.rows] == [pytest.approx(norm) for norm in truth]


def test_what_the_script_does_to_its_loss_later_is_not_the_loss():
    record = Kept()
    with Watch(record, every=1, timing=False):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.ones(2, 4)).square().mean()
        truth = loss.item()
        loss.backward()
        with torch.no_grad():
            loss.mul_(100)
        optimizer.step()
    assert record.rows[0].loss == pytest.approx(truth)


def test_two_optimizers_have_rows_of_their_own():
    record = Kept()
    with Watch(record, every=1, timing=False):
        models = [nn.Linear(4, 2), nn.Linear(4, 2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1 * (1 + n)) for n, model in enumerate(models)]
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    assert [(row.optimizer, row.step, row.lr) for row in record.rows] == [
        (0, 1, 0.1), (1, 1, 0.2), (0, 2, 0.1), (1, 2, 0.2), (0, 3, 0.1), (1, 3, 0.2)
    ]  # fmt: skip


class Broken(nn.Module):
    """Bad from a given pass on, in its second layer."""

    def __init__(self, since):
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(4, 4),
            nn.Sequential(nn.ReLU(), nn.Linear(4, 4)),
            nn.Linear(4, 2),
        )
        self.since, self.passes = since, 0

    def forward(self, x):
        self.passes += 1
        hidden = self.second(self.first(x))
        if self.passes >= self.since:
            hidden = hidden / 0.0
        return self.third(hidden)


def train_broken(*, activations, scaled):
    with Watch(every=1, timing=False, activations=activations) as watch:
        model = Broken(since=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
        for _ in range(10):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16 if scaled else torch.bfloat16):
                loss = model(torch.ones(2, 4)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not watch.failures
    found = {seen.finding.rule.code: seen.finding for seen in watch.findings}
    assert found["AMP612"].place.step == 4
    return found["AMP612"].message


@pytest.mark.parametrize("activations", [False, True])
def test_the_first_module_that_is_not_finite_is_named(activations):
    message = train_broken(activations=activations, scaled=True)
    assert "`third` is the first module whose output is not finite" in message  # what divides is no module


def test_weights_that_are_not_finite_blame_no_module():
    assert "`" not in train_broken(activations=False, scaled=False)
    assert "`third`" in train_broken(activations=True, scaled=False)


def test_activations_have_their_largest_magnitudes():
    with Watch(every=1, timing=False, activations=True) as watch:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        largest = 0.0
        for _ in range(5):
            out = model(torch.randn(3, 4))
            largest = max(largest, float(out.detach().abs().max()))
            out.sum().backward()
            optimizer.step()
    assert watch.step_watch.largest["1"] == ("float32", pytest.approx(largest))
    assert set(watch.step_watch.largest) == {"0", "1", "Sequential"}


def _made_in_bf16():
    torch.set_default_dtype(torch.bfloat16)  # the line to report
    try:
        return nn.Linear(64, 64, bias=False)
    finally:
        torch.set_default_dtype(torch.float32)


HALF = {
    "a cast": (lambda: nn.Linear(64, 64, bias=False).bfloat16(), 0),
    "a cast by its dtype": (lambda: nn.Sequential(nn.Linear(64, 64, bias=False)).to(torch.bfloat16)[0], 0),
    "a constructor": (lambda: nn.Linear(64, 64, bias=False, dtype=torch.bfloat16), 0),
    "the default dtype": (_made_in_bf16, 1),
}


@pytest.mark.parametrize("how", HALF)
def test_weights_that_do_not_move_are_counted(how):
    make, lines_down = HALF[how]
    with Watch(every=1, timing=False) as watch:
        torch.manual_seed(0)
        model = make()
        nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(8, 64, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
    assert not watch.failures
    places = {seen.finding.rule.code: seen.finding.place for seen in watch.findings}
    expected = make.__code__.co_firstlineno + lines_down
    assert (places["AMP611"].file, places["AMP611"].line) == (__file__, expected)


def test_nothing_of_the_script_is_kept_alive():
    import gc
    import weakref

    with Watch(every=1, timing=False) as watch:
        trained = Trained(scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
        trained.step()
        alive = [weakref.ref(each) for each in (trained.model, trained.optimizer, trained.scaler)]
        del trained
        gc.collect()
        assert [each() for each in alive] == [None, None, None]
    assert not watch.failures
