"""Rules about a machine: each ``check`` takes a ``MachineUse``."""
