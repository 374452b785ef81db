"""Checkpoints on disk: folders of tensors and JSON, without code, which appear only when they are complete.

``layout`` names the files, and ``manifest`` describes them; ``catalog`` lists, verifies, marks and prunes checkpoints;
``lock`` refuses a second run in a directory. None of these imports torch. ``writing`` and ``reading`` do, and use
torch.distributed.checkpoint; ``rank_errors`` makes a failure on one rank fail on all.
"""
