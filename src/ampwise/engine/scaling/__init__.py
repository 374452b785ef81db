"""The end of the step: the scaler, and what it stands on.

An optimizer's gradients (``gradients``) are read once (``reading``), ranks agree on what was read
(``agreement``), from which follow the norm, the skip and the clipping (``verdict``) and the next scale
(``scale``). The facts travel to the host by themselves (``facts``). ``scaler`` puts it behind torch's interface.
"""
