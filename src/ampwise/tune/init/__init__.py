"""Write a ``make`` function for a training script: read it, take what builds the model and the loss, try a step."""
