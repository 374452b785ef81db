"""The training step.

``engine`` drives it: micro-batches add up in a window (``window``), the gradients are judged and clipped
(``clipping``), the step is taken or skipped as a whole (``scaling``), and what moves with it moves or stands still
(``schedule``, ``statistics``). ``precision`` has what is computed in what.
"""
