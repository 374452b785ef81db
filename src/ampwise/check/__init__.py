"""The linter: it selects files and rules, runs the rules, and handles suppressions and fixes.

``linter`` is the driver. ``ampwise.check.source`` analyses a file; the rules in ``ampwise.rules`` find mistakes.
"""
