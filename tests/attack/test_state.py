"""Random trainings that are skipped, rolled back and resumed at random: each ends as one that nothing happened to."""

import random
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ampwise import Engine, Guard, Ladder

from .effort import rounds

LADDER = Ladder(skips=2, rollbacks=100, change_precision=False, healthy=2)
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
    torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def in_place(buffer, value):
    buffer.view(torch.uint8).add_(value)


def by_data(buffer, value):
    buffer.data.view(torch.uint8).add_(value)


class Noting(nn.Module):
    """A layer with a buffer of any dtype and shape that changes in one way or another, by what was given."""

    def __init__(self, draw):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.way = draw.choice(["in place", "by data", "replaced", "grows", "from none", "none"])
        shape = draw.choice([(), (3,), (2, 3)])
        size = 1 if not shape else torch.Size(shape).numel()
        dtype = draw.choice(DTYPES)
        start = torch.zeros(size * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(shape)
        strided = draw.random() < 0.3 and len(shape) == 2
        start = start.t() if strided else start
        persistent = draw.random() < 0.5 and self.way != "grows"  # of another shape, it would be refused
        self.register_buffer("noted", None if self.way == "from none" else start, persistent=persistent)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=draw.random() < 0.5)

    def forward(self, x):
        if self.training:
            self.count += 1
            self.note(int(x.detach().nan_to_num(7.0).abs().sum() * 100) % 50 + 1)
        return self.linear(x)

    def note(self, value):
        noted = self.noted
        if self.way == "from none":
            self.noted = torch.full((3,), value) if noted is None else noted + value
        elif self.way == "grows":
            flat = noted.reshape(-1).view(torch.uint8)
            more = torch.full((noted.itemsize if noted.numel() < 9 else 0,), value, dtype=torch.uint8)
            self.noted = torch.cat([flat, more]).view(noted.dtype)
        elif self.way != "none" and noted.ndim and noted.is_contiguous():
            new = noted.detach().clone() if self.way == "replaced" else noted
            (by_data if self.way == "by data" else in_place)(new, value)
            self.noted = new


def nested(draw, depth=0):
    """Anything that a state may be."""
    kinds = ["tensor", "number", "text", "none"] + (["dict", "list", "tuple"] * 2 if depth < 3 else [])
    kind = draw.choice(kinds)
    inner = [nested(draw, depth + 1) for _ in range(draw.randint(0, 4))] if kind in ("dict", "list", "tuple") else []
    keys = draw.sample(["x", "x.y", "y", 0, "0", None, True, 1.5, "a/b", "~", "ampwise tensor"], len(inner))
    return {
        "tensor": lambda: torch.randint(0, 100, (2,)).to(draw.choice(DTYPES[:9])),
        "number": lambda: draw.choice([draw.random(), draw.randint(-9, 9), float("inf"), True]),
        "text": lambda: draw.choice(["", "x", "\n"]),
        "none": lambda: None,
        "dict": lambda: draw.choice([dict, OrderedDict])(zip(keys, inner, strict=True)),
        "list": lambda: inner,
        "tuple": lambda: tuple(inner),
    }[kind]()


class Journal:
    """What a user saves besides: it changes with every step that counts."""

    def __init__(self, seed):
        self.seed, self.steps = seed, 0
        self.update()

    def update(self):
        self.steps += 1
        torch_state = torch.get_rng_state()
        torch.manual_seed(self.seed + self.steps)
        self.state = nested(random.Random(self.seed + self.steps))
        torch.set_rng_state(torch_state)

    def state_dict(self):
        return {"steps": self.steps, "state": self.state}

    def load_state_dict(self, state):
        self.steps, self.state = state["steps"], state["state"]


def started(seed, folder, *, every):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    layers = [draw.choice([Noting, lambda draw: nn.BatchNorm1d(4)])(draw) for _ in range(draw.randint(1, 3))]
    model = nn.Sequential(*layers, nn.Linear(4, 3))
    kind = draw.choice([torch.optim.SGD, torch.optim.AdamW])
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.02, fused=draw.random() < 0.5, **options)
    accumulate = draw.choice([1, 1, 2])
    engine = Engine(model, optimizer, draw.choice(["fp32", "bf16"]), accumulate=accumulate, trace=draw.random() < 0.3)
    ema = AveragedModel(model[-1], multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)
    journal = Journal(seed)
    state = {"ema": ema, "journal": journal}
    guard = Guard(
        engine, folder, ladder=LADDER, snapshot_every=draw.choice([1, 2]), state=state, every=f"{every} steps"
    )
    return SimpleNamespace(model=model, engine=engine, optimizer=optimizer, ema=ema, journal=journal, guard=guard)


def batch(number, *, bad):
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)
    return (x * torch.nan if bad else x), y


def train(run, data, *, ends=None):
    """Up to a crash, which is after so many steps."""

    def loss(x, y):
        return F.cross_entropy(run.model(x).float(), y)

    run.guard.begin()
    steps = 0
    try:
        for x, y in run.guard.batches(data):
            step = run.guard.step(loss, x, y)
            if step.closed:
                run.ema.update_parameters(run.model[-1])
                if step.applied:
                    run.journal.update()
                steps += 1
            if steps == ends:
                return
        run.guard.__exit__(None, None, None)
    finally:
        run.guard.close()


def plain(value):
    """To the bit, and of the same kind."""
    if isinstance(value, torch.Tensor):
        whole = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        return "tensor", str(value.dtype), tuple(value.shape), whole
    if isinstance(value, dict):
        return type(value).__name__, [(repr(key), plain(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [plain(each) for each in value]
    return type(value).__name__, repr(value)


def everything(run, *, resumed):
    """Without caches that had another shape, of which a resumed model keeps its own."""
    buffers = {
        f"{path}.{name}": each
        for path, module in run.model.named_modules()
        for name, each in module._buffers.items()
        if not (resumed and name == "noted" and module.way == "grows")
    }
    state = run.optimizer.state_dict()["state"]
    return {
        "weights": plain(dict(run.model.named_parameters())),
        "buffers": plain(buffers),
        "optimizer": plain(state),
        "ema": plain(run.ema.state_dict()),
        "journal": plain(run.journal.state_dict()),
        "applied": run.engine.applied_steps,
    }


@pytest.mark.half_by_day
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("seed", range(rounds(3, 80)))
def test_a_training_that_much_happens_to_ends_as_one_that_nothing_happened_to(seed, tmp_path, capsys):
    draw = random.Random(1000 + seed)
    oracle = started(seed, tmp_path / "oracle", every=1000)
    size = oracle.engine._accumulator.size
    windows = draw.randint(8, 14)
    bad_windows = set()
    for first in range(3, windows - 2, 4):  # with enough healthy steps between them to go back to
        bad_windows |= set(range(first, first + draw.choice([0, 1, 2])))
    bad = {number for number in range(windows * size) if number // size in bad_windows}
    count = windows * size
    train(oracle, [batch(number, bad=False) for number in range(count) if number not in bad])

    data = [batch(number, bad=number in bad) for number in range(count)]
    every, ends = draw.randint(1, 4), draw.choice([None, draw.randint(1, windows)])
    run = started(seed, tmp_path / "run", every=every)
    train(run, data, ends=ends)
    if ends is not None:  # in another process, all but what is on disk is gone
        run = started(seed, tmp_path / "run", every=every)
        train(run, data)
    resumed = ends is not None
    assert everything(run, resumed=resumed) == everything(oracle, resumed=resumed)
