"""Other frameworks' training loops, with ampwise in them; and the door for coding agents."""
