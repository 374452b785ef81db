"""Kinds of sinks: one module each, with the name that the user gives."""
