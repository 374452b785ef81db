"""What goes into a softmax, and what a checkpoint hides."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwise.tune.search.graph import before_softmax, has_hidden_parts


def test_logits_are_found_through_temperature_mask_shape_and_difference():
    x = torch.randn(4, 3, requires_grad=True)
    one, two, other = x @ torch.randn(3, 5), x @ torch.randn(3, 5), x @ torch.randn(3, 5)
    logits = ((one - two) / 0.1).masked_fill(torch.eye(4, 5, dtype=torch.bool), -9.0).unsqueeze(0).flatten(0, 1)
    loss = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long)) + F.layer_norm(other, (5,)).square().sum()
    found = set(before_softmax(loss))
    assert {one.grad_fn, two.grad_fn} <= found
    assert other.grad_fn not in found


def test_what_is_not_linear_on_the_way_is_no_logit():
    x = torch.randn(4, 3, requires_grad=True)
    hidden = x @ torch.randn(3, 5)
    loss = torch.relu(hidden).softmax(-1).square().sum()
    assert hidden.grad_fn not in set(before_softmax(loss))


def test_a_checkpoint_of_the_old_kind_hides_its_parameters():
    model, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    assert has_hidden_parts(checkpoint(model, x, use_reentrant=True).sum())
    assert not has_hidden_parts(checkpoint(model, x, use_reentrant=False).sum())
