"""What somebody asks about a precision: the device, the model, what was proposed, and what goes wrong. No torch."""
