"""Two runs beside each other: records in, what changed out, in the terminal, in JSON and in a notebook."""
