"""A guard over BF16 weights: what is wider has FP32 weights, whatever they were before; or it is not to be had."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampwise import Engine, Guard, Policy
from ampwise.guard.ladder import Ladder

KINDS = ["bf16-pure", "bf16-pure,kahan", "bf16-pure,bf16-states"]


def bf16_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).bfloat16()


def guarded(model, kind, folder):
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), kind, trace=False)
    return engine, Guard(engine, folder, ladder=Ladder(skips=1, rollbacks=0, healthy=1), snapshot_every=1, resume=False)


def trained(guard, model, count, *bad):
    for number in range(count):
        x = torch.randn(4, 8) * (torch.nan if number in bad else 1)
        guard.step(lambda x: (model(x).float() - 1).square().mean(), x)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wider_has_fp32_weights_and_moments(kind, tmp_path, capsys):
    model = bf16_model()
    engine, guard = guarded(model, kind, tmp_path)
    with guard:
        trained(guard, model, 8, 4)
        assert engine.precision == "bf16"
        weight = model[0].weight
        before = weight.detach().clone()
        assert {each.dtype for each in model.parameters()} == {torch.float32}
        assert {each.dtype for each in engine.optimizers[0].state[weight].values()} == {torch.float32}
        engine.optimizers[0].param_groups[0]["lr"] = 1e-5
        trained(guard, model, 2)
    assert (weight != before).float().mean() > 0.9
    capsys.readouterr()


def test_back_from_bf16_weights_to_a_state_of_fp32_ones(tmp_path, capsys):
    """With the rest kept, nothing of them is lost."""
    model = bf16_model().float()
    engine, guard = guarded(model, "fp32", tmp_path)
    with guard:
        trained(guard, model, 4)
        weight, recovery = model[0].weight, guard._recovery
        recovery._restore(older=False)
        before = weight.detach().clone()
        engine.change_precision("bf16-pure,kahan")
        recovery._restore(older=False)
        assert weight.dtype == torch.bfloat16
        engine.change_precision("fp32")
        assert torch.equal(weight, before)
    capsys.readouterr()


@pytest.mark.parametrize("kind", KINDS)
def test_back_to_a_state_of_before_the_change(kind, tmp_path, capsys):
    """It was saved with BF16 weights, and what goes on from it has FP32 ones, and what was kept of them."""
    model = bf16_model()
    engine, guard = guarded(model, kind, tmp_path)
    with guard:
        trained(guard, model, 4)
        weight, recovery = model[0].weight, guard._recovery
        assert recovery._restore(older=False)[0] > 0
        engine.change_precision("fp32")
        before = weight.detach().clone()
        recovery._restore(older=False)
        assert engine.precision == "fp32"
        assert torch.equal(weight, before)
        assert weight.dtype == torch.float32
        trained(guard, model, 2)
        assert {each.dtype for each in engine.optimizers[0].state[weight].values()} == {torch.float32}
    capsys.readouterr()


def test_what_wraps_the_model_has_no_wider_precision(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        found = []
        for model in (bf16_model(), DistributedDataParallel(bf16_model())):
            _, guard = guarded(model, "bf16-pure", tmp_path / str(len(found)))
            with guard:
                found.append([guard._recovery._wider([]), guard._recovery._wider(["0"])])
    finally:
        model = guard = None  # DDP must not be the last to hold the group: see test_a_wrapped_model_is_refused
        gc.collect()
        dist.destroy_process_group()
    assert found == [[Policy("bf16"), Policy("bf16-pure").keep("fp32", "0")], [None, None]]
