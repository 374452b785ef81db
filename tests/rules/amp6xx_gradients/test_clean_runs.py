"""Healthy runs have no findings: made up ones, and a real one."""

import random
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn

from ampwise.numbers.census.measure import census
from ampwise.runs.rows import LayerSample, StepRow
from ampwise.watch.gradient_health import BadStep, GradientHealth, suggested_settings

from ...for_each import for_each
from .runs import NAMES, findings, gradients, sampled, scaler_rows, stepped, through_fp16


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(500, 16)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU()) for _ in range(4)))
        self.head = nn.Linear(16, 5)

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens).mean(1)))


def train(model, steps, init_scale, every=5, lr=1e-2):
    """FP16 autocast and torch's scaler on the CPU, watched as a script would be."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    health = GradientHealth(precision="fp16", names=list(names.values()), growth_interval=2000)
    torch.manual_seed(0)
    for step in range(1, steps + 1):
        tokens = torch.randint(0, 500, (32, 6))
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(tokens)
        loss = nn.functional.cross_entropy(output.float(), tokens[:, 0] % 5)
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in names]).item()
        bad = tuple(names[p] for p in names if not p.grad.isfinite().all())
        if step % every == 0:
            layers = {name: census(p.grad) for p, name in names.items()}
            health.add_sample(LayerSample(first=step, last=step, scale=scale, layers=layers))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        health.add_step(
            StepRow(step=step, loss=loss.item(), scale=scale, norm=norm, skipped=scaler.get_scale() < scale, lr=lr)
        )
        if bad:
            health.add_bad(BadStep(step=step, loss=loss.item(), scale=scale, parameters=bad))
    return health


@pytest.mark.half_by_day
@pytest.mark.parametrize("init_scale", [2.0**16, 2.0**24])
def test_a_real_run_is_clean(init_scale):
    torch.manual_seed(1)
    health = train(Classifier(), 60, init_scale)
    assert health.steps == 60
    assert health.samples == 12
    assert len(health.underflows) == len(list(Classifier().parameters()))
    assert findings(health) == {}
    if init_scale == 2.0**24:
        assert health.search_skips, "the scale must have been too high at first, or this tests nothing"


def test_a_real_run_with_a_dead_layer_is_not():
    model = Classifier()
    nn.init.constant_(model.body[2][0].bias, -1.0)
    model.body[2][1] = nn.Identity()
    nn.init.zeros_(model.body[2][0].weight)
    health = train(model, 20, 2.0**12)
    assert list(findings(health)) == ["AMP604"]


def test_a_real_run_at_a_scale_far_too_low_loses_gradients():
    torch.manual_seed(1)
    assert "AMP601" in findings(train(Classifier(), 30, 2.0**-9))


@pytest.mark.parametrize("start", [16, 24])
def test_the_search_for_a_scale_is_clean(start):
    health = stepped(scaler_rows(lambda step, scale: scale > 2.0**7, 100, init_scale=2.0**start))
    for step in range(1, start - 6):
        health.add_bad(BadStep(step=step, loss=1.0, scale=2.0 ** (start + 1 - step), parameters=tuple(NAMES)))
    assert findings(health) == {}


@pytest.mark.parametrize("interval", [20, 100, 2000])
def test_one_skip_in_each_growth_interval_is_by_design(interval):
    rows = scaler_rows(lambda step, scale: scale > 2.0**16, 5000, growth_interval=interval)
    assert findings(stepped(rows, growth_interval=interval)) == {}


def test_an_empty_run_is_clean():
    assert findings(GradientHealth()) == {}
    assert not suggested_settings(GradientHealth())
    assert findings(GradientHealth(precision="fp16")) == {}


@for_each("precision", ["fp16", "bf16", "fp32"])
def test_made_up_gradients_of_ordinary_size_are_clean(precision):
    rng = np.random.default_rng(0)

    def at(number):
        made = gradients(rng, 1e-3)
        made["embedding.weight"] = rng.normal(0, 1e-3, 4000) * (np.arange(4000) < 60)
        made["relu.weight"] = made["layers.1.weight"] * (rng.random(400) < 0.2)
        return made

    assert findings(sampled(at, 30, precision=precision)) == {}


def test_memory_is_flat():
    rng, rand = np.random.default_rng(0), random.Random(0)
    samples = [sampled(lambda number: gradients(rng, 1e-3), 1).recent[0] for _ in range(4)]
    health = GradientHealth(precision="fp16", names=NAMES)

    def go_on(steps):
        for _ in range(steps):
            step = health.steps + 1
            skipped = rand.random() < 0.1
            row = StepRow(step=step, loss=rand.random() + 0.5, norm=rand.random(), scale=65536.0, skipped=skipped)
            health.add_step(row)
            if skipped:
                health.add_bad(BadStep(step=step, loss=1.0, scale=65536.0, parameters=("layers.0.weight",)))
            if step % 8 == 0:
                census = samples[step % 4]
                health.add_sample(LayerSample(first=step, last=step, scale=65536.0, layers=census.layers))

    tracemalloc.start()
    try:
        go_on(1000)
        before = tracemalloc.get_traced_memory()[0]
        go_on(1000)
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()


def test_the_precision_may_be_known_only_later():
    rng = np.random.default_rng(0)
    health = sampled(lambda number: {"w": through_fp16(rng.normal(0, 2.0**-24, 400), 1.0)}, scale=1.0, precision="fp32")
    assert not findings(health)
    health.precision = "fp16"
    assert list(findings(health)) == ["AMP601"]
