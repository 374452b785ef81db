"""The record of a run: a folder that can be read at any moment, even while it is written or after a kill.

    RUN/
    ├── manifest.json   what ran, where and when, and how it ended
    ├── steps.jsonl     one line per step; older steps of a long run are merged into one line
    ├── layers.jsonl    one line per sample of the gradients of all parameters
    ├── findings.json   findings, with the texts of their rules
    └── rank1/ …        the same files for each further rank

``writer`` writes it, ``reader`` reads and follows it; ``rows`` has its data types, ``json_lines`` their lines.
"""
