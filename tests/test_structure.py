"""The architecture, held by tests: imports go down only, torch stays out until it is needed."""

import ast
import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import ampwise

SOURCE = Path(ampwise.__file__).parent

# A module may import from its own layer or below. The longest prefix decides.
LAYERS = {
    "ampwise.errors": 1,
    "ampwise.finding": 1,
    "ampwise.frozen": 1,
    "ampwise.modules": 1,
    "ampwise.programs": 1,
    "ampwise.rooms": 1,
    "ampwise.strict_json": 1,
    "ampwise.formats": 1,
    "ampwise.hardware": 1,
    "ampwise.census": 1,
    "ampwise.source": 1,
    "ampwise.evidence": 1,
    "ampwise.rules": 2,
    "ampwise.record": 2,
    "ampwise.site": 2,
    "ampwise.printers": 3,
    "ampwise.lint": 3,
    "ampwise.sinks": 3,
    "ampwise.report": 3,
    "ampwise.live": 3,
    "ampwise.user_code": 3,
    "ampwise.formats.cast": 4,
    "ampwise.formats.cast_kernel": 4,
    "ampwise.formats.cast_launch": 4,
    "ampwise.census.measure": 4,
    "ampwise.census.cpu": 4,
    "ampwise.census.flat": 4,
    "ampwise.census.kernel": 4,
    "ampwise.census.launch": 4,
    "ampwise.census.launcher": 4,
    "ampwise.census.reference": 4,
    "ampwise.capturing": 4,
    "ampwise.compiled": 4,
    "ampwise.randomness": 4,
    "ampwise.tensors_on_disk": 4,
    "ampwise.emulation": 4,
    "ampwise.float8": 4,
    "ampwise.low_bit": 4,
    "ampwise.engine.precision": 4,
    "ampwise.trace": 5,
    "ampwise.engine": 6,  # which explains a step that went bad
    "ampwise.watch": 7,
    "ampwise.guard": 7,
    "ampwise.tune": 7,
    "ampwise.integrations": 8,
    "ampwise.accelerate": 8,
    "ampwise.lightning": 8,
    "ampwise.transformers": 8,
    "ampwise.cli": 8,
    "ampwise.__main__": 8,
}
FIRST_WITH_TORCH = 4
TORCH_LIKE = {"torch", "triton", "numpy"}


def layer_of(module):
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((LAYERS[prefix] for prefix in prefixes if prefix in LAYERS), None)


def imports_at_load(tree):
    """Modules imported when the file is loaded: not in functions, not for type checkers only."""
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def offences(module, source):
    """What a module imports that lies above it, or torch where there must be none."""
    own = layer_of(module)
    for name in imports_at_load(ast.parse(source)):
        if name.split(".")[0] in TORCH_LIKE and own < FIRST_WITH_TORCH:
            yield f"{module} (layer {own}) imports {name}"
        target = layer_of(name) if name.startswith("ampwise.") else None
        if target is not None and target > own:
            yield f"{module} (layer {own}) imports {name} (layer {target})"


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name != "ampwise":  # the public names: loaded on use, from every layer
            yield name, path


def test_imports_go_down_only():
    found = dict(modules())
    assert len(found) > 30
    homeless = [name for name in found if layer_of(name) is None]
    assert not homeless, "give its room a layer"
    assert not [offence for name, path in found.items() for offence in offences(name, path.read_text())]


def test_the_test_can_fail():
    assert list(offences("ampwise.finding", "from ampwise.cli import main"))
    assert list(offences("ampwise.rules.x", "import torch"))
    assert list(offences("ampwise.census.algebra", "from ampwise.census.measure import census"))
    assert not list(offences("ampwise.census.measure", "import torch\nfrom ampwise.census.algebra import Census"))
    assert not list(offences("ampwise.rules.x", "def f():\n    import torch"))


def loads_torch(code):
    script = f"import sys\n{code}\nprint('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return result.stdout.splitlines()[-1] == "True"


def test_importing_ampwise_leaves_torch_out():
    assert not loads_torch("import ampwise; ampwise.Finding, ampwise.Census, ampwise.find_format('half')")


@pytest.mark.half_by_day
@pytest.mark.parametrize("verb", [["rules"], ["formats"], ["explain", "AMP701"], ["gpu", "h200"]], ids=" ".join)
def test_verbs_that_read_leave_torch_out(verb):
    assert not loads_torch(f"from ampwise.cli import main; main({verb!r})")


@pytest.mark.nightly
def test_the_torch_test_can_fail():
    assert loads_torch("import ampwise; ampwise.cast")


def test_all_is_the_namespace():
    assert sorted(ampwise.__all__) == dir(ampwise)
    for name in ampwise.__all__:
        assert getattr(ampwise, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ampwise.nonsense


def test_the_version_is_the_installed_one():
    assert ampwise.__version__ == (_installed() or "unknown")


def _installed():
    try:
        return importlib.metadata.version("ampwise")
    except importlib.metadata.PackageNotFoundError:
        return None


def test_type_checkers_see_the_same_names():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    ours = [node for node in guarded.body if isinstance(node, ast.ImportFrom) and node.module.startswith("ampwise.")]
    seen = {alias.asname for node in ours for alias in node.names}
    assert seen == set(ampwise.__all__)


def test_every_public_name_is_documented():
    undocumented = [name for name in ampwise.__all__ if not (getattr(ampwise, name).__doc__ or "").strip()]
    assert not undocumented


def test_without_torch_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import ampwise\n"
        "try: ampwise.census\n"
        "except ampwise.MissingDependency as error: print(error)\n"
        "ampwise.Census  # from here on the name is the room\n"
        "try: ampwise.census([])\n"
        "except ampwise.MissingDependency as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.count("ampwise.census needs torch") == 2
    assert "pip install 'ampwise[torch]'" in result.stdout


def test_every_module_has_a_docstring_and_all_exists():
    for found in pkgutil.walk_packages(ampwise.__path__, "ampwise."):
        if found.name.split(".")[-1].startswith("_") or found.name.endswith(("kernel", "launch")):
            continue  # private files; and the kernel needs Triton
        module = importlib.import_module(found.name)
        assert module.__doc__, found.name
        for name in getattr(module, "__all__", []):
            assert hasattr(module, name), f"{found.name}.{name}"
