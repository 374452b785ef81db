"""Laws of a step: what grows with what, and what the ways of training change."""

import pytest
import torch
from torch import nn

from ampwise.errors import BadInput, UnknownName
from ampwise.train.low_bit.optimizers import OPTIMIZER_NAMES as BY_NAME
from ampwise.train.precision.precision import PRECISIONS
from ampwise.tune.memory.allocation_log import ACTIVATIONS, CASTS, GRADIENTS, PARAMETERS, STATE
from ampwise.tune.memory.allocator import RankStep
from ampwise.tune.memory.as_cuda import as_cuda
from ampwise.tune.memory.decoder import decoder_factory, decoder_shape
from ampwise.tune.memory.fake_tensors import without_memory
from ampwise.tune.memory.optimizers import NAMES, make_optimizer
from ampwise.tune.memory.setup import checkpointed, repeated_blocks
from ampwise.tune.memory.tracker import track

FP32, BF16 = PRECISIONS["fp32"], PRECISIONS["bf16"]


def test_activations_grow_with_the_batch_and_nothing_that_is_kept_does(small):
    one, two, four = (small.step(FP32, batch).usage.most for batch in (4, 8, 16))
    assert two[ACTIVATIONS] - one[ACTIVATIONS] == pytest.approx((four[ACTIVATIONS] - two[ACTIVATIONS]) / 2, rel=0.01)
    assert two[ACTIVATIONS] == pytest.approx(2 * one[ACTIVATIONS], rel=0.05)
    for kind in (PARAMETERS, GRADIENTS, STATE):
        assert one[kind] == two[kind] == four[kind]


def test_sixteen_bits_keep_fewer_activations_and_casts_of_the_weights(small):
    wide, narrow = (small.step(precision, 16).usage for precision in (FP32, BF16))
    assert 0.4 * wide.most[ACTIVATIONS] < narrow.most[ACTIVATIONS] < 0.85 * wide.most[ACTIVATIONS]
    assert CASTS not in wide.most
    assert narrow.most[CASTS] <= narrow.most[PARAMETERS] / 2
    assert narrow.most[PARAMETERS] == wide.most[PARAMETERS]
    assert narrow.peak < wide.peak


def test_the_parts_of_a_peak_add_up(small):
    for precision in (FP32, BF16):
        usage = RankStep(log=small.run(precision, 4)[0], extra={"workspaces": 1000}).usage
        assert sum(usage.split.values()) == usage.peak == max(usage.phases.values()) == usage.phases[usage.phase]
        assert usage.peak <= usage.reserved
        assert all(usage.split.get(kind, 0) <= most for kind, most in usage.most.items())


def test_keys_and_values_may_have_fewer_heads(case_of):
    whole, grouped = (
        case_of({"layers": 1, "heads": 4, "kv_heads": heads}).step(BF16, 2).usage.most for heads in (4, 1)
    )
    assert grouped[PARAMETERS] < whole[PARAMETERS]
    assert grouped[ACTIVATIONS] >= whole[ACTIVATIONS]  # they are repeated for the kernel


def test_tf32_is_counted_as_fp32_is(case_of):
    told = []
    case = case_of(progress=told.append)
    assert case.step(PRECISIONS["tf32"], 2) == case.step(FP32, 2)
    assert told == ["tf32, batch 2"]  # once for both


class Nested(nn.Module):
    """Blocks with a list of their own inside, and a list of single layers, which are no blocks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))


def test_blocks_are_the_outermost_of_a_kind():
    model = Nested()
    assert repeated_blocks(model) == [*model.blocks]
    assert repeated_blocks(nn.Linear(8, 8)) == []
    assert repeated_blocks(nn.ModuleList([nn.Sequential(nn.Linear(8, 8))])) == []  # of which there is one


def test_checkpointing_is_undone_and_needs_blocks():
    model = Nested()
    with checkpointed(model, "m"):
        assert all("forward" in block.__dict__ for block in model.blocks)
        assert model.blocks[0](torch.zeros(2, 8, requires_grad=True)).shape == (2, 8)
    assert not any("forward" in block.__dict__ for block in model.blocks)
    with (
        pytest.raises(BadInput, match=r"no repeated blocks were found .* torch.nn.ModuleList"),
        checkpointed(nn.Linear(8, 8), "m"),
    ):
        pass


@pytest.mark.half_by_day
@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda precision: precision.name)
def test_checkpointing_keeps_less_and_the_same_gradients(precision, small, case_of):
    plain, again = small.step(precision, 8), case_of(checkpointing=True).step(precision, 8)
    assert again.usage.most[ACTIVATIONS] < 0.6 * plain.usage.most[ACTIVATIONS]
    assert again.usage.peak <= plain.usage.peak
    for kind in (PARAMETERS, GRADIENTS, STATE):
        assert again.usage.most[kind] == plain.usage.most[kind]


@pytest.mark.half_by_day
@pytest.mark.parametrize(
    ("name", "bytes_a_parameter"),
    [
        ("adamw", 8),
        ("adam", 8),
        ("sgd", 0),
        ("sgd-momentum", 4),
        ("lion", 4),
        ("muon", 4),
        ("adamw8bit", 2 + 2 * 4 / 256),
        ("adamw4bit", 1 + 2 * 4 / 128),
        ("adamwfp8", 2 + 2 * 4 / 256),
        ("adam8bit", 2 + 2 * 4 / 256),
        ("adam4bit", 1 + 2 * 4 / 128),
        ("adamfp8", 2 + 2 * 4 / 256),
        ("adafactor", 0),  # a row and a column for each matrix
    ],
)
def test_state_a_parameter(name, bytes_a_parameter, case_of):
    case = case_of({"layers": 1, "hidden": 256}, optimizer=name)
    most = case.step(FP32, 1).usage.most
    assert most.get(STATE, 0) == pytest.approx(
        bytes_a_parameter * most[PARAMETERS] / 4, rel=0.02, abs=most[PARAMETERS] / 50
    )


def test_the_table_of_optimizers_is_tested_whole():
    (mark,) = (mark for mark in test_state_a_parameter.pytestmark if mark.name == "parametrize")
    assert {name for name, _ in mark.args[1]} == {*NAMES}
    assert {*BY_NAME} <= {*NAMES}, "what an engine takes by name can be counted"


def test_an_optimizer_left_to_itself_updates_all_at_once_as_on_cuda():
    shape = decoder_shape(None, {"layers": 1, "hidden": 128, "vocab": 512, "seq": 32})

    def update(**options):
        with without_memory(), as_cuda():
            subject = decoder_factory(shape).make("cpu", 1)
            log = track(subject, FP32, torch.optim.AdamW(subject.parameters, **options))
        update = log.phase("update")
        return log.peak(update) - log.levels()[update.start]

    weights = 4 * shape.parameters
    assert update(fused=True) < 0.02 * weights
    assert update(foreach=False) < 0.5 * weights
    assert update() == pytest.approx(weights, rel=0.02)  # a copy of all of them


def test_an_unknown_optimizer_is_said():
    with pytest.raises(
        UnknownName, match=r"unknown optimizer 'adamv'. Did you mean adam.* --optimizer takes adamw, adam, sgd"
    ):
        make_optimizer("adamv", [])
