"""Random numbers, restored from what may be anybody's file."""

import numpy as np
import pytest
import torch

from ampwise.train.random_state import plain_random_state, restore_random

from ..for_each import for_each

CPU = torch.device("cpu")


@for_each("position", [-1, 625, 10**6])
def test_a_place_outside_of_numpys_words_is_refused(position):
    state = plain_random_state(CPU)
    state["numpy"]["state"]["pos"] = position
    with pytest.raises(ValueError, match="invalid state of numpy"):
        restore_random(state, CPU)


def test_a_state_that_is_restored_goes_on_with_the_same_numbers():
    state = plain_random_state(CPU)
    drawn = np.random.rand(3).tolist(), torch.rand(3).tolist()
    restore_random(state, CPU)
    assert (np.random.rand(3).tolist(), torch.rand(3).tolist()) == drawn
