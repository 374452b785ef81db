"""The tracker against hand counts, against torch's profiler, and real tensors against fake ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.tune.memory.allocation_log import ACTIVATIONS, CASTS, PARAMETERS
from ampwise.tune.memory.fake_tensors import without_memory
from ampwise.tune.memory.tracker import FORWARD, AllocationTracker

from ...for_each import for_each

ROWS, WIDTH = 128, 256
FLOAT = 4


def made():
    layers = (nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 32))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return model, torch.zeros(512, 64), torch.zeros(512, dtype=torch.long), optimizer


def step(model, x, y, optimizer):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def tracked_peak(parts):
    """Bytes, as asked for, beyond those that are there from the start."""
    model, x, y, optimizer = parts
    with AllocationTracker() as tracker, tracker.reading(2.0):
        tracker.adopt("there", (*model.parameters(), x, y))
        tracker.adopt("there", (value for state in optimizer.state.values() for value in state.values()))
        before = sum(tracker.log().sizes)
        step(*parts)
    log = tracker.log()
    level = most = 0
    for event in log.events:
        level += log.sizes[event] if event >= 0 else -log.sizes[~event]
        most = max(most, level)
    return most - before


@pytest.mark.filterwarnings("ignore")  # the profiler's own
def test_torchs_profiler_counts_the_same_and_fake_tensors_too():
    parts = made()
    step(*parts)  # which makes the optimizer's state
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(*parts)
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    level = most = 0
    for _, nbytes in sorted((event.start_ns(), event.nbytes()) for event in events):
        level += nbytes
        most = max(most, level)
    assert most > 0
    assert tracked_peak(parts) == most
    with without_memory():
        fake = made()
        with AllocationTracker() as tracker, tracker.reading(2.0):
            step(*fake)
        assert tracked_peak(fake) == most


@for_each("depth", [1, 2, 5])
def test_a_chain_of_linear_layers_keeps_its_inputs(depth):
    with without_memory():
        model = nn.Sequential(
            *(layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
        )
        x = torch.zeros(ROWS, WIDTH)
        with AllocationTracker() as tracker:
            tracker.adopt(PARAMETERS, model.parameters())
            tracker.adopt("inputs", [x])
            with tracker.phase(FORWARD):
                loss = model(x).sum()
        log = tracker.log()
        # Each tanh keeps its result, which the next layer takes as its input; and there is the loss.
        assert log.split(log.phase(FORWARD).end)[ACTIVATIONS] == depth * ROWS * WIDTH * FLOAT + 512
        del loss
        freed = tracker.log()
        assert ACTIVATIONS not in freed.split(len(freed.events))


def test_views_take_nothing_and_copies_do():
    with without_memory():
        x = torch.zeros(64, 64)
        with AllocationTracker() as tracker:
            tracker.adopt("x", [x])
            views = (x.t(), x.view(-1), x[3:], x.expand(2, 64, 64), x.detach())
            assert len(tracker.log().events) == 1
            copy = x.t().contiguous()
        assert tracker.log().levels()[-1] == 2 * 64 * 64 * FLOAT
        del views, copy


def test_tied_weights_count_once():
    with without_memory():
        first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        second.weight = first.weight
        with AllocationTracker() as tracker:
            tracker.adopt(PARAMETERS, (*first.parameters(), *second.parameters()))
        assert tracker.log().levels()[-1] == 64 * 64 * FLOAT


def test_autocasts_copies_of_weights_are_distinguished_from_those_of_inputs():
    with without_memory():
        layer, x = nn.Linear(128, 512, bias=False), torch.zeros(ROWS, 128)
        with AllocationTracker() as tracker, torch.autocast("cpu", torch.bfloat16):
            tracker.adopt(PARAMETERS, layer.parameters())
            tracker.adopt("inputs", [x])
            with tracker.phase(FORWARD):
                y = layer(x) + layer(x)
        most = tracker.log().most()
        assert most[CASTS] == 128 * 512 * 2  # cast once, though used twice
        del y


def test_memory_of_a_kernels_own_comes_and_goes():
    scratch = {torch.ops.aten.exp.default: lambda x: 7 * x.numel()}
    with without_memory(), AllocationTracker(scratch) as tracker:
        y = torch.zeros(512).exp()
    log = tracker.log()
    assert log.peak() == 2 * 2048 + 7 * 512
    assert log.levels()[-1] == 2048
    del y


def test_what_is_freed_at_once_is_in_one_order_whatever_order_it_came_in():
    logs = []
    for order in ((0, 1, 2), (2, 0, 1)):
        with without_memory(), AllocationTracker() as tracker:
            with tracker.phase(FORWARD):
                tensors = [torch.zeros(128) for _ in range(3)]
                for number in order:
                    tensors[number] = None
            last = torch.zeros(128)
        logs.append(tracker.log())
        del last
    assert logs[0] == logs[1]
