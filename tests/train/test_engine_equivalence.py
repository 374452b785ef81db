"""The engine against loops written by hand in plain torch: bit for bit, step by step, also where steps are skipped."""

import copy
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

from ampwise import Engine

from ..for_each import for_each
from ..night import NIGHTLY, chessboard
from .engine_loops import (
    CLIPS,
    DTYPES,
    OPTIMIZERS,
    SCHEDULERS,
    USUAL,
    Arrangement,
    Net,
    assert_same,
    batches,
    bits_of,
    by_engine,
    by_hand,
    held,
    in_one_call,
    in_pieces,
    loss_of,
)

# Older torch calls its own deprecated step(0) where one part of a SequentialLR follows another.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The epoch parameter in"),
    pytest.mark.usefixtures("small_operations_are_cheap"),
]


def arrangements():
    """Everything with everything, of which the day has half; but schedulers: none, and one of them in turn."""
    kinds = [name for name in SCHEDULERS if name != "no-scheduler"]
    crossed = chessboard(DTYPES, OPTIMIZERS, (1, 3), CLIPS)
    for turn, (precision, optimizer, accumulate, clip) in enumerate(crossed):
        for scheduler in ("no-scheduler", kinds[turn % len(kinds)]):
            yield Arrangement(precision, accumulate, clip, scheduler, optimizer)


EVERY = list(arrangements())
# By day each arrangement is driven in one of the two ways, in turn; a pair that differs in its scheduler has both.
BOTH = (in_one_call, in_pieces)
WAYS = {each: BOTH if NIGHTLY else BOTH[(turn + turn // 2) % 2 :][:1] for turn, each in enumerate(EVERY)}


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("arrangement", EVERY, ids=str)
def test_a_run_is_that_of_the_loop_by_hand_bit_for_bit(arrangement):
    by_torch = by_hand(arrangement)
    for way in WAYS[arrangement]:
        assert_same(by_engine(arrangement, way), by_torch)


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", DTYPES)
def test_where_nothing_goes_wrong_nothing_is_skipped(precision, accumulate, optimizer):
    arrangement = Arrangement(precision, accumulate, "norm-binds", "warm_up", optimizer, trouble=False)
    by_torch = by_hand(arrangement)
    assert not any(by_torch.skipped)
    assert_same(by_engine(arrangement, in_one_call), by_torch)


# The runs are worth comparing


def test_schedulers_and_optimizers_and_precisions_all_meet():
    met = {(it.scheduler, it.optimizer, it.precision) for it in EVERY}
    assert met == set(product(SCHEDULERS, OPTIMIZERS, DTYPES))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_without_scaling_the_faulty_batch_alone_is_skipped(accumulate):
    for precision in ("fp32", "bf16"):
        run = by_hand(Arrangement(precision, accumulate))
        assert run.skipped.count(True) == 1
        assert set(run.scales) == {1.0}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_in_fp16_the_first_steps_overflow_and_the_scale_falls_and_grows(accumulate):
    run = by_hand(Arrangement("fp16", accumulate))
    scales = [2.0**30, *run.scales]
    moves = [after > before for before, after in pairwise(scales) if after != before]
    assert run.skipped[0]
    assert not run.skipped[-1]
    assert run.skipped.count(True) == (3 if accumulate == 1 else 2)
    assert set(moves) == {True, False}


def test_the_faulty_batch_leaves_gradients_of_one_optimizer_finite():
    model, (inputs, targets) = Net(), batches(8, 5)[5]
    loss_of(model, inputs, targets).backward()
    finite = [all(p.grad.isfinite().all() for p in held(optimizer)) for optimizer in OPTIMIZERS["two"](model)]
    assert finite == [True, False]


def test_clipping_binds_where_it_is_said_to():
    ends = {clip: by_hand(Arrangement(clip=clip)).bits[-1] for clip in CLIPS}
    same = {clip: torch.equal(end, ends["no-clip"]) for clip, end in ends.items()}
    assert same == {"no-clip": True, "norm-binds": False, "norm-does-not": True, "value": False}


@pytest.mark.parametrize("other", ["losses", "skipped", "scales", "rates", "bits", "schedules"])
def test_the_comparison_can_fail(other):
    run = by_hand(Arrangement(scheduler="warm_up"))
    changed = replace(run, **{other: copy.deepcopy(getattr(run, other))})
    assert_same(run, changed)
    if other == "bits":
        changed.bits[3][7] ^= 1  # the last bit of one number
    else:
        getattr(changed, other)[0] = {} if other == "schedules" else 7.5
    with pytest.raises(AssertionError):
        assert_same(run, changed)


# A window that turns out shorter than it was thought to be


@for_each("precision", DTYPES)
def test_a_flushed_window_is_a_mean_over_the_micro_batches_there_were(precision):
    """Bit for bit, as 4 and 2 are powers of two."""
    ends, losses = [], []
    for accumulate in (4, 2):
        torch.manual_seed(0)
        model = Net()
        optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
        engine = Engine(model, optimizer, precision, accumulate=accumulate, clip_norm=0.1, scaling=USUAL)
        for inputs, targets in batches(8, None)[:2]:
            in_one_call(engine, model, inputs, targets)
        engine.flush()
        ends.append(bits_of([optimizer]))
        losses.append(engine.history["loss"])
    assert torch.equal(*ends)
    assert losses[0] == losses[1]


# Windows weighed by tokens

PADDING, WORDS = -100, 11
LENGTHS = [(3, 40, 7), (25, 1, 1), (60, 60)]  # tokens of the micro-batches, by window; the last window is short


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens):
        return self.head(self.words(tokens).tanh())


def mean_over_tokens(model, tokens, targets):
    return cross_entropy(model(tokens), targets, ignore_index=PADDING)


@cache
def windows():
    generator = torch.Generator().manual_seed(2)

    def micro_batch(count):
        tokens, targets = torch.randint(WORDS, (2, 64), generator=generator)
        targets[count:] = PADDING
        return tokens, targets

    return [[micro_batch(count) for count in lengths] for lengths in LENGTHS]


def as_tensor(model, tokens, targets):
    return (targets != PADDING).sum()


def as_int(model, tokens, targets):
    return int((targets != PADDING).sum())


def as_float_tensor(model, tokens, targets):
    return (targets != PADDING).float().sum().reshape(1)


def tagging():
    torch.manual_seed(0)
    model = Tagger()
    return model, SGD(model.parameters(), lr=0.5)


def of_all_tokens():
    """The loss of each window, and the gradients; of one batch that is all micro-batches in a row."""
    model, optimizer = tagging()
    for window in windows():
        tokens, targets = (torch.cat(parts) for parts in zip(*window, strict=True))
        loss = mean_over_tokens(model, tokens, targets)
        loss.backward()
        yield loss.item(), gradients_of(optimizer)
        optimizer.step()
        optimizer.zero_grad()


def gradients_of(optimizer):
    return [parameter.grad.clone() for parameter in held(optimizer)]


def weighed(micro_batch, weight):
    model, optimizer = tagging()
    engine = Engine(model, optimizer, "fp32", accumulate=3, weight=weight)
    applied = []
    optimizer.register_step_pre_hook(lambda optimizer, *_: applied.append(gradients_of(optimizer)))
    for tokens, targets in engine.batches([each for window in windows() for each in window]):
        step = micro_batch(engine, model, tokens, targets)
        if step.closed:
            yield step, applied.pop()


def weighed_in_one_call(engine, model, tokens, targets):
    return engine.step(mean_over_tokens, model, tokens, targets)


def weighed_in_pieces(engine, model, tokens, targets):
    with engine.autocast():
        loss = mean_over_tokens(model, tokens, targets)
    engine.backward(loss, weight=as_tensor(model, tokens, targets))
    return engine.apply()


def apart(tensors, others):
    """Relative to the norm of the second."""
    one, other = (torch.cat([tensor.double().flatten() for tensor in each]) for each in (tensors, others))
    return float((one - other).norm() / other.norm())


@for_each(
    ("micro_batch", "weight"),
    [
        (weighed_in_one_call, as_tensor),
        (weighed_in_one_call, as_int),
        (weighed_in_one_call, as_float_tensor),
        (weighed_in_pieces, None),
    ],
)
def test_weighed_windows_are_means_over_all_their_tokens(micro_batch, weight):
    steps = list(zip(weighed(micro_batch, weight), of_all_tokens(), strict=True))
    assert len(steps) == len(LENGTHS)
    for (step, applied), (loss, gradients) in steps:
        assert step.loss == pytest.approx(loss, rel=1e-6)
        norm = torch.cat([each.flatten() for each in gradients]).double().norm().item()
        assert step.grad_norm == pytest.approx(norm, rel=1e-6)
        assert apart(applied, gradients) < 1e-6


def test_a_mean_of_means_is_something_else():
    for (step, _), (loss, _) in zip(weighed(weighed_in_one_call, lambda *_: 1), of_all_tokens(), strict=True):
        if step.number < 3:  # the micro-batches of the last window are alike
            assert step.loss != pytest.approx(loss, rel=1e-3)


def with_padding_alone(turn):
    """A window of three, one of which has no token: its mean is 0/0, and it weighs nothing."""
    tokens, targets = windows()[0][0]
    nothing = tokens, torch.full_like(targets, PADDING)
    micro_batches = [windows()[0][1], windows()[0][2]]
    micro_batches.insert(turn, nothing)
    model, optimizer = tagging()
    applied = []
    optimizer.register_step_pre_hook(lambda optimizer, *_: applied.append(gradients_of(optimizer)))
    engine = Engine(model, optimizer, "fp32", accumulate=3, weight=as_tensor)
    steps = [engine.step(mean_over_tokens, model, *each) for each in micro_batches]

    by_torch, optimizer = tagging()
    loss = mean_over_tokens(by_torch, *(torch.cat(parts) for parts in zip(*micro_batches, strict=True)))
    loss.backward()
    return steps[-1], applied[-1], loss.item(), gradients_of(optimizer)


@for_each("turn", [0, 1, 2])
def test_a_micro_batch_without_a_token_adds_nothing_to_the_gradient(turn):
    step, applied, _, gradients = with_padding_alone(turn)
    assert step.applied
    assert apart(applied, gradients) < 1e-6


@for_each("turn", [0, 1, 2])
def test_a_micro_batch_without_a_token_adds_nothing_to_the_loss(turn):
    step, _, loss, _ = with_padding_alone(turn)
    assert step.loss == pytest.approx(loss, rel=1e-6)
