"""Choose a precision by measuring: advise, compare, memory, align, diff, search."""
