"""Static analysis of scripts and notebooks, for the rules in ``ampwise.rules``.

A file is read once (``script``, ``notebook``), its code is parsed and never run, and what it does with scalers,
autocast and optimizers is collected for the rules. Nothing here imports torch.
"""
