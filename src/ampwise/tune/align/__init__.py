"""Sizes that tensor cores read in whole words: which matmuls miss them, what that costs, and padding that fixes it."""
