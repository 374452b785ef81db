"""What is faster is taken, on times that are given; and that everything can be timed."""

import gc
import weakref

import pytest
import torch
from torch import nn

from ampwise.errors import MissingDependency, PrecisionUnavailable
from ampwise.train.float8 import recipe_timing as measuring
from ampwise.train.float8.recipe import Fp8
from ampwise.train.float8.recipe_timing import candidate_recipes, fastest_recipe, time_recipes

from ...for_each import for_each

CPU = torch.device("cpu")
OURS = Fp8("measured", backend="ampwise")


@for_each(
    ("times", "recipe"),
    [
        ({"current": 80, "delayed": 90}, "current"),
        ({"current": 80, "delayed": 60}, "delayed"),
        ({"current": 80, "delayed": 79}, "current"),  # as good as the same: the first
        ({"current": 98, "delayed": 98}, None),  # within noise
        ({"current": 120, "delayed": 150}, None),
        ({}, None),
    ],
)
def test_only_what_wins_beyond_noise_is_taken(times, recipe):
    found = fastest_recipe({"bf16": [1e-4] * 3, **{name: [each * 1e-6] * 3 for name, each in times.items()}}, "8×16→32")
    assert found.recipe == recipe
    if times:
        assert found.why.startswith("measured: 100 µs in bf16, ")
    assert "8×16→32" in found.why


def test_a_gain_that_drowns_in_noise_is_none():
    noisy = {"bf16": [0.8e-4, 0.8e-4, 1e-4, 1.2e-4, 1.2e-4], "current": [0.9e-4] * 5}
    assert fastest_recipe(noisy, "").recipe is None
    assert fastest_recipe({**noisy, "bf16": [1e-4] * 5}, "").recipe == "current"
    assert fastest_recipe({**noisy, "bf16": [0.8e-4] + [1e-4] * 4}, "").recipe == "current"  # once is nothing


def test_what_slows_the_machine_for_a_round_slows_both():
    slow = [1, 3, 1, 9, 1, 2, 1]
    times = {"bf16": [1e-4 * each for each in slow], "current": [0.9e-4 * each for each in slow]}
    assert fastest_recipe(times, "").recipe == "current"


def test_a_recipe_that_cannot_run_is_left_out(monkeypatch):
    work = measuring._work

    def failing(module, *args):
        if len(made) == 1:
            made.append(None)
            return lambda: torch.ones(2) @ torch.ones(3)
        made.append(None)
        return work(module, *args)

    made = []
    monkeypatch.setattr(measuring, "_work", failing)
    layer = nn.Linear(64, 32)
    found = time_recipes({layer: (8, torch.float32)}, OURS, CPU, compiled=False)[layer]
    assert "delayed, 8×64→32; current failed: inconsistent tensor size" in found.why


def test_each_shape_is_timed_once_by_work_that_runs():
    layers = [nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 64, bias=False).requires_grad_(False)]
    asked = []

    def timer(works, device):
        asked.append(list(works))
        for work in works.values():
            work()
        return {name: [1e-3] if name == "bf16" else [2e-4] for name in works}

    state = torch.random.get_rng_state()
    found = time_recipes(dict.fromkeys(layers, (8, torch.float32)), OURS, CPU, compiled=False, timer=timer)
    assert asked == [["bf16", "current", "delayed", "block"]] * 2
    assert [each.recipe for each in found.values()] == ["current"] * 3
    assert found[layers[0]].why == "measured: 250 µs in bf16, 50 µs current, 8×64→32"  # four at a time
    assert all(parameter.grad is None for layer in layers for parameter in layer.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_shape_is_timed_once_in_a_process_but_again_if_it_could_not_be_timed():
    asked = []

    def timer(works, device):
        asked.append(list(works))
        if len(asked) == 1:
            raise torch.OutOfMemoryError
        return {name: [1e-3] if name == "bf16" else [2e-4] for name in works}

    recipes = []
    for rows in (8, 8, 8, 16):
        layer = nn.Linear(64, 32)
        recipes.append(
            time_recipes({layer: (rows, torch.float32)}, OURS, CPU, compiled=False, timer=timer)[layer].recipe
        )
    assert recipes == [None, "current", "current", "current"]
    assert len(asked) == 3


def test_nothing_of_what_was_measured_stays(monkeypatch):
    made = []
    real = measuring._linear

    def linear(*args):
        made.append(real(*args))
        return made[-1]

    def timer(works, device):
        assert sum(each() is not None for each in alive) == 0, "of the shape before"
        alive.extend(weakref.ref(each.weight) for each in made)
        made.clear()
        return in_turns(works, device)

    alive, in_turns = [], measuring.time_in_turns
    monkeypatch.setattr(measuring, "_linear", linear)
    monkeypatch.setattr(measuring, "ROUNDS", 2)
    layers = dict.fromkeys([nn.Linear(64, 32), nn.Linear(32, 64)], (8, torch.float32))
    gc.disable()
    try:
        time_recipes(layers, OURS, CPU, compiled=False, timer=timer)
        assert len(alive) > 2
        assert not any(each() is not None for each in alive)
    finally:
        gc.enable()


def test_works_take_turns():
    order = []
    times = measuring.time_in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU)
    assert [len(each) for each in times.values()] == [measuring.ROUNDS] * 2
    turn = ["a"] * measuring.CALLS + ["b"] * measuring.CALLS
    assert order[2 * measuring.WARM_UP :] == turn * measuring.ROUNDS


def test_no_memory_left_is_an_answer():
    def timer(works, device):
        raise torch.OutOfMemoryError

    layer = nn.Linear(64, 32)
    found = time_recipes({layer: (8, torch.float32)}, OURS, CPU, compiled=False, timer=timer)[layer]
    assert (found.recipe, found.why) == (None, "no memory left to measure 8×64→32")


def test_candidates_are_those_of_backends_that_are_there(monkeypatch):
    def missing(recipe):
        raise MissingDependency("no torchao")

    monkeypatch.setattr(measuring, "float8_of_torchao", missing)
    assert [each.recipe for each in candidate_recipes(Fp8("measured"), CPU)] == ["current", "delayed", "block"]
    with pytest.raises(MissingDependency):
        candidate_recipes(Fp8("measured", backend="torchao"), CPU)
    monkeypatch.setattr(measuring, "float8_of_torchao", lambda recipe: None)
    assert candidate_recipes(Fp8("measured"), CPU)[0].made_by == "ampwise"
    assert len(candidate_recipes(Fp8("measured"), CPU)) == 6
    assert {each.backend for each in candidate_recipes(Fp8("measured", backend="torchao"), CPU)} == {"torchao"}


def test_kernels_that_are_wrong_are_no_candidates(monkeypatch):
    def wrong(fp8, device):
        raise PrecisionUnavailable("wrong")

    monkeypatch.setattr(measuring, "refuse_wrong_kernels", wrong)
    monkeypatch.setattr(measuring, "float8_of_torchao", lambda recipe: None)
    assert {each.made_by for each in candidate_recipes(Fp8("measured"), CPU)} == {"torchao"}
    with pytest.raises(PrecisionUnavailable):
        candidate_recipes(OURS, CPU)
