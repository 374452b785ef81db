"""Which operation went bad first, and why: a step is run again, and each operation's results are looked at.

``replay`` runs a ``Subject`` again as it was and leaves no mark; ``recorder`` writes an operation's inputs and results
on a ``tape``, by their smallest and largest values (``ranges``); ``slicing`` goes back from a bad value to where it was
born; ``looking`` looks closer at the operations found; ``trials`` tries remedies. ``explaining`` puts it all together.

The room can be called, as the function ``ampwise.trace`` whose name it shares: ``help(ampwise.trace.trace)``.
"""

from __future__ import annotations

from ampwise.rooms import share_name

share_name(__name__)
