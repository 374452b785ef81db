"""BF16 weights on a GPU: fused kernels, no wait, a skip that only the device knows, and real BF16 products."""

import pytest
import torch
from torch.nn import functional as F

from ampwise import Engine, make_optimizer
from ampwise.train.low_bit.bf16_weights import parameters_to_convert, to_bf16_
from ampwise.train.low_bit.rounding import RoundingNoise, join_bf16_, split_bf16_, stochastic_round_

from .toy_gpt import Gpt, text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*script_method"),  # what torch 2.11 says when inductor is loaded, by torchao
    pytest.mark.filterwarnings("ignore:.*TensorFloat32 tensor cores"),  # what inductor says of every FP32 product
    pytest.mark.filterwarnings("ignore:.*invalid escape sequence"),  # in torchao, read by Python 3.12
]

KINDS = ["bf16-pure", "bf16-pure,kahan", "bf16-pure,bf16-states"]


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def trained(precision, steps=300, plain=False, optimizer="adamw", seed=0, lr=6e-4):
    torch.manual_seed(seed)
    model = Gpt(2).cuda()
    if plain:
        to_bf16_(parameters_to_convert([model]))
    made = make_optimizer(optimizer, model, lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: max(1 - step / steps, 0.02))
    engine = Engine(model, made, precision, clip_norm=1.0, scheduler=scheduler, trace=False)
    for batch in text(32 * steps, seed).cuda().split(32):
        engine.step(loss_of, model, batch)
    with torch.no_grad(), engine.autocast():
        return float(loss_of(model, text(512, 12345).cuda()))


def test_rounding_is_that_of_the_cpu():
    torch.manual_seed(0)
    values = torch.randn(10_000) * 2.0 ** torch.randint(-40, 40, (10_000,))
    noise = RoundingNoise().like(values)
    assert torch.equal(stochastic_round_(values.cuda(), noise.cuda()).cpu(), stochastic_round_(values.clone(), noise))
    there, here = values.cuda(), values.clone()
    rest = split_bf16_(there)
    assert torch.equal(rest.cpu(), split_bf16_(here))
    assert torch.equal(join_bf16_(there, rest).cpu(), values)
    assert torch.equal(RoundingNoise().like(there), RoundingNoise().like(there))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("kind", KINDS)
def test_a_skip_that_only_the_device_knows_changes_nothing(kind):
    model = Gpt(1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = Engine(model, optimizer, kind, clip_norm=1.0, trace=False)
    batches = text(96, 0).cuda().split(32)
    engine.step(loss_of, model, batches[0])
    held = [*model.parameters(), *engine._plugin.rests]
    held += [value for state in optimizer.state.values() for value in state.values()]
    before = [each.detach().clone() for each in held]
    torch.cuda.set_sync_debug_mode("error")
    try:
        skipped = engine.step(lambda model, tokens: loss_of(model, tokens) * torch.nan, model, batches[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert skipped.skipped
    assert all(torch.equal(one.detach(), other) for one, other in zip(held, before, strict=True))
    assert not engine.step(loss_of, model, batches[2]).skipped


def test_a_gpt_in_bf16_products_ends_where_fp32_weights_end():
    fp32, plain = trained("bf16"), trained("bf16", plain=True)
    ours = {kind: trained(kind) for kind in KINDS}
    assert plain > 1.05 * fp32
    assert all(abs(loss - fp32) < 0.02 * fp32 for loss in ours.values()), (fp32, plain, ours)


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adamw4bit", "adamwfp8"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_torchaos_train_too(optimizer, precision):
    pytest.importorskip("torchao.optim")
    fp32, ours = trained("bf16", steps=150, lr=2e-3), trained(precision, steps=150, optimizer=optimizer, lr=2e-3)
    assert ours < 1.1 * fp32, (fp32, ours)


def test_it_takes_less_memory():
    def peak(precision):
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(24))).cuda()
        engine = Engine(model, torch.optim.AdamW(model.parameters(), fused=True), precision, trace=False)
        x = torch.randn(16, 2048, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            engine.step(lambda x: model(x).float().square().mean(), x)
        return torch.cuda.max_memory_allocated() / sum(each.numel() for each in model.parameters())

    wide, narrow, least = peak("bf16"), peak("bf16-pure"), peak("bf16-pure,bf16-states")
    assert wide > 15.5
    assert narrow < wide - 1
    assert least < narrow
