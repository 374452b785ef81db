"""Choosing a precision by evidence: advise, compare, memory, align."""
