"""Where a training step went bad: the operation, or what came into it. One of these rules speaks for each step."""
