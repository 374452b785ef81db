"""Sizes that matrix units read in whole words: which products miss them, what that costs, and padding that mends it."""
