"""Keeps a training going through faults, and loses nothing.

``guard`` is the one that an engine reports each step to. What it goes by:

    ladder, recovery       what is to be done about bad steps, and doing it
    snapshots, state       the whole state of a run, and copies of it in memory
    checkpointing, saving  when it is kept, and written beside the training
    disk/, resuming        checkpoints on disk, and going on from one
    changes                a script that is not the one that a checkpoint was saved by
    data, sources          batches of a loader, of which the place is known
    generators             random numbers that a loader's parts keep for themselves
    position               where a run is in them, and which it passes over
    plain, nested          what is not a tensor, as JSON to the bit
    agreement, ends        ranks that decide alike; signals, silence, and the end
    telling, alerts        findings, and who is told of them
"""
