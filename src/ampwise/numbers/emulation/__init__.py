"""Matmuls on values rounded to a narrow format, on any device: what hardware with that format would compute."""
