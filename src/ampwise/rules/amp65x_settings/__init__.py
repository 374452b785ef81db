"""Settings without effect."""
