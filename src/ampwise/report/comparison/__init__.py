"""Compare two runs: what changed between their records, as terminal text, JSON and notebook HTML."""
