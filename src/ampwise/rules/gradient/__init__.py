"""What gradients, losses and the loss scale are like over a run."""
