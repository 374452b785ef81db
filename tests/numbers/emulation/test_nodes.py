"""What is noted of a graph's nodes."""

import torch

from ampwise.numbers.emulation import node_recipes as nodes
from ampwise.numbers.emulation.node_recipes import NodeRecipes
from ampwise.numbers.emulation.recipe import parse_recipe

E4M3 = parse_recipe("e4m3")


def test_nodes_of_others_are_not_noted(monkeypatch):
    """They would push out those of a pass that is still to go back."""
    monkeypatch.setattr(nodes, "MOST_NOTED", 4)
    found, x = NodeRecipes(), torch.ones(2, requires_grad=True)
    found.note(None, None)  # what came before is not counted
    y = x * 2
    found.note(E4M3, E4M3)
    for _ in range(20):
        x * 3
        found.note(None, None)
    seen = []
    y.grad_fn.register_prehook(lambda gradients: seen.append(found.recipe()))
    y.sum().backward()
    (noted,) = (each for each in found._noted.values() if each)
    assert [each.own for each in noted.values()] == [E4M3]
    assert seen == [E4M3]
