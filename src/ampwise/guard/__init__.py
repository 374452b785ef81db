"""Keep a training run going through faults: checkpoints, rollback, recovery and exact resume.

``guard`` has the Guard class, which the engine calls at each step. The other modules:

    ladder, recovery              decide what to do about bad steps, and do it
    state, snapshots              the full training state, and copies of it in memory
    checkpointing                 when the state is saved, and writing it in the background
    disk/, resuming               checkpoints on disk, and resuming from one
    state_validation              what a checkpoint's plain state must look like to be used
    script_changes                differences between the script and the one that saved the checkpoint
    data_position, data_sources   batches of a loader with a position that can be saved and restored
    rank_agreement, stopping      decisions shared by all ranks; signals, the watchdog, stopping
    events, reporter              what happened, each with its message; printing and passing it on
"""
