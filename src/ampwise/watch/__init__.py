"""A running script, watched: torch's entry points → evidence → findings → a record."""
