"""Reports about a recorded run: terminal text, an HTML page, JSON."""
