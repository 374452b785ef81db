"""Where there is no GPU, tests marked ``gpu`` skip and Triton's kernels run in its interpreter."""

import contextlib
import functools
import gc
import importlib.util
import itertools
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from ampwise.finding import log

from .night import NIGHTLY, is_left_to_the_night
from .warm import Cold, Warm, force_nothing_to_disk

# Time never decides a test. In CI the cases are the same in every run; elsewhere each run looks for new ones, and many
# at night, when what takes long is done in full.
settings.register_profile(
    "ampwise",
    deadline=None,
    derandomize="CI" in os.environ,
    max_examples=500 if NIGHTLY else 20,
)
settings.load_profile("ampwise")

force_nothing_to_disk()

# A shell starts what it runs in the background with Ctrl-C switched off, and tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The handlers of pytest do not count: most programs do not configure logging, and read messages on stderr.
LOGGER: logging.Logger = logging.getLogger("ampwise")
LOGGER.hasHandlers = lambda: any(not type(each).__module__.startswith("_pytest") for each in LOGGER.handlers)


class _Everything(set):
    def __contains__(self, message):
        return True


# What is said once per process, such as that this CPU is slow, is not said in whichever test comes first.
log._SAID = _Everything()

collect_ignore_glob = ["rules/fixtures/*"]  # code to be read, not run

# A thread each: several tests run at the same time, as do the processes they start. Read when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HAS_CUDA = False


def pytest_configure(config):
    global HAS_CUDA
    # With -n, the first process only hands out tests; torch takes it two seconds.
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        return
    with contextlib.suppress(ImportError):
        import torch

        HAS_CUDA = torch.cuda.is_available()
    if not HAS_CUDA:
        # Read by Triton when a kernel is defined, so before any test imports one.
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Without the garbage collector: hundreds of thousands of objects are made, and hardly any garbage.

    They stay to the end, so none of its rounds need look at them later: one over all takes half a second, and some
    tests ask for one.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        HEAP.modules = len(sys.modules)
        HEAP.after_a_file()
        gc.enable()


CACHE = type(functools.cache(len))  # it has no public name


class _Heap:
    """What the garbage collector looks at in each of its rounds is kept small, in thousands of tests of one process."""

    def __init__(self):
        self.caches, self.modules = [], 0

    def after_a_test(self):
        """Forget the last scripts that the linter has read: what it remembers of them holds their syntax trees, which
        are a million objects after a few hundred tests."""
        for cache in self.caches:
            cache.cache_clear()

    def after_a_file(self):
        """Find the caches of what has been imported. All that a large import makes stays to the end, too."""
        ours = [vars(module) for name, module in sys.modules.items() if name.startswith("ampwise.check.source")]
        found = {value for names in ours for value in names.values() if isinstance(value, CACHE)}
        self.caches = [cache for cache in found if cache.cache_parameters()["maxsize"] is not None]
        if len(sys.modules) > self.modules + 200:
            self.modules = len(sys.modules)
            gc.collect()
            gc.freeze()


HEAP = _Heap()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    result = yield
    HEAP.after_a_test()
    if nextitem is None or nextitem.path != item.path:
        HEAP.after_a_file()
    return result


def pytest_collection_modifyitems(config, items):
    kept, left, skipped = [], [], set()
    for item in items:
        needs_gpu = not HAS_CUDA and item.get_closest_marker("gpu") is not None
        # One skip stands for all combinations of its parameters.
        if is_left_to_the_night(item) or (needs_gpu and item.function in skipped):
            left.append(item)
            continue
        if needs_gpu:
            skipped.add(item.function)
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        kept.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


@pytest.fixture
def ranks_keep_coming(monkeypatch):
    """After each look into a folder, one more rank has made its own there."""

    def into(folder):
        listed, ranks = Path.iterdir, itertools.count(5)

        def iterdir(path):
            found = list(listed(path))
            if path == folder:
                (path / f"rank{next(ranks)}").mkdir()
            return iter(found)

        monkeypatch.setattr(Path, "iterdir", iterdir)

    return into


@pytest.fixture(scope="session")
def load_script():
    """Load a file that is no part of the package, such as an example, as a module."""

    def load(path):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def warm(tmp_path_factory, request):
    """Pythons that begin with torch loaded: ``warm.run("-m", "ampwise", "run", "train.py", cwd=folder)``."""
    pytest.importorskip("torch")
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if hasattr(request.config, "workerinput") else base) / "warm"  # by all processes of pytest
    shared.mkdir(exist_ok=True)
    pythons = Cold() if os.environ.get("AMPWISE_COLD") else Warm(shared)
    yield pythons
    pythons.close()
