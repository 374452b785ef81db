"""For the doctests in src/: files whose imports need Triton are left out where there is none."""

import importlib.util

collect_ignore = []
if importlib.util.find_spec("triton") is None:
    collect_ignore += ["src/ampwise/numbers/census/kernel.py", "src/ampwise/numbers/census/launch.py"]
