"""Checkpoints on disk: folders of tensors and JSON, without code, which appear only when they are complete.

``manifest`` names and describes the files; ``catalog`` lists, verifies, marks and prunes checkpoints; ``lock`` refuses
a second run in a directory. None of these imports torch. ``writing`` and ``reading`` do; ``exchange`` is how ranks do
either together, or fail together.
"""
