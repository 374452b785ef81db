"""Where the time of a run goes: measured against counts done by hand and by torch's own counter of FLOPs."""

import json
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

from ampwise.watch.patches import Patches
from ampwise.watch.timing import RunTiming

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without BF16, which works all the same

WAYS = ("", "_backward")
BATCH, SIZE_IN, HIDDEN, SIZE_OUT = 24, 32, 64, 16


class Run:
    """A small model in training, with something to watch it."""

    def __init__(self, model=None, precision=torch.bfloat16, **settings):
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(SIZE_IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, SIZE_OUT))
        self.called = self.model
        self.precision = precision
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.x = torch.randn(BATCH, SIZE_IN)
        self.patches = Patches()
        self.timing = RunTiming(self.patches, **settings)
        self.step_number = 0

    def loss(self):
        with torch.autocast("cpu", dtype=self.precision or torch.bfloat16, enabled=self.precision is not None):
            return self.called(self.x).float().square().mean()

    def step(self):
        self.step_number += 1
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.timing.step_ended(self.step_number)
        return loss.item()

    def steps(self, count):
        return [self.step() for _ in range(count)]


@pytest.fixture
def make():
    made = []

    def run(*args, **settings):
        made.append(Run(*args, **settings))
        return made[-1]

    yield run
    for one in made:
        one.timing.abandon()
        one.patches.undo()


def by_hand(batch=BATCH):
    """Forward twice, and backward the weights twice and the input once: the first layer's needs no gradient."""
    first, second = 2 * batch * SIZE_IN * HIDDEN, 2 * batch * HIDDEN * SIZE_OUT
    return 2 * first + 3 * second


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("compiled", [None, "eager", "aot_eager"])
@pytest.mark.parametrize(("precision", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (None, "fp32")])
def test_matrix_work_is_what_one_counts_by_hand(make, precision, name, compiled):
    run = make(precision=precision, profile_at=(4,))
    if compiled:
        torch._dynamo.reset()
        run.called = torch.compile(run.model, backend=compiled)
    run.steps(5)
    use = run.timing.use()
    assert use.flops_by_precision == {name: by_hand()}
    assert use.half_share == (0 if name == "fp32" else 1)
    assert use.profiled_steps == 1
    assert sum(product.count for product in use.matmuls) == 5
    assert all(product.aligned for product in use.matmuls)


class Attending(nn.Module):
    """Convolutions of every kind, attention, and products autocast is asked for by name."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1, dilation=2)
        self.same = nn.Conv2d(8, 16, 3, padding="same")
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.line = nn.Conv1d(8, 8, 5)

    def forward(self, x):
        image = x.reshape(BATCH // 8, 1, 16, 16).expand(-1, 3, -1, -1)
        y = self.up(self.same(self.down(image)))
        y = self.line(y.flatten(2)).unflatten(1, (2, 4)).transpose(2, 3).contiguous()
        y = F.scaled_dot_product_attention(y, y, y)
        z = torch.mm(x, x.t())
        return y.float().sum() + torch.baddbmm(z[None].float(), z[None], z[None]).float().sum()


@pytest.mark.parametrize("precision", [torch.bfloat16, None])
def test_every_kind_of_product_agrees_with_torchs_own_counter(make, precision):
    run = make(Attending(), precision=precision, profile_at=(3,))
    run.x.requires_grad_()
    counter = FlopCounterMode(display=False)
    with counter:
        run.loss().backward()
    run.optimizer.zero_grad()
    run.steps(3)
    use = run.timing.use()
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    counted = {f"{attention}{way}": sum(p.flops for p in use.matmuls if p.op == f"{attention}{way}") for way in WAYS}
    # Attention on a CPU is not on that counter's list: two products forward, five backward.
    once = 2 * (BATCH // 8 * 2) * 192 * 192 * 4
    assert list(counted.values()) == [2 * once, 5 * once]
    assert use.flops - sum(counted.values()) == counter.get_total_flops()
    assert use.half_share == (0 if precision is None else 1)
    ops = {product.op for product in use.matmuls}
    assert {"convolution", "convolution_backward", "mm", "bmm", "baddbmm"} < ops


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_groups_divide_the_work_of_a_convolution(make, groups):
    # Not against torch's counter, which takes the gradient of grouped weights for that of whole ones.
    class Grouped(nn.Conv1d):
        def forward(self, x):
            return super().forward(x.reshape(-1, 16, 48))

    run = make(Grouped(16, 32, 3, groups=groups), profile_at=(3,))
    run.steps(3)
    once = 2 * (BATCH * SIZE_IN // 16 // 48) * 46 * 32 * (16 // groups) * 3
    assert run.timing.use().flops == 2 * once, "forward, and the weights' gradient"


def test_what_runs_outside_autocast_is_seen_in_fp32(make):
    run = make(profile_at=(3,))
    inner = run.loss
    run.loss = lambda: inner() + run.model[2](run.model[0](run.x)).mean()
    run.steps(3)
    use = run.timing.use()
    assert use.flops_by_precision == {"bf16": by_hand(), "fp32": by_hand()}
    assert use.half_share == 0.5


@pytest.mark.skipif(torch.__version__ < "2.12", reason="this torch's profiler does not record strides")
def test_sizes_off_alignment_are_those_of_rows_in_memory(make):
    run = make(nn.Sequential(nn.Linear(SIZE_IN, 33), nn.Linear(33, 8)), profile_at=(3,))
    run.x = torch.randn(13, SIZE_IN)  # an odd number of rows shifts no row
    run.steps(3)
    products = run.timing.use().matmuls
    assert {product.shape: product.aligned for product in products} == {
        "13×32 @ 32×33": False,
        "13×33 @ 33×8": False,
        "13×8 @ 8×33": False,
        "8×13 @ 13×33": False,
        "33×13 @ 13×32": False,
    }
    clean = make(profile_at=(3,))
    clean.x = torch.randn(13, SIZE_IN)
    clean.steps(3)
    assert all(product.aligned for product in clean.timing.use().matmuls)


def test_casts_and_the_other_kinds_of_work_are_distinguished(make):
    run = make(nn.Sequential(nn.Linear(SIZE_IN, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU()), profile_at=(3,))
    run.steps(3)
    use = run.timing.use()
    assert set(use.time_by_kind) == {"matrix", "casts", "normalisation", "elementwise", "optimizer", "other"}
    assert use.cast_share == pytest.approx(use.time_by_kind["casts"] / sum(use.time_by_kind.values()))
    wide = make(nn.Linear(SIZE_IN, HIDDEN), precision=None, profile_at=(3,))
    wide.steps(3)
    assert wide.timing.use().cast_share == 0


def test_several_windows_add_up(make):
    run = make(profile_at=(3, 5))
    run.steps(6)
    use = run.timing.use()
    assert (use.profiled_steps, use.flops) == (2, 2 * by_hand())


def test_the_watchs_own_work_is_left_out(make):
    run = make(precision=None, profile_at=(3,))
    for _ in range(3):
        with run.timing.paused():
            run.x @ run.x.t()
        run.step()
    assert run.timing.use().flops == by_hand()


def test_losses_and_graphs_are_the_same_watched_and_not(make):
    seen = []

    def counted(graph, inputs):
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    run = make(profile_at=(3, 5))
    run.called = torch.compile(run.model, backend=counted)
    watched, graphs = run.steps(8), len(seen)
    torch._dynamo.reset()
    plain = make(profile_at=())
    plain.called = torch.compile(plain.model, backend=counted)
    assert watched == plain.steps(8)
    assert len(seen) == 2 * graphs


def test_nothing_is_printed(make, capfd):
    run = make(profile_at=(2, 3))
    run.steps(4)
    assert run.timing.use().profiled_steps == 2
    assert capfd.readouterr() == ("", "")


def test_what_others_print_meanwhile_still_comes_out(make, capfd, monkeypatch):
    real = torch.autograd.profiler._enable_profiler

    def loud(*args, **kwargs):
        os.write(2, b"from a thread of the script\n")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.autograd.profiler, "_enable_profiler", loud)
    make(profile_at=(2,)).steps(3)
    assert capfd.readouterr().err == "from a thread of the script\n"


def test_the_environment_is_put_back(make, monkeypatch):
    monkeypatch.setenv("TEARDOWN_CUPTI", "1")
    before = dict(os.environ)
    make(profile_at=(2,)).steps(3)
    assert dict(os.environ) == before


def profiled(*, schedule=None):
    return torch.profiler.profile(activities=[ProfilerActivity.CPU], schedule=schedule)


def test_the_scripts_profiler_comes_first_when_it_starts_in_our_window(make):
    run = make(profile_at=(3,))
    run.steps(2)  # our window is open
    with profiled() as theirs:
        run.steps(2)
    assert [event.count for event in theirs.key_averages() if event.key == "aten::mm"] == [6]
    run.steps(2)
    assert run.timing.use().flops == by_hand(), "ours has come later"


def test_ours_waits_while_the_scripts_is_on(make):
    run = make(profile_at=(3,))
    with profiled() as theirs:
        run.steps(4)
        assert not run.timing._recorded
    assert [event.count for event in theirs.key_averages() if event.key == "aten::mm"] == [12]
    run.steps(2)
    assert run.timing.use().flops == by_hand()


def test_a_scripts_profiler_that_only_warms_up_is_left_alone(make):
    run = make(profile_at=(3,))
    ready = []
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=3, active=1, repeat=1),
        on_trace_ready=lambda profile: ready.append(profile.key_averages()),
    ) as theirs:
        for _ in range(6):
            run.step()
            theirs.step()
    assert [event.count for event in ready[0] if event.key == "aten::mm"] == [3]
    assert "matmuls and casts: the script's own profiler was on" in run.timing.use().not_measured


def test_ours_stays_away_from_a_script_that_profiles_every_step(make):
    run = make(profile_at=(3,))
    for _ in range(8):
        with profiled():
            run.loss()
        run.step()
    use = run.timing.use()
    assert not use.profiled_steps
    assert "matmuls and casts: the script's own profiler was on" in use.not_measured


def test_everything_is_put_back():
    from torch.autograd import profiler
    from torch.utils.data import dataloader

    owners = (profiler.profile, profiler.emit_nvtx, profiler.emit_itt, dataloader._BaseDataLoaderIter)
    before = [dict(vars(owner)) for owner in owners]
    run = Run(profile_at=(2,))
    run.steps(3)
    assert [dict(vars(owner)) for owner in owners] != before
    run.patches.undo()
    assert [dict(vars(owner)) for owner in owners] == before


@pytest.mark.parametrize("method", ["__init__", "__enter__", "__exit__"])
def test_a_failure_is_a_sentence_and_training_goes_on(make, monkeypatch, method):
    run = make(profile_at=(3,))
    before = make(profile_at=()).steps(5)

    def broken(*args, **kwargs):
        raise RuntimeError("no profiler today\nfor reasons of its own")

    real = getattr(torch.autograd.profiler.profile, method)
    monkeypatch.setattr(torch.autograd.profiler.profile, method, broken)
    assert run.steps(5) == before
    monkeypatch.setattr(torch.autograd.profiler.profile, method, real)
    assert not torch.autograd._profiler_enabled()
    assert not torch.autograd.profiler._is_profiler_enabled
    use = run.timing.use()
    assert "matmuls and casts: RuntimeError: no profiler today" in use.not_measured
    assert use.flops == 0
    assert use.cast_share is None


def test_what_was_not_measured_is_said(make):
    run = make(profile_at=(6,))
    run.steps(2)
    assert run.timing.use().not_measured == (
        "matmuls and casts: the run ended before step 6 did",
        "host-device syncs: the run did not use a CUDA device",
        "waiting for data: the run ended within its first 3 steps",
    )


def test_the_result_is_plain_data(make):
    run = make(profile_at=(4,))
    run.steps(6)
    use = run.timing.use(autocast="bf16")
    told = json.loads(json.dumps(use.as_dict(), allow_nan=False))
    assert (told["device"], told["autocast"], told["steps"], told["profiled_steps"]) == ("cpu", "bf16", 2, 1)
    assert told["flops_by_precision"] == {"bf16": by_hand()}
    assert told["matrix_products"][0]["precision"] == "bf16"
