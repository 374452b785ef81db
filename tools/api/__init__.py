"""The parts of the listing of the public API."""
