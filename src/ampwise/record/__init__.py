"""A run on disk: a folder that can be read at any moment, also while it is written and after a kill.

    RUN/
    ├── manifest.json   what ran, where, since when, how it ended
    ├── steps.jsonl     a line for each step; of an older part of a long run, for several steps together
    ├── layers.jsonl    a line for each sample of the gradients of all parameters
    ├── findings.json   what was found, with the texts of its rules
    └── rank1/ …        the same of each further rank

``writer`` makes it, ``reader`` reads it, ``rows`` and ``bucket`` are what it is made of.
"""
