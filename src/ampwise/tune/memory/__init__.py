"""How much memory a training step takes, without taking it."""
