"""Rules about a planned precision choice: each ``check`` takes a ``Choice`` and advises against it or cautions."""
