"""Gradients and updates: what is lost, and what spreads."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import ampwise

from .claim import claim


@claim(
    "Clipping tames gradients that are inf or NaN.",
    verdict="false",
    truth="It spreads them. One NaN makes the norm NaN, and by it every gradient; one inf makes every other gradient "
    "0 and itself NaN. With FP16 the scaler skips such a step. In BF16 and FP32 nothing does, unless something checks "
    "the norm: `Engine` does, in every precision.",
)
def test_clipping_spreads_what_is_not_finite():
    def clipped(*gradients):
        weight = nn.Parameter(torch.zeros(len(gradients)))
        weight.grad = torch.tensor(gradients)
        clip_grad_norm_([weight], max_norm=1.0)
        return str(weight.grad.tolist())

    assert clipped(1.0, 2.0, math.nan) == "[nan, nan, nan]"
    assert clipped(1.0, 2.0, math.inf) == "[0.0, 0.0, nan]"
    for precision in ("fp32", "bf16", "fp16"):
        model = nn.Linear(1, 1)
        engine = ampwise.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, clip_norm=1.0)
        before = model.weight.detach().clone()
        assert engine.step(lambda x, model=model: model(x).sum(), torch.tensor([[math.nan]])).skipped
        assert torch.equal(model.weight, before)


@claim(
    "More than 5% of zeros among the gradients means that they underflow.",
    verdict="false",
    truth="Zeros are normal. In a small text model that learns well in FP32, more than 90% of the embedding's "
    "gradients and more than 40% of all are exactly 0: words that a batch does not have, units that ReLU switches "
    "off. What matters is the share that is not 0 in FP32 and would be in FP16 at the current scale, here none, and "
    "whether it grows.",
    also=["tests/rules/amp6xx_gradients/test_clean_runs.py::test_a_real_run_is_clean"],
)
def test_zeros_of_a_healthy_run():
    torch.manual_seed(0)
    words, model = torch.randint(200, (20, 8)), nn.Sequential(nn.Embedding(200, 32), nn.Linear(32, 32), nn.ReLU())
    head = nn.Linear(32, 200)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer, losses = torch.optim.AdamW(parameters, lr=1e-2), []
    for turn in range(60):
        batch = words[turn % 10 * 2 :][:2]
        loss = nn.functional.cross_entropy(head(model(batch[:, :-1])).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    everything = ampwise.census(torch.cat([weight.grad.flatten() for weight in parameters]))
    embedding = ampwise.census(model[0].weight.grad)
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])
    assert embedding.zeros / embedding.count > 0.9
    assert everything.zeros / everything.count > 0.4
    assert everything.flushed("fp16", 16) == 0


@claim(
    "Weights in BF16 train as those in FP32 do.",
    verdict="false",
    truth="With 8 significant bits, a change below 1/512 of a weight is rounded away: after 1,000 steps of SGD that "
    "take 0.001 each, a weight of 1 is 1 in BF16 and 0 in FP32. It takes weights in FP32, stochastic rounding, or a "
    "Kahan sum ([low_bit](low_bit.md)).",
    also=["tests/train/low_bit/test_parity.py::test_a_gpt_ends_where_fp32_weights_end_and_plain_bf16_does_not"],
)
def test_updates_that_bf16_rounds_away():
    def trained(dtype):
        weight = nn.Parameter(torch.ones(1, dtype=dtype))
        optimizer = torch.optim.SGD([weight], lr=0.001)
        weight.grad = torch.ones_like(weight)
        for _ in range(1000):
            optimizer.step()
        return weight.item()

    assert trained(torch.bfloat16) == 1.0
    assert trained(torch.float32) == pytest.approx(0, abs=1e-4)


@claim(
    "A step that the scaler skips changes nothing.",
    verdict="false",
    truth="Weights and the optimizer's state stay as they were. BatchNorm has already used the batch in the forward "
    "pass, and a batch that is not finite leaves NaN in its statistics. A scheduler that is stepped anyway "
    "advances.",
    also=["tests/train/test_schedule.py::test_a_scheduler_follows_late_news_before_the_next_step_and_once"],
)
def test_what_a_skipped_step_changes():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), torch.amp.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    step_on(model, optimizer, scaler, torch.randn(4, 2))
    before = [tensor.clone() for tensor in kept_by(model, optimizer)]
    step_on(model, optimizer, scaler, torch.full((4, 2), math.inf))
    scheduler.step()  # noqa: AMP114
    assert len(before) == 8
    assert all(map(torch.equal, before, kept_by(model, optimizer)))
    assert scaler.get_scale() == 32768.0
    assert model[0].running_mean.isfinite().logical_not().all()
    assert model[0].running_var.isnan().all()
    assert scheduler.get_last_lr() == [0.5]


def kept_by(model, optimizer):
    """Weights, and the momentum of each."""
    weights = [*model.parameters()]
    return [weight.detach() for weight in weights] + [optimizer.state[weight]["momentum_buffer"] for weight in weights]


def step_on(model, optimizer, scaler, x):
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
