"""What a script does in its training steps: the order of calls, and whose gradients they touch."""
