"""The sizes of a model, as its products run."""
