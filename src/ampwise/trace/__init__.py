"""Find the first operation that produced a NaN or an infinity, and why, by replaying the step.

``replay`` runs a ``ReplayStep`` again from the same state and restores everything afterwards; ``recorder`` writes each
operation's inputs and results on a ``Tape``, by their smallest and largest values (``value_ranges``); ``slicing``
follows a bad value back to the operation that produced it; ``op_inspection`` inspects the operations found;
``remedies`` proposes and tries fixes. ``diagnosis`` combines these into a ``Failure``. ``bad_steps`` is the callback by
which an Engine explains its bad steps, ``tracing`` the function for any other code.
"""
