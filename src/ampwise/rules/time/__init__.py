"""Where a run's time goes."""
