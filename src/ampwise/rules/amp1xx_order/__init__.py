"""Order of the step: scale, backward, unscale, clip, step, update."""
