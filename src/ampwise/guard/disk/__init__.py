"""Checkpoints on disk: folders of tensors and JSON, whole or not there, and no code in them.

``layout`` names the files, and ``manifest`` is what is said of them; ``catalog`` finds checkpoints, proves, marks and
prunes them; ``lock`` keeps a second run away. None of these loads torch. ``writing`` and ``reading`` do: they are the
two ways, through torch.distributed.checkpoint, and ``ranks`` lets all of a group fail together.
"""
