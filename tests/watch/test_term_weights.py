"""Weights of a loss's terms, read from its graph."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ampwise.watch.term_weights import weights_of_terms


def test_a_product_with_a_number_has_one_operand():
    """As label smoothing makes it."""
    head, weight = nn.Linear(4, 3), torch.ones((), requires_grad=True)
    loss = cross_entropy(head(torch.ones(5, 4)), torch.tensor([0, 1, 2, 0, 1]), label_smoothing=0.1)
    assert any(len(node.next_functions) == 1 for node, _ in loss.grad_fn.next_functions)
    assert weights_of_terms(loss) == {}
    assert weights_of_terms(loss + (weight * head.weight.abs()).sum()).keys() == {id(weight)}
