"""On a GPU: facts that come late, devices' own random numbers, kernels' own arithmetic."""

import copy
import io
import warnings
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampwise
from ampwise import Engine
from ampwise.hardware.kernel_faults import faults_here

pytestmark = pytest.mark.gpu


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)

    def forward(self, x):
        return self.last(F.dropout(self.norm(self.first(x)), 0.4).relu())


def batches(*bad):
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(32, 16, generator=generator).cuda() for _ in range(8)]
    for index in bad:
        made[index][3, 1] = torch.nan
    return made


def trained(given, precision, **options):
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    engine = Engine(model, optimizer, precision, clip_norm=1.0, **options)
    with redirect_stderr(io.StringIO()):
        for x in given:
            engine.step(lambda x: F.mse_loss(model(x).float(), x.sum(1, keepdim=True)), x)
        engine.close()
    return engine, copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"], torch.cuda.get_rng_state()))


def assert_equal(one, other):
    leaves = torch.utils._pytree.tree_leaves
    for left, right in zip(leaves(one), leaves(other), strict=True):
        assert torch.equal(torch.as_tensor(left), torch.as_tensor(right))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_goes_on_to_the_bit_as_if_nobody_had_looked(precision):
    given = batches(1, 4, 7)
    _, left = trained(given, precision, trace=False)
    engine, state = trained(given, precision)
    assert_equal(state, left)
    assert [(each.rule.name, each.place.step) for each in engine.findings] == [("bad-batch", 2)]


def test_the_backward_pass_in_its_own_thread_has_lines():
    weight = torch.zeros(3, device="cuda", requires_grad=True)

    def loss(x):
        root = (x * weight).sqrt()
        return root.sum()

    (finding,) = ampwise.trace(loss, torch.ones(3, device="cuda"))
    assert finding.rule.name == "infinite-derivative"
    assert finding.place.line == loss.__code__.co_firstlineno + 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    first, second = nn.Linear(8, 8).cuda(), nn.Linear(8, 8).cuda()

    def block(x):
        return (second(x) * 0.0).sqrt()

    def loss(x):
        return checkpoint(block, first(x), use_reentrant=use_reentrant).sum()

    (finding,) = ampwise.trace(loss, torch.ones(2, 8, device="cuda"))
    assert finding.rule.name == "infinite-derivative"
    assert finding.place.line == block.__code__.co_firstlineno + 1


def test_a_large_product_is_looked_at_for_some_of_its_results():
    model = nn.Linear(1024, 8192, device="cuda")
    with torch.autocast("cuda", torch.float16):
        (finding,) = ampwise.trace(lambda x: model(x).float().mean(), torch.full((1024, 1024), 6e4, device="cuda"))
    assert finding.rule.name == "half-overflow"
    assert finding.evidence["trace"]["exact"] == "finite"


def test_the_engines_step_does_not_wait_but_for_the_step_before():
    model = nn.Linear(64, 64).cuda()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), fused=True), "bf16", clip_norm=1.0)
    x = torch.randn(8, 64, device="cuda")
    loss = lambda x: model(x).float().square().mean()  # noqa: E731
    for _ in range(3):
        engine.step(loss, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once in a process, torch says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            engine.step(loss, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class MaskedAttention(nn.Module):
    """All logits near -120, as a head with massive activations has them."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, 704, 64) * 0.1)

    def forward(self, key, value, mask):
        query = torch.cat([torch.ones_like(self.query[..., :1]), self.query[..., 1:]], -1)
        return F.scaled_dot_product_attention(*(each.bfloat16() for each in (query, key, value)), mask)


@pytest.mark.skipif(not faults_here(), reason="this torch has no known bug on this GPU")
def test_a_known_bug_of_cudnns_attention_is_the_kernels():
    torch.manual_seed(0)
    model = MaskedAttention().cuda()
    key, value = torch.randn(2, 1, 1, 704, 64, device="cuda").unbind()
    key[..., 0] = -120 * 8
    mask = torch.ones(704, 704, dtype=torch.bool, device="cuda").tril()
    weights = torch.randn(1, 1, 704, 64, device="cuda")

    def loss(key, value):
        return (model(key, value, mask).float() * weights).mean()

    (finding,) = ampwise.trace(loss, key, value)
    assert finding.rule.name == "kernel-fault"
    assert "https://github.com/pytorch/pytorch/issues/196678" in finding.message
    assert "enable_cudnn_sdp(False)" in finding.fix
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert ampwise.trace(loss, key, value) == []
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
