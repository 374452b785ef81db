"""Data of a question about a precision: the device, the model, the proposals, and the symptom. Torch-free."""
