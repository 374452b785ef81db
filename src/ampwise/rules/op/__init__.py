"""Rules about where a training step went bad: the operation, or its input. One rule applies to each bad step."""
