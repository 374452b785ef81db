"""Which precision, and why. ``claims`` and ``symptoms`` are the tables of what people say and see; ``decide`` answers.

Nothing here needs torch but to look at a model or at this machine.
"""

from ampwise.tune.advise.advise import advise as advise
