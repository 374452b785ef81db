"""Rules about a choice that somebody is about to make: each ``check`` takes a ``Choice`` and says no, or be careful."""
