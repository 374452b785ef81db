"""Numerics: operations, masks and constants that 16 bits do not hold."""
