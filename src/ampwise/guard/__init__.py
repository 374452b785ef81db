"""Training kept going through faults: checkpoints that can be trusted, rollback, and the recovery ladder."""
