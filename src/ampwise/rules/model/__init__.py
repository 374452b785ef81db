"""Rules about the matmul sizes of a model as it runs."""
