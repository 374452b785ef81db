"""The watch on a GPU: the same losses, no waits, and what only a device shows."""

import pytest
import torch
from torch import nn

import ampwise
from ampwise.watch.watch import Watch

pytestmark = pytest.mark.gpu


def train(steps=24, *, fused=True, engine=False, item=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**26, enabled=not engine)
    if engine:
        by_engine = ampwise.Engine(model, optimizer, "fp16", clip_norm=1.0, scaling={"init_scale": 2.0**26})
    x, y = torch.randn(32, 64, device="cuda"), torch.randint(0, 8, (32,), device="cuda")
    losses = []
    for _ in range(steps):
        if engine:
            by_engine.step(lambda: nn.functional.cross_entropy(model(x), y))
            continue
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        for _ in range(5 if item else 0):
            loss.item()
    return [each.item().hex() for each in losses] + [model[0].weight.double().sum().item().hex()]


class Rows:
    def __init__(self):
        self.rows = []

    def step(self, row):
        self.rows.append(row)

    def __getattr__(self, name):
        return lambda *args: 1


@pytest.mark.parametrize("way", [{}, {"fused": False}, {"engine": True}], ids=str)
def test_losses_are_those_of_an_unwatched_run(way):
    plain = train(**way)
    record = Rows()
    with Watch(record, every=1) as watch:
        assert train(**way) == plain
    assert not watch.failures
    assert [row.step for row in record.rows] == list(range(1, 25))
    assert record.rows[0].skipped
    assert not record.rows[-1].skipped
    assert record.rows[-1].norm > 0
    assert record.rows[0].scale == 2.0**26
    assert not [seen for seen in watch.findings if seen.finding.rule.code < "AMP500"]


@pytest.mark.parametrize("way", [{}, {"engine": True}], ids=str)
def test_nothing_waits(way):
    with Watch(timing=False):
        _quiet(**way)


def _quiet(engine=False):
    model = nn.Linear(64, 8, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=not engine)
    by_engine = ampwise.Engine(model, optimizer, "fp16") if engine else None
    x = torch.randn(32, 64, device="cuda")

    def step():
        if by_engine is not None:
            by_engine.step(lambda: model(x).square().mean())
            return
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        step()  # kernels are compiled, tables made
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_waits_of_the_script_are_reported_with_their_line():
    with Watch() as watch:
        train(120, item=True)
    assert watch.time_use.syncs_per_step >= 5
    assert "AMP502" in {seen.finding.rule.code for seen in watch.findings}
    assert watch.time_use.half_share > 0.9
