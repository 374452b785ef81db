"""A batch in pieces is the batch: the same gradient, one exchange, and nothing left of a piece that failed."""

import json
import textwrap
from collections import UserDict
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from ampwise import Engine
from ampwise.errors import BadInput
from ampwise.train.batches import BatchPiece, batch_length, split_batch
from ampwise.train.callback import Callback

from ..for_each import for_each
from .engine_toys import everything, same, train, training

PADDING = -1
TOKENS = 7


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


# How a batch is cut


@given(st.integers(1, 40).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length))))
def test_the_pieces_of_a_batch_are_the_batch_and_as_equal_as_can_be(length_and_count):
    length, count = length_and_count
    whole = torch.arange(length)
    pieces = split_batch(count, (whole,), {})
    parts = [piece.args[0] for piece in pieces]
    assert len(parts) == count
    assert torch.equal(torch.cat(parts), whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert [piece.share for piece in pieces] == [len(part) / length for part in parts]


def test_whatever_holds_tensors_is_cut_and_stays_what_it_is():
    x = torch.arange(8).reshape(4, 2)
    batch = {"x": [x, (x, "text")], "pair": Pair(x, x + 1), "hf": UserDict(ids=x), "scale": torch.tensor(2.0), "n": 3}
    first, second = split_batch(2, (batch,), {"mask": x > 0})
    for piece, rows in ((first, slice(0, 2)), (second, slice(2, 4))):
        (cut,), mask = piece.args, piece.kwargs["mask"]
        assert torch.equal(cut["x"][0], x[rows])
        assert torch.equal(cut["x"][1][0], x[rows])
        assert cut["x"][1][1] == "text"
        assert type(cut["pair"]) is Pair
        assert torch.equal(cut["pair"].y, x[rows] + 1)
        assert type(cut["hf"]) is UserDict
        assert torch.equal(cut["hf"]["ids"], x[rows])
        assert cut["scale"] is batch["scale"]  # which has no rows
        assert cut["n"] == 3
        assert torch.equal(mask, x[rows] > 0)
    assert torch.equal(batch["x"][0], x)


def test_a_piece_is_a_view_and_no_copy():
    x = torch.arange(8)
    first, second = split_batch(2, (x,), {})
    assert first.args[0].data_ptr() == x.data_ptr()
    assert second.args[0].data_ptr() == x[4:].data_ptr()


@for_each("count", [0, -1, 5, True, 2.0, "2", None])
def test_a_number_of_pieces_that_makes_no_sense_is_refused(count):
    with pytest.raises(BadInput, match=rf"^a batch of 4 cannot be split into {count} pieces\.$"):
        split_batch(count, (torch.ones(4, 2),), {})


@for_each(
    ("args", "found"),
    [
        ((torch.ones(4), torch.ones(3)), "3, 4"),
        (("text", 3), "no tensors at all"),
        ((torch.tensor(1.0),), "no tensors at all"),
    ],
)
def test_what_has_no_one_length_is_refused(args, found):
    with pytest.raises(BadInput) as refused:
        batch_length(args, {})
    expected = f"cannot split the batch: its tensors must share their first dimension, got {found}."
    assert str(refused.value) == expected


def test_a_batch_of_a_class_that_takes_no_dict_is_refused():
    frozen = MappingProxyType({"x": torch.ones(4)})
    assert torch.equal(split_batch(2, (frozen,), {})[0].args[0]["x"], torch.ones(2))

    class Odd(UserDict):
        def __init__(self, first, second):
            super().__init__(x=first, y=second)

    with pytest.raises(BadInput, match=r"^a batch of Odd cannot be split into pieces: "):
        split_batch(2, (Odd(torch.ones(4), torch.ones(4)),), {})


@pytest.mark.parametrize("tensors", [True, False])
def test_shares_by_weight_are_parts_of_the_whole_and_of_nothing_nothing(tensors):
    def weight(number):
        return torch.tensor(float(number)) if tensors else float(number)

    piece = BatchPiece((), {}, 0.5)
    assert float(piece.weighed(weight(1), weight(4)).share) == 0.25
    assert float(piece.weighed(weight(0), weight(0)).share) == 0.0
    assert piece.weighed(None, None) is piece


# The gradient


def mean_loss(model, x, y):
    return F.mse_loss(model.rows(x), y)


def rows(number, count=6):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def tokens(number, count=6, length=5):
    """The later a row, the more of it is padding; in the second half there is none but padding for odd numbers."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(TOKENS, (count, length), generator=generator)
    labels = torch.randint(TOKENS, (count, length), generator=generator)
    for row in range(count):
        labels[row, length - min(row, length - 1) :] = PADDING
    if number % 2:
        labels[count // 2 :] = PADDING
    return ids, labels


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.tokens = nn.Sequential(nn.Embedding(TOKENS, 8), nn.Tanh(), nn.Linear(8, TOKENS))
        self.double()


def weights_after(batches, loss_fn, *, pieces, accumulate=1, weight=None, windows=2, **options):
    """Weights, losses and norms of a training whose steps are the gradients themselves, whole or in pieces."""
    model = Net()
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), 1.0), "fp32", accumulate=accumulate, weight=weight, **options
    )

    def loss(*args, **kwargs):
        return loss_fn(model, *args, **kwargs)

    closed = []
    for number in range(windows * accumulate):
        args, kwargs = batches(number)
        one = (
            engine.step(loss, *args, **kwargs)
            if pieces is None
            else engine.step_in_pieces(pieces, loss, *args, **kwargs)
        )
        closed += [one] if one.closed else []
    assert [step.number for step in closed] == list(range(1, windows + 1))
    assert not any(step.skipped for step in closed)
    found = {name: each.detach() for name, each in model.named_parameters()}
    return found, [step.loss for step in closed], [step.grad_norm for step in closed]


def assert_the_same(cut, whole, away=1e-13):
    for name, weights in whole[0].items():
        torch.testing.assert_close(cut[0][name], weights, rtol=0, atol=away, msg=name)
    assert cut[1] == pytest.approx(whole[1], rel=1e-6)
    assert cut[2] == pytest.approx(whole[2], rel=1e-6)


@for_each("accumulate", [1, 3])
@for_each("pieces", [1, 2, 4, 6])
def test_the_gradient_of_the_pieces_is_that_of_the_whole(pieces, accumulate):
    def batches(number):
        return rows(number), {}

    whole = weights_after(batches, mean_loss, pieces=None, accumulate=accumulate)
    assert_the_same(weights_after(batches, mean_loss, pieces=pieces, accumulate=accumulate), whole)


def token_loss(model, ids, labels):
    return F.cross_entropy(model.tokens(ids).flatten(0, 1), labels.flatten(), ignore_index=PADDING)


@for_each("accumulate", [1, 3])
@for_each("pieces", [2, 3, 4])
@for_each("kind", ["numbers", "tensors"])
def test_tokens_count_alike_however_they_are_spread_over_the_pieces(pieces, accumulate, kind):
    def weight(ids, labels):
        counted = (labels != PADDING).sum()
        return counted if kind == "tensors" else float(counted)

    def batches(number):
        return (), dict(zip(("ids", "labels"), tokens(number), strict=True))

    options = {"accumulate": accumulate, "weight": weight, "windows": 3}
    whole = weights_after(batches, token_loss, pieces=None, **options)
    # Factors that are tensors are FP32.
    assert_the_same(
        weights_after(batches, token_loss, pieces=pieces, **options), whole, 1e-13 if kind == "numbers" else 1e-6
    )


def test_weights_in_bytes_add_up_to_more_than_a_byte_holds():
    def batches(number):
        return rows(number, count=400), {}

    def weight(x, y):
        return (x[:, 0] < 9).sum(dtype=torch.uint8) if len(x) <= 200 else len(x)

    whole = weights_after(batches, mean_loss, pieces=None, weight=weight)
    assert_the_same(weights_after(batches, mean_loss, pieces=2, weight=weight), whole, 1e-6)


def test_a_batch_as_tokenizers_make_it_is_cut_whole_or_by_its_names():
    def from_one(model, batch):
        return token_loss(model, batch["input_ids"], batch["labels"])

    def from_names(model, *, input_ids, labels, past=None):
        return token_loss(model, input_ids, labels)

    def encoded(number):
        return UserDict(zip(("input_ids", "labels"), tokens(2 * number), strict=True))

    def weight(*args, **kwargs):
        return int((args[0] if args else kwargs)["labels"].ne(PADDING).sum())

    ways = [(from_one, lambda number: ((encoded(number),), {})), (from_names, lambda number: ((), {**encoded(number)}))]
    for loss_fn, batches in ways:
        whole = weights_after(batches, loss_fn, pieces=None, weight=weight)
        assert_the_same(weights_after(batches, loss_fn, pieces=3, weight=weight), whole)


def test_clipping_sees_the_gradient_of_the_whole():
    def batches(number):
        return rows(number), {}

    whole = weights_after(batches, mean_loss, pieces=None, clip_norm=0.1)
    assert_the_same(weights_after(batches, mean_loss, pieces=3, clip_norm=0.1), whole)


# What is returned, and what is refused


def test_extra_is_a_list_of_what_each_piece_returned():
    run = training()
    step = run.engine.step_in_pieces(3, lambda x: (run.model(x).mean(), len(x)), torch.ones(5, 4))
    assert step.extra == [2, 2, 1]
    assert (step.closed, step.number) == (True, 1)
    step = run.engine.step_in_pieces(2, lambda x: run.model(x).mean(), torch.ones(2, 4))
    assert step.extra == [None, None]


def test_the_words_for_a_loss_function_that_is_none():
    engine = training().engine
    with pytest.raises(BadInput) as refused:
        engine.step_in_pieces(2, torch.ones(3), torch.ones(3))
    assert str(refused.value) == (
        "step_in_pieces() takes the number of pieces, the loss function and its arguments: engine.step(loss_fn, "
        "x, y). For a loss that is already computed: engine.backward(loss), then engine.apply()."
    )


def test_a_step_inside_of_a_piece_is_refused():
    run = training()

    def nested(x):
        run.engine.step_in_pieces(1, lambda x: run.model(x).mean(), x)

    with pytest.raises(BadInput, match=r"^engine\.step_in_pieces\(\) inside engine\.step\(\)"):
        run.engine.step_in_pieces(2, nested, torch.ones(4, 4))


@for_each("count", [0, 7, "2"])
def test_what_is_refused_beforehand_leaves_even_an_open_window_as_it_was(count):
    run = training(accumulate=3, norm=True)
    train(run, 1)
    before = everything(run)
    with pytest.raises(BadInput, match="a batch of 6 cannot be split"):
        run.engine.step_in_pieces(count, run.loss, torch.ones(6, 4), torch.ones(6, 1))
    assert same(everything(run), before)
    assert run.engine.accumulating


@for_each("precision", ["fp32", "fp16"])
@for_each("where", ["forward", "backward"])
@for_each("at", [1, 2, 3])
def test_a_piece_that_fails_leaves_the_engine_as_it_was(precision, where, at):
    run = training(precision, norm=True)
    train(run, 1)
    before, calls = everything(run), []

    def loss(x, y):
        calls.append(len(x))
        value = run.loss(x, y)
        if len(calls) < at:
            return value
        if where == "backward":
            value.register_hook(lambda gradient: 1 / 0)
            return value
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.engine.step_in_pieces(3, loss, torch.randn(6, 4), torch.ones(6, 1))
    assert calls == [2] * at
    before["rng"] = torch.get_rng_state()  # the batch above is drawn
    assert same(everything(run), before)
    assert not run.engine.accumulating
    alike = training(precision, norm=True)
    train(alike, 1)
    for each in (run, alike):
        train(each, 2, 3)
    assert same(run.model.state_dict(), alike.model.state_dict())


def test_a_piece_that_fails_takes_the_window_with_it_that_it_was_in():
    run, alike = training(accumulate=3, norm=True), training(accumulate=3, norm=True)
    train(run, 1)
    with pytest.raises(ZeroDivisionError):
        run.engine.step_in_pieces(2, lambda x: run.model(x).mean() if len(x) == 2 else 1 / 0, torch.ones(3, 4))
    assert not run.engine.accumulating
    steps = [train(each, 1, 2, 3) for each in (run, alike)]
    assert [[step.closed for step in taken] for taken in steps] == [[False, False, True]] * 2
    assert same(run.model.state_dict(), alike.model.state_dict())


def test_a_nan_in_one_piece_skips_the_step_and_is_explained(capsys):
    run = training(norm=True)
    before = everything(run)
    x = torch.randn(6, 4)
    x[5] = torch.nan
    step = run.engine.step_in_pieces(3, run.loss, x, torch.ones(6, 1))
    assert step.skipped
    assert same(run.model.state_dict(), before["model"])
    (finding,) = run.engine.findings
    assert finding.rule.name == "bad-batch"
    assert finding.place.step == 1
    capsys.readouterr()


def test_a_step_in_pieces_calls_the_hooks_of_one_step():
    run, told = training(), []

    class Log(Callback):
        def on_step_begin(self):
            told.append("step begins")

        def on_pass_end(self, batch, loss):
            told.append(len(batch.args[0]))

        def before_update(self, number, loss):
            told.append(f"before update {number}")

        def on_step_end(self, step, result):
            told.append("step ends")

        def after_step(self, step):
            told.append(f"after step {step.number}")

    log = Log()
    run.engine.add_callback(log)
    run.engine.step_in_pieces(3, run.loss, torch.randn(6, 4), torch.ones(6, 1))
    assert told == ["step begins", 2, 2, 2, "before update 1", "step ends", "after step 1"]
    run.engine.remove_callback(log)
    run.engine.step(run.loss, torch.randn(6, 4), torch.ones(6, 1))
    assert told[-1] == "after step 1"


# Ranks

RANKS = """
import json, sys, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ampwise import Engine

dist.init_process_group("gloo")
torch.manual_seed(0)
plain = nn.Linear(4, 1).double()
model = DistributedDataParallel(plain)
exchanges = []

def exchange(state, bucket):
    exchanges.append(len(bucket.gradients()))
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / dist.get_world_size())

model.register_comm_hook(None, exchange)
engine = Engine(
    model, torch.optim.SGD(plain.parameters(), 1.0), "fp32", accumulate=2, weight=lambda x, w: float(w.sum())
)

def loss(x, w):
    return (model(x).square() * w).sum() / w.sum()

def batch(number):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    return x, torch.rand(6, 1, generator=generator, dtype=torch.float64)

for number in range(4):
    engine.step_in_pieces(3, loss, *batch(2 * number + dist.get_rank()))

alone = nn.Linear(4, 1).double()
torch.manual_seed(0)
alone.load_state_dict(nn.Linear(4, 1).double().state_dict())
for window in ((0, 1, 2, 3), (4, 5, 6, 7)):
    x, w = (torch.cat(parts) for parts in zip(*map(batch, window)))
    alone.zero_grad()
    ((alone(x).square() * w).sum() / w.sum()).backward()
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter -= parameter.grad
away = max((a - b).abs().max().item() for a, b in zip(plain.parameters(), alone.parameters()))
print(json.dumps({"exchanges": len(exchanges), "away": away}) + "\\n", end="", flush=True)
dist.destroy_process_group()
"""


def test_ranks_exchange_once_a_window_and_train_as_one_process_would(warm, tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(RANKS))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = warm.run(*launcher, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == 2
    for answer in answers:
        assert answer["exchanges"] == 2  # one bucket, in each of two windows of two batches of three pieces
        assert answer["away"] < 1e-6  # what ranks agree upon goes through FP32
