"""Log-probabilities token by token, against FP64 by hand; the ways in which two paths through one model may differ."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampwise
from ampwise.errors import BadInput

WORDS = 40


class Reader(nn.Module):
    """A causal model: a cumulative mean over the words so far, then a head."""

    def __init__(self, norm=None):
        super().__init__()
        self.words, self.body, self.out = nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.Linear(16, WORDS)
        self.norm = norm or nn.Identity()

    def forward(self, tokens):
        seen = self.words(tokens).cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.out(self.norm(torch.tanh(self.body(seen))))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Reader()


def batch(rows=6, length=9):
    text = torch.randint(0, WORDS, (rows, length))
    return text[:, :-1].clone(), text[:, 1:].clone()


def loss_of(model):
    return lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def log_probs(model, x, dtype=None):
    with torch.no_grad(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        return torch.log_softmax(model(x).float(), -1).double().flatten(0, 1)


def test_numbers_are_those_of_fp64_by_hand(model):
    x, y = batch()
    y[2, 3:] = -100
    tokens = ampwise.diff(loss_of(model), x, y).tokens
    a, b = log_probs(model, x), log_probs(model, x, torch.bfloat16)
    kept = y.flatten() != -100
    apart = (b - a)[kept].gather(-1, y.flatten()[kept, None]).squeeze(-1)
    assert tokens.tokens == int(kept.sum()) == 43
    assert tokens.mean == pytest.approx(float(apart.mean()), rel=1e-9)
    assert tokens.rms == pytest.approx(float(apart.square().mean().sqrt()), rel=1e-9)
    assert tokens.largest == pytest.approx(float(apart[apart.abs().argmax()]), rel=1e-9)
    assert tokens.largest_at == int(apart.abs().argmax())
    assert tokens.kl == pytest.approx(float((a.exp() * (a - b)).sum(-1)[kept].mean()), rel=1e-6)


def test_a_gather_on_log_softmax_is_read_like_cross_entropy(model):
    x, y = batch()

    def by_hand(x, y):
        return -F.log_softmax(model(x).float(), -1).gather(-1, y.unsqueeze(-1)).mean()

    assert ampwise.diff(by_hand, x, y).tokens == ampwise.diff(loss_of(model), x, y).tokens


def test_no_claim_without_log_probabilities_or_with_other_targets(model):
    x, y = batch()
    assert ampwise.diff(lambda x: model(x).square().mean(), x).tokens is None
    scores = ampwise.diff(lambda x, y: model(x).gather(-1, y.unsqueeze(-1)).mean(), x, y)
    assert scores.tokens is None  # logits are no log-probabilities
    other = ampwise.diff(loss_of(model), x, y, b_fn=lambda x, y: loss_of(model)(x, (y + 1) % WORDS))
    assert other.tokens is None
    assert "Log-probabilities" not in str(other)


@pytest.mark.parametrize("rows", [1, 4, 6, 100])
def test_a_batch_in_parts_is_the_same_but_for_rounding(model, rows):
    x, y = batch()
    result = ampwise.diff(loss_of(model), x, y, a="fp32", b=f"fp32,batch={rows}")
    assert result.explained, str(result)
    assert [row.name for row in result.rows] == ["", "words", "body", "norm", "out"]
    assert all(row.error < 1e-6 for row in result.rows)
    assert all(row.compared.error < 1e-5 for row in result.parameters)
    assert result.tokens.rms < 1e-6
    assert result.evidence.b.loss == pytest.approx(result.evidence.a.loss, rel=1e-6)


def test_errors_of_parts_are_those_of_the_whole(model):
    x, y = batch()
    whole = ampwise.diff(loss_of(model), x, y, a="fp32", b="bf16")
    parts = ampwise.diff(loss_of(model), x, y, a="fp32", b="bf16,batch=2")
    for one, other in zip(whole.rows, parts.rows, strict=True):
        assert other.error == pytest.approx(one.error, rel=0.05)
    a, b = (each.rows[-1].outputs[0].measured for each in (whole, parts))
    assert (a.largest_at, a.values, a.zeros_b) == (b.largest_at, b.values, b.zeros_b)


def test_a_module_that_mixes_rows_is_named_and_one_in_evaluation_is_not():
    class OverBatch(nn.Module):
        def forward(self, x):
            return x - x.mean(0, keepdim=True) if self.training else x

    torch.manual_seed(0)
    model = Reader(norm=OverBatch())
    x, y = batch()
    result = ampwise.diff(loss_of(model), x, y, a="fp32", b="fp32,batch=2")
    assert result.findings[0].rule.code == "AMP538"
    assert result.first.module == "norm"
    assert result.evidence.starts_in.name == "norm"
    assert "which rows are computed together" in result.findings[0].fix
    assert ampwise.diff(loss_of(model.eval()), x, y, a="fp32", b="fp32,batch=2").explained


def test_padding_and_decoding_are_functions_of_their_own(model):
    x, y = batch()

    def padded(x, y):
        return loss_of(model)(F.pad(x, (0, 3)), F.pad(y, (0, 3), value=-100))

    def decoding(x, y):
        steps = [
            F.log_softmax(model(x[:, : i + 1])[:, -1].float(), -1).gather(-1, y[:, i, None]) for i in range(x.shape[1])
        ]
        return -torch.cat(steps, 1).mean()

    for other in (padded, decoding):
        result = ampwise.diff(loss_of(model), x, y, a="fp32", b="fp32", b_fn=other)
        assert result.tokens.tokens == y.numel()
        assert result.tokens.rms < 1e-6
        assert not result.rows

    def wrong(x, y):  # the last word sees no other
        return loss_of(model)(torch.cat([x[:, :-1], x[:, :1]], 1), y)

    found = ampwise.diff(loss_of(model), x, y, a="fp32", b="fp32", b_fn=wrong).tokens
    assert found.rms > 0.01
    assert found.largest_at % y.shape[1] == y.shape[1] - 1


def test_the_cheapest_policy_is_tried_and_verified_elsewhere():
    torch.manual_seed(0)
    model = Reader()
    model.lm_head = nn.Linear(WORDS, WORDS)  # nearly all of the difference comes from rounding here
    with torch.no_grad():
        model.lm_head.weight.mul_(0.01).add_(torch.eye(WORDS))
        model.lm_head.bias.fill_(300.0)  # logits near 300 have steps of 2 in BF16

    def loss(x, y):
        return F.cross_entropy(model.lm_head(model(x)).flatten(0, 1), y.flatten())

    x, y = batch()
    result = ampwise.diff(loss, x, y, a="fp32", b="bf16", held_back=[batch(), batch()])
    helping = [remedy for remedy in result.remedies if remedy.helps]
    assert [remedy.cost for remedy in result.remedies] == sorted(r.cost for r in result.remedies)
    assert helping[0].policy == "Policy('bf16').keep('fp32', 'lm_head')"
    assert helping[0].cost == pytest.approx(WORDS**2 / (WORDS**2 + 16 * 16 + 16 * WORDS))
    # Measured again without the search: the policy does what it is said to do, on a batch that nobody has seen.
    policy = ampwise.Policy("bf16").keep("fp32", "lm_head")
    x, y = batch()
    plain, kept = (ampwise.diff(loss, x, y, b=side).tokens.rms for side in ("bf16", policy))
    assert kept < 0.2 * plain
    assert "The cheapest way tried that removes most of it: `Policy('bf16').keep('fp32', 'lm_head')`" in str(result)


def test_a_policy_that_overfits_the_batch_does_not_help():
    from ampwise.tune.diff.token_difference import TriedPolicy

    remedy = TriedPolicy(policy="p", cost=0.1, removed=0.95, removed_elsewhere=0.3, batches=2)
    assert not remedy.helps
    assert "30%" in remedy.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"b": "bf16,batch=0"}, "expected rows to compute at a time, such as batch=1; got batch=0"),
        ({"a": "bf16,batch=1"}, "side a computes the whole batch; give batch= to b, and swap the sides"),
        ({"b": "bf16,batch=1", "ops": True}, "operations are compared on the whole batch"),
        ({"b_fn": 3}, "expected a function of the same arguments; got"),
        ({"b": "mxfp8", "held_back": [()]}, "policies are tried for one model in bf16 or fp16"),
    ],
)
def test_what_cannot_be_compared_is_said(model, options, message):
    x, y = batch()
    with pytest.raises(BadInput, match=message.replace("(", r"\(")):
        ampwise.diff(loss_of(model), x, y, **options)


def test_held_back_batches_need_log_probabilities(model):
    x, _ = batch()
    with pytest.raises(BadInput, match="no log-probabilities were seen"):
        ampwise.diff(lambda x: model(x).square().mean(), x, held_back=[x.flip(0)])


def test_an_impossible_class_adds_nothing(model):
    x, y = batch()
    y.clamp_(max=WORDS - 2)

    def masked(x, y):
        logits = model(x).clone()
        logits[..., -1] = -math.inf
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    tokens = ampwise.diff(masked, x, y).tokens
    assert 0 < tokens.rms < 1
    assert 0 <= tokens.kl < 1
