"""What was seen of a running script, as plain records: the ground that rules of run time judge on."""
