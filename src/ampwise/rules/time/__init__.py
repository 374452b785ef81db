"""Rules about where a run's time goes."""
