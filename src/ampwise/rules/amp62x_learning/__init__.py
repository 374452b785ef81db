"""Learning: parameters that no step changes, or changes wrongly."""
