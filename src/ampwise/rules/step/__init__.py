"""Rules about what a script does in its training steps: the order of calls, and the gradients they affect."""
