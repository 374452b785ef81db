"""Text of scripts and notebooks in, evidence out: what rules about source look at.

A file is read once (``script``, ``notebook``), its code is parsed and never run, and what it does with scalers,
autocast and optimizers is gathered for the rules in ``ampwise.rules.source``. Nothing here imports torch.
"""
