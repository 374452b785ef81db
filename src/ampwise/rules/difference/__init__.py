"""Rules about one step computed in two ways: which differences exceed rounding, and why."""
