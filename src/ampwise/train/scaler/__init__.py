"""The gradient scaler: unscale, check, clip, step, and update the loss scale.

An optimizer's gradients (``gradients``) are read once (``grad_stats``), the totals are summed over ranks
(``rank_reduction``), and from them follow norm, skip and clipping (``step_decision``) and the next scale
(``loss_scale``). The results are copied to the host asynchronously (``async_scalars``). ``grad_scaler`` offers all of
it behind torch's interface.
"""
