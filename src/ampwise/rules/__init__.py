"""The rules: one file each, with the rule's text and every check of it.

``ampwise.finding.registry`` finds the files and says what a check is given; no other package imports from here.
"""
