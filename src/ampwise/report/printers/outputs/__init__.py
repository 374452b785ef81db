"""One module per output format, with ruff's names; each has ``render(findings, *, colour=False, texts=None)``."""
