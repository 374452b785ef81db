"""Choice of a precision: the hardware, and common advice that does not hold."""
