"""Origin of a NaN or infinity, found by replaying the step."""
