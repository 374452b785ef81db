# What the ranks import runs in processes of its own, where this folder is on the path.
collect_ignore = ["distributed_engine.py", "distributed_fsdp2.py"]
