"""Speed: where mixed precision gains nothing, and why."""
