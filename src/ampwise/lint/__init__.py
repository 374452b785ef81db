"""The linter: which files, which rules, what is suppressed, what is mended.

``check`` drives it. What a file means is ``ampwise.source``'s business, and what is wrong with it that of the rules
in ``ampwise.rules.source``.
"""
