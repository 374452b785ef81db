import math
import random

from ampwise.rules.amp6xx_gradients.loss_spike import check_gradients

from .runs import judged, stepped


def losses(*planted, n=300):
    rng = random.Random(0)
    made = [2.0 * math.exp(rng.gauss(0, 0.1)) for _ in range(n)]
    for step, loss in planted:
        made[step - 1] = loss
    return stepped([{"loss": loss} for loss in made])


def test_a_spike_is_found_with_its_step():
    health = losses((150, 30.0))
    (finding,) = check_gradients(health)
    assert finding.place.step == 150
    assert finding.message.startswith("the loss jumped to 30 from a usual 2")
    assert judged(health)["AMP610"].count == 1


def test_the_worst_of_several_is_named():
    health = losses((100, 15.0), (200, 60.0), (250, 20.0))
    (finding,) = check_gradients(health)
    assert finding.place.step == 200
    assert finding.message.endswith("; 3 such jumps in total")
    assert judged(health)["AMP610"].count == 3


def test_noise_the_start_and_losses_that_are_not_finite_are_no_spikes():
    assert not list(check_gradients(losses()))
    assert not list(check_gradients(losses((3, 1e4), (20, 1e5))))
    assert not list(check_gradients(losses((100, math.nan), (101, math.inf))))
