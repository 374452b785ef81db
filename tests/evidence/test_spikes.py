"""Jumps of the loss are found, and noise, falls and the first steps are not."""

import math
import random

import pytest

from ampwise.evidence.spikes import KEPT, SpikeWatch


def watched(losses):
    watch = SpikeWatch()
    for step, loss in enumerate(losses, start=1):
        watch.add(step, loss)
    return watch


def noisy(n, seed=0, level=2.0, noise=0.1):
    rng = random.Random(seed)
    return [level * math.exp(rng.gauss(0, noise)) for _ in range(n)]


def test_one_sudden_jump_is_found_with_its_step():
    losses = noisy(200)
    losses[120] = 20.0
    (spike,) = watched(losses).spikes
    assert (spike.step, spike.loss, spike.length) == (121, 20.0, 1)
    assert spike.usual == pytest.approx(2.0, rel=0.1)
    assert spike.spreads > 10


def test_a_lasting_jump_is_one_spike():
    losses = noisy(200)
    losses[100:112] = [loss * 2.2 for loss in losses[100:112]]
    watch = watched(losses)
    assert watch.count == 1
    assert watch.spikes[0].step == 101
    assert 8 <= watch.spikes[0].length <= 12


def test_a_new_level_is_told_once():
    watch = watched(noisy(150) + noisy(400, seed=1, level=20.0))
    assert watch.count == 1
    assert watch.spikes[0].step == 151


@pytest.mark.parametrize("seed", range(15))
def test_noise_is_no_spike(seed):
    assert not watched(noisy(1000, seed, noise=0.1)).spikes
    assert not watched(noisy(1000, seed, noise=0.7)).spikes


@pytest.mark.parametrize("seed", range(5))
def test_training_is_no_spike(seed):
    rng = random.Random(seed)
    falling = [(8 * math.exp(-step / 60) + 0.5) * math.exp(rng.gauss(0, 0.05)) for step in range(600)]
    assert not watched(falling).spikes


def test_the_first_steps_may_do_anything():
    assert not watched([2.0, 500.0, 3.0, 1e6, 2.0, *noisy(30), 100.0]).spikes


def test_losses_below_zero_are_judged_too():
    rng = random.Random(0)
    losses = [rng.gauss(-3, 0.2) for _ in range(150)]
    assert not watched(losses).spikes
    losses[100] = 5.0
    assert [spike.step for spike in watched(losses).spikes] == [101]


def test_a_loss_that_hardly_moves_may_move_a_little():
    assert not watched([1.0] * 100 + [1.1, 1.0, 1.15, 1.0]).spikes
    assert not watched([0.0] * 100).spikes


def test_down_is_no_spike():
    assert not watched([*noisy(100), 1e-9, -5.0, 0.0, *noisy(50, 3)]).spikes


def test_memory_is_flat():
    watch = watched([1.0] * 60 + [100.0 if step % 7 == 0 else 1.0 for step in range(3000)])
    assert len(watch.spikes) == KEPT
    assert watch.count > 400
