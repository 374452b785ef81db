"""Rules about gradients, losses and the loss scale over a run."""
