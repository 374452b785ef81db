"""Rules about a guarded run: recovery, checkpoints, sinks and ranks."""
