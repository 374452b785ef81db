"""Observations as plain data, which the rules examine: of a running script, a model, a device or a comparison."""
