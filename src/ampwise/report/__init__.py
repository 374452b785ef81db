"""From a record to what a person reads: text, a page, JSON."""
