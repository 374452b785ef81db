"""The training step.

``engine`` drives it: micro-batches are accumulated (``accumulator``), gradients are checked and clipped
(``clipping``), the step is taken or skipped as a whole (``scaler``), and schedulers and buffers follow it
(``schedulers``, ``buffer_snapshot``). ``precision`` defines which precision each operation runs in.
Tracing, sinks and the guard are callbacks (``callback``).
"""
