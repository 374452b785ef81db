"""Watch a running script: torch's entry points → evidence → findings → a record."""
