"""State that must last: the scaler, its checkpoint, accumulated gradients."""
