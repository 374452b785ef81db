"""The gradient scaler: unscale, check, clip, step, and update the loss scale.

An optimizer's gradients (``gradients``) are read once (``grad_stats``); the totals are summed over ranks, and from them
follow norm, skip and clipping, and the next scale (``loss_scale``). The optimizer steps or not (``optimizer_step``),
and the results are copied to the host asynchronously (``step_result``). ``kernel`` and ``adam_kernel`` do this
arithmetic on a GPU. ``grad_scaler`` offers all of it behind torch's interface.
"""
