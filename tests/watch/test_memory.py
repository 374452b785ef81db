"""What takes up memory, against what can be counted by hand."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ampwise.watch.memory import OptimizerMemory, TensorBlock, memory_facts
from ampwise.watch.watch import Watch

NOTHING_TAKEN = "Memory of weights, gradients and optimizer state: no optimizer step was seen."


def step(model, optimizer, inputs=None):
    model(torch.ones(2, 4) if inputs is None else inputs).sum().backward()
    optimizer.step()


def held(*optimizers):
    memory = OptimizerMemory()
    for index, optimizer in enumerate(optimizers):
        memory.take(index, optimizer)
    facts = memory.facts()
    return facts["parameters"], facts["gradients"], facts["optimizer"]


def test_adamw_keeps_two_of_each_and_a_counter():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    weights = (4 * 3 + 3) * 4
    assert held(optimizer) == ({"fp32": weights}, {"fp32": weights}, {"fp32": 2 * weights + 2 * 4})


def test_sgd_keeps_nothing_and_dtypes_are_distinguished():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    sizes = {"fp32": 15 * 4, "bf16": 8 * 2}
    assert held(optimizer) == (sizes, sizes, {})


def test_what_is_frozen_has_no_gradient():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    assert held(optimizer) == ({"fp32": 23 * 4}, {"fp32": 8 * 4}, {})


def test_a_parameter_of_two_optimizers_counts_once_and_so_does_shared_storage():
    flat = torch.zeros(20)
    one, other, same = nn.Parameter(flat[:12]), nn.Parameter(flat[12:]), nn.Parameter(flat[:12])
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in ([one, other], [one, same])]
    one.grad = torch.ones(12)
    assert held(*optimizers) == ({"fp32": 20 * 4}, {"fp32": 12 * 4}, {})


def test_what_is_spread_out_takes_what_it_takes():
    weight = nn.Parameter(torch.zeros(1, 4))
    weight.grad = torch.ones(1, 1).expand(1, 4)
    assert held(torch.optim.SGD([weight], lr=0.1)) == ({"fp32": 16}, {"fp32": 4}, {})


def test_sparse_gradients_are_their_rows_and_indices():
    rows = nn.Embedding(50, 8, sparse=True)
    optimizer = torch.optim.SGD(rows.parameters(), lr=0.1)
    step(rows, optimizer, torch.tensor([1, 2, 3]))
    assert held(optimizer) == ({"fp32": 50 * 8 * 4}, {"int64": 3 * 8, "fp32": 3 * 8 * 4}, {})


def test_of_what_is_shared_out_the_local_part():
    class Shared(torch.Tensor):
        """As DTensor is made: a shell around a part."""

        @staticmethod
        def __new__(cls, local):
            return torch.Tensor._make_wrapper_subclass(cls, (1000,), dtype=local.dtype)

        def __init__(self, local):
            self._local_tensor = local

        def __tensor_flatten__(self):
            return ["_local_tensor"], None

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError("nothing is to be computed")

    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {"part": Shared(torch.zeros(10, dtype=torch.float16)), "more": [torch.zeros(3)]}
    assert held(optimizer)[2] == {"fp16": 20, "fp32": 12}


def test_it_is_taken_once_and_only_of_those_that_live():
    memory = OptimizerMemory()
    for index in range(3):
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer)
        memory.take(index, optimizer)
        model.weight.grad = None
        memory.take(index, optimizer)
        if index < 2:
            del model, optimizer
            gc.collect()
    assert memory.facts()["gradients"] == {"fp32": 15 * 4}


# On a device


def on(device, *sizes, kind="parameters"):
    return [TensorBlock(kind, "fp32", device, size) for size in sizes]


PEAK = {"peak_allocated": 100, "peak_reserved": 120, "total": 1000}


def test_the_rest_is_what_the_peak_has_besides():
    counter = TensorBlock("optimizer", "fp32", "cpu", 4, is_counter=True)
    blocks = [*on("cuda:0", 20, 5), *on("cuda:0", 25, kind="gradients"), counter]
    (row,) = memory_facts(blocks, {"cuda:0": PEAK}, 7)["devices"].values()
    assert row == {**PEAK, "parameters": 25, "buffers": 0, "gradients": 25, "optimizer": 0, "rest": 50}


@pytest.mark.parametrize(
    "blocks",
    [[], on("cpu", 20), [*on("cuda:0", 20), *on("cpu", 20)], on("cuda:0", 101)],
    ids=["nothing known", "elsewhere", "in two places", "more than the peak"],
)
def test_where_it_is_not_known_it_is_left_out(blocks):
    (row,) = memory_facts(blocks, {"cuda:0": PEAK}, None)["devices"].values()
    assert "rest" not in row


@pytest.mark.gpu
def test_peaks_of_a_device_are_the_scripts_own():
    torch.cuda.reset_peak_memory_stats()
    model = nn.Linear(1024, 1024, device="cuda")
    with Watch(timing=False) as watch:
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer, torch.ones(8, 1024, device="cuda"))
    row = watch.facts()["memory"]["devices"]["cuda:0"]
    assert row["peak_allocated"] == torch.cuda.max_memory_allocated()
    assert row["parameters"] == (1024 * 1024 + 1024) * 4
    assert row["rest"] >= 0


# In a run


def test_a_run_says_what_it_held():
    with Watch(timing=False) as watch:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            step(model, optimizer)
            optimizer.zero_grad()
    facts = watch.facts()
    found = facts["memory"]
    assert {kind: found[kind] for kind in ("parameters", "gradients", "optimizer")} == {
        "parameters": {"fp32": 60},
        "gradients": {"fp32": 60},
        "optimizer": {"fp32": 60},
    }
    assert found["devices"] == {} or torch.cuda.is_available()
    assert NOTHING_TAKEN not in facts["not_measured"]


def test_a_step_that_was_skipped_has_made_no_state_yet():
    with Watch(timing=False) as watch:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).sum() * 1e9).backward()
            scaler.step(optimizer)
            scaler.update(2.0)
    assert watch.facts()["memory"]["optimizer"] == {"fp32": 2 * 60 + 2 * 4}


def test_without_a_step_only_the_host_is_known():
    with Watch(timing=False) as watch:
        pass
    facts = watch.facts()
    assert set(facts["memory"]) == {"devices", "host_peak"}
    assert NOTHING_TAKEN in facts["not_measured"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_hosts_peak_is_in_bytes():
    told = OptimizerMemory().facts()["host_peak"]
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    assert 0.5 * peak < told < 2 * peak


def test_a_tensor_that_cannot_be_counted_costs_the_count_and_no_step(monkeypatch):
    from ampwise.watch import memory

    def fail(*args):
        raise NotImplementedError("no storage")

    monkeypatch.setattr(memory, "_in_memory", fail)
    with Watch(timing=False) as watch:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            step(model, optimizer)
    assert len(watch.failures) == 1
    assert (watch.steps, watch._tracker.steps) == (4, 4)


def test_frozen_weights_and_buffers_of_the_model_count_too():
    frozen, trained = nn.BatchNorm1d(4), nn.Linear(4, 3)
    frozen.requires_grad_(False)
    model = nn.Sequential(frozen, trained)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with Watch() as watch:
        watch.adopt([model, optimizer])
        step(model, optimizer)
    facts = watch.facts()["memory"]
    assert facts["parameters"] == {"fp32": (8 + 15) * 4}
    assert facts["gradients"] == {"fp32": 15 * 4}
    assert facts["buffers"] == {"fp32": 8 * 4, "int64": 8}
