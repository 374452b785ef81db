"""Jumps of the loss are found, and noise, falls and the first steps are not."""

import json
import math
import random

import pytest

from ampwise.watch.spikes import IN_A_ROW, KEPT, REMEMBERED, WINDOW, SpikeDetector


def watched(losses):
    watch = SpikeDetector()
    for step, loss in enumerate(losses, start=1):
        watch.add(step, loss)
    return watch


def noisy(n, seed=0, level=2.0, noise=0.1):
    rng = random.Random(seed)
    return [level * math.exp(rng.gauss(0, noise)) for _ in range(n)]


@pytest.mark.parametrize(("peak", "found"), [(-0.4, 0), (30.0, 1)])
def test_a_loss_below_zero_jumps_if_it_rises_by_more_than_its_size(peak, found):
    losses = [-each for each in noisy(200, noise=0.02)]  # as of a critic
    losses[120] = peak
    assert watched(losses).count == found


def test_losses_are_judged_anew_after_a_target_network_has_changed():
    losses = [*noisy(100, level=0.003), *noisy(100, level=0.1)]
    watch = SpikeDetector()
    for step, loss in enumerate(losses, start=1):
        if step == 101:
            watch.restart()
        watch.add(step, loss)
    assert watch.count == 0
    assert watched(losses).count == 1


def test_losses_of_both_signs_have_no_usual_size():
    rng = random.Random(0)
    losses = [rng.gauss(0, 0.02) for _ in range(200)]  # as of a policy gradient with a baseline
    losses[120] = 1.0
    assert watched(losses).count == 0
    assert watched([each + 2 for each in losses]).count == 0  # above zero it is half of the usual size
    losses[120] = 3.0
    assert watched([each + 2 for each in losses]).count == 1


def test_rises_that_are_as_usual_as_the_rest_are_no_spikes():
    rng = random.Random(0)
    losses = [each * (0.002 + math.exp(-step / 15)) for step, each in enumerate(noisy(200))]
    for step in range(48, 100):
        losses[step] = 1.5 if rng.random() < 0.25 else losses[step]  # layers are dropped at random
    losses[160] = 2.0
    assert not watched(losses).spikes
    quiet = noisy(160)
    quiet[150] = 200.0
    assert watched(quiet).count == 1
    quiet[60], quiet[80] = 5.0, 5.0  # these are not like it
    assert watched(quiet).count == 1


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


def test_a_new_level_is_reported_once():
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


# As a guard asks: at each step, and going back


def told(losses, watch=None, first=1):
    """The steps at which ``add`` says that a spike is there."""
    watch = SpikeDetector() if watch is None else watch
    return [step for step, loss in enumerate(losses, start=first) if watch.add(step, loss) is not None]


def test_a_sudden_spike_is_reported_at_its_step_and_a_lasting_one_once_it_lasts():
    losses = noisy(200)
    losses[120:123] = [40.0] * 3
    losses[160:175] = [loss * 1.95 for loss in losses[160:175]]
    assert told(losses) == [121, 160 + IN_A_ROW]


def test_what_is_reported_is_what_is_kept():
    losses = noisy(200)
    losses[120] = 20.0
    watch = SpikeDetector()
    returned = [spike for step, loss in enumerate(losses) if (spike := watch.add(step, loss)) is not None]
    assert returned == watch.spikes
    assert len(returned) == watch.count == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_changes_nothing(bad):
    losses = noisy(300)
    losses[150] = 30.0
    with_bad = [*losses[:100], *[bad] * 60, *losses[100:]]
    assert told(with_bad) == [211]


@pytest.mark.parametrize("back", [1, 30, 120, REMEMBERED // 2])
def test_what_is_forgotten_has_not_been(back):
    """A run that went astray, was put back and went on is judged as one that was never astray."""
    losses = noisy(700)
    after = noisy(100, seed=5)
    after[60] = 25.0
    straight, astray = SpikeDetector(), SpikeDetector()
    told(losses, straight), told(losses, astray)
    told([4.0 + step / 10 for step in range(back)], astray, first=701)
    astray.forget(701)
    straight.forget(701)
    assert astray._ordinary == straight._ordinary
    assert told(after, astray, first=701) == told(after, straight, first=701) == [761]


def test_a_new_level_that_was_not_yet_known_is_none_after_going_back():
    watch = watched(noisy(150) + noisy(60, seed=1, level=20.0))
    assert watch.count == 1
    watch.forget(161)
    assert {step for step, _ in watch._ordinary} == set(range(101, 151))
    watch = watched(noisy(150) + noisy(60, seed=1, level=20.0))
    watch.forget(205)
    assert [step for step, _ in watch._ordinary] == list(range(155, 205))


def test_after_going_back_it_is_judged_by_what_was_usual_there():
    losses = [100.0 * math.exp(-step / 100) * noise for step, noise in enumerate(noisy(600, level=1.0, noise=0.02))]
    watch = SpikeDetector()
    told(losses, watch)
    watch.forget(201)
    assert told(losses[200:], watch, first=201) == [], "the losses of then are no spikes"


def test_what_was_reported_stays_reported_and_a_spike_that_comes_again_is_reported_again():
    losses = [*noisy(150), 50.0]
    watch = SpikeDetector()
    assert told(losses, watch) == [151]
    watch.forget(140)
    assert watch.count == 1
    assert told(losses[139:], watch, first=140) == [151]
    assert watch.count == 2


def test_forgetting_everything_begins_to_look_anew():
    watch = watched(noisy(200))
    watch.forget(0)
    assert told([500.0, *noisy(WINDOW // 2 - 2), 500.0], watch) == []
    watch.forget(0)
    assert told([*noisy(30), 9000.0], watch, first=100) == [130]


@pytest.mark.parametrize("at", [10, 39, 100, 121, 123, 130, 171])
def test_another_goes_on_from_a_state_as_this_one_would(at):
    losses = noisy(300)
    losses[120:124] = [30.0] * 4
    losses[168:180] = [loss * 1.9 for loss in losses[168:180]]
    whole, first, second = SpikeDetector(), SpikeDetector(), SpikeDetector()
    expected = told(losses, whole)
    assert expected == [121, 168 + IN_A_ROW]
    early = told(losses[:at], first)
    second.load(json.loads(json.dumps(first.state())))
    assert early + told(losses[at:], second, first=at + 1) == expected
    assert second.state() == whole.state()


def test_a_state_is_small():
    assert len(json.dumps(watched(noisy(3000)).state())) < 4000


def test_a_loss_that_is_mostly_zero_has_no_spikes_of_its_own():
    """As a hinge loss: most samples are on the right side."""
    rng = random.Random(0)
    losses = [rng.expovariate(1.0) if rng.random() < 0.4 else 0.0 for _ in range(2000)]
    assert watched(losses).count <= 10, "of 2,000 steps"
    assert watched([*losses, 100.0]).spikes[-1].loss == 100.0


def test_a_few_zeros_do_not_make_noise_a_spike():
    rng = random.Random(1)
    losses = [0.0 if rng.random() < 0.02 else math.exp(rng.gauss(0, 1.0)) for _ in range(2000)]
    assert watched(losses).count == 0


def test_after_nothing_but_zeros_nothing_is_judged():
    assert watched([0.0] * 100 + [1e-7]).count == 0
