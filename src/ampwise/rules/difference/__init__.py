"""Rules about a step on two sides: which difference rounding does not explain, and what it is."""
