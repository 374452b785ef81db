"""Rules about the run itself, and what goes on around it."""
