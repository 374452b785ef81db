"""Loss scaling: the GradScaler, and what happens to gradients."""

import json
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import ampwise

from .claim import claim

FP16, BF16 = torch.float16, torch.bfloat16


def weights_of(*values, dtype=torch.float32):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def step(scaler, optimizer, weight, slope):
    """A step in which the gradient of every weight is ``slope``, a number or one for each."""
    optimizer.zero_grad()
    scaler.scale((weight * torch.as_tensor(slope)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@claim(
    "The loss scale is 65536 at most and doubles after every good step.",
    verdict="false",
    truth="It begins at 65536 and doubles after 2,000 good steps in a row. There is no ceiling but FP32's own: it "
    "goes on to 2¹²⁷. And no floor: after 166 overflows in a row it is 0, `found_inf` then reports no overflow, and "
    "the next good batch makes NaN of the weights.",
    also=[
        "tests/train/scaler/test_torch_demands.py::test_the_defaults_are_torchs",
        "tests/train/scaler/test_torch_demands.py::test_growth_and_backoff_are_counted_exactly",
        "tests/train/scaler/test_torch_demands.py::test_the_scale_never_grows_to_inf",
    ],
)
def test_how_the_scale_moves():
    weight, scaler = weights_of(1.0), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (65536.0, 2000)
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": 1998})  # as if there had been so many
    scales = [scaler.get_scale() for _ in range(2) if step(scaler, optimizer, weight, 1.0) is None]
    assert scales == [65536.0, 131072.0]
    eager = torch.amp.GradScaler("cpu", growth_interval=1)
    for _ in range(120):
        step(eager, optimizer, weight, 1e-30)
    assert eager.get_scale() == 2.0**127
    scaler = torch.amp.GradScaler("cpu")
    assert overflows_until_zero(scaler, optimizer, weight) == 166
    assert weight.isfinite().all()
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    assert [found.item() for found in scaler._found_inf_per_device(optimizer).values()] == [0.0]
    scaler.step(optimizer)
    assert weight.isnan().all()


def overflows_until_zero(scaler, optimizer, weight):
    overflows = 0
    while scaler.get_scale() > 0:
        step(scaler, optimizer, weight, math.inf)
        overflows += 1
    optimizer.zero_grad()
    return overflows


@claim(
    "`if scaler._found_inf_per_device(optimizer):` tells that the step was skipped.",
    verdict="false",
    truth="It is a dict of tensors by device: true where every gradient is finite, and empty after `update()`. "
    "torch's scaler has no public way to tell (pytorch#67590); `ampwise.GradScaler` has `skipped`.",
    also=["tests/conformance/test_peers.py::test_what_is_recorded_is_what_happens"],
)
def test_found_inf_is_a_dict():
    weight = weights_of(1.0)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    found = scaler._found_inf_per_device(optimizer)
    assert found
    assert [flag.item() for flag in found.values()] == [0.0]
    scaler.step(optimizer)
    scaler.update()
    assert scaler._found_inf_per_device(optimizer) == {}
    ours = ampwise.GradScaler("cpu")  # noqa: AMP302 (BF16 is another test's)
    step(ours, optimizer, weight, 1.0)
    assert not ours.skipped
    step(ours, optimizer, weight, math.inf)
    assert ours.skipped


@claim(
    "Clipping before `unscale_` does nothing.",
    verdict="false",
    truth="It does far too much: gradients that are multiplied by 65536 and clipped to a norm of 1 have, unscaled, a "
    "norm of 1.5e-5. There is no error, and training almost stops.",
    also=["tests/conformance/test_peers.py::test_what_is_recorded_is_what_happens"],
)
def test_clipping_scaled_gradients():
    weight, scaler = weights_of(0.0, 0.0), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
    clip_grad_norm_([weight], max_norm=1.0)  # noqa: AMP101
    scaler.step(optimizer)  # noqa: AMP105
    assert weight.detach().norm().item() == pytest.approx(1 / 65536, rel=1e-5)
    assert f"{1 / 65536:.1e}" == "1.5e-05"


RANKS = """
import json, multiprocessing, os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train(rank, store, second):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0 if rank == 0 else second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(20):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    weights = [torch.zeros(1, 4), torch.zeros(1, 4)]
    dist.all_gather(weights, model.module.weight.detach())
    if rank == 0:
        print(json.dumps((weights[0] - weights[1]).abs().max().item()), flush=True)
    dist.barrier()
    os._exit(0)  # taken apart in order, DDP and its group wait for each other now and then

for number, second in enumerate((65536.0, 32768.0)):
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=train, args=(rank, f"{sys.argv[1]}/{number}", second)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
"""


@claim(
    "Ranks of DDP may have different loss scales.",
    verdict="false",
    truth="DDP averages gradients that are still scaled, and each rank divides by its own scale. Two ranks that "
    "begin at 65536 and 32768 have other weights after 20 steps, and nothing says so. Those that begin alike stay "
    "alike, bit for bit: all see the same averaged gradients.",
    also=["tests/conformance/test_distributed.py::test_ddp_needs_no_collective"],
)
def test_two_ranks_with_two_scales(warm, tmp_path):
    done = warm.run("-c", RANKS, tmp_path, cwd=tmp_path)
    alike, different = (json.loads(line) for line in done.stdout.splitlines())
    assert alike == 0, done.stderr
    assert different > 1e-3


@claim(
    "BF16 needs a GradScaler, to be safe.",
    verdict="false",
    truth="BF16 has the exponents of FP32, so there is no underflow to prevent: trained with a scale of 65536 and "
    "without, the weights are the same bit for bit. A scaler only adds that bad steps are skipped.",
    also=["tests/numbers/formats/test_format.py::test_which_formats_need_a_loss_scale"],
)
def test_a_scale_changes_nothing_in_bf16():
    def trained(enabled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)  # noqa: AMP302
        for _ in range(10):
            with torch.autocast("cpu", BF16):
                loss = model(torch.randn(4, 8)).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [weight.detach() for weight in model.parameters()]

    assert all(map(torch.equal, trained(True), trained(False)))
    assert torch.tensor(1e-30).to(BF16) > 0
    assert torch.tensor(1e-30).to(FP16) == 0


@claim(
    "Multiplying the loss by 1000 is as good as a GradScaler.",
    verdict="false",
    truth="In FP16, gradients below 2.98e-11 are then still lost, and those above 65.5 are inf: nothing checks, and "
    "the optimizer applies them. A GradScaler begins with 65536, skips the step that overflows, and halves its scale.",
    also=["tests/rules/amp7xx_choice/test_choice_rules.py::test_the_price_of_a_manual_scale_is_worked_out"],
)
def test_scaling_by_hand():
    def gradient(slope):
        weight = weights_of(1.0)
        (weight.half() * torch.tensor(slope)).backward(torch.tensor([1000.0]))
        return weight.grad / 1000

    assert gradient(2.97e-11) == 0 < gradient(3e-11)
    assert gradient(65.4).isfinite()
    assert gradient(65.6).isinf()
    weight = weights_of(1.0)
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu")
    weight.grad = gradient(65.6)
    optimizer.step()
    assert weight.isinf()
    scaled = weights_of(1.0)
    step(scaler, torch.optim.SGD([scaled], lr=0.1), scaled, math.inf)
    assert (scaled.item(), scaler.get_scale()) == (1.0, 32768.0)


@claim(
    "`model.half()` with a GradScaler is mixed precision.",
    verdict="false",
    truth="Weights in FP16 have gradients in FP16, and `unscale_` refuses them, as does `step`: “Attempting to unscale "
    "FP16 gradients.” Only `step` with a fused optimizer takes them, and rounds its updates to FP16: 0.0001 less than "
    "1 is 1. Mixed precision is weights in FP32 under autocast.",
    also=["tests/train/scaler/test_torch_demands.py::test_fp16_gradients_are_refused"],
)
def test_half_weights_with_a_scaler():
    weight, scaler = weights_of(1.0, dtype=FP16), torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
        step(scaler, torch.optim.SGD([weight], lr=0.1), weight, 1.0)
    for lr, moves in ((0.1, True), (1e-4, False)):
        weight = weights_of(1.0, dtype=FP16)
        step(torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD([weight], lr=lr, fused=True), weight, 1.0)
        assert (weight.item() < 1) is moves
