"""Choose a precision by measuring: advise, bench, memory, align, diff, search."""
