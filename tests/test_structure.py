"""The architecture as tests: imports go one way, and torch is not loaded before it is needed."""

import ast
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import ampwise

SOURCE = Path(ampwise.__file__).parent

# A package imports from those before it, never from those after it, at the top of a file, inside a function or for type
# checkers. Rules come late, since they examine what other packages produce; finding/registry.py loads them by name.
ORDER = [
    "errors",
    "finding",
    "numbers",
    "hardware",
    "check",
    "runs",
    "report",
    "train",
    "trace",
    "watch",
    "guard",
    "tune",
    "rules",
    "integrations",
    "cli",
    "__main__",
]
# Packages of which every module loads without torch, except for the modules named here.
WITHOUT_TORCH = ["errors", "finding", "hardware", "check", "rules", "runs", "report", "cli", "__main__"]
TENSOR_MODULES = {"ampwise.runs.plain_data", "ampwise.runs.tensor_files"}


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def package_of(module):
    return [*module.split("."), ""][1]


def upward_imports(module, source):
    """Yield the imports of a module from packages that come after its own in ORDER."""
    own = package_of(module)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name == "ampwise" or (name.startswith("ampwise.") and ORDER.index(package_of(name)) > ORDER.index(own)):
                yield f"{module}:{node.lineno} imports {name}"


def test_imports_go_one_way():
    found = {name: path for name, path in modules() if name != "ampwise"}
    assert {package_of(name) for name in found} == set(ORDER), "the packages and ORDER differ"
    assert not [each for name, path in found.items() for each in upward_imports(name, path.read_text())]


def test_upward_imports_are_found():
    assert list(upward_imports("ampwise.finding", "from ampwise.cli import main"))
    assert list(upward_imports("ampwise.train.engine", "def f():\n    from ampwise.trace import replay"))
    assert list(upward_imports("ampwise.runs.writer", "import ampwise"))
    guarded = "if TYPE_CHECKING:\n    from ampwise.watch.run_events import Clip"
    assert list(upward_imports("ampwise.report.page", guarded))
    assert list(upward_imports("ampwise.watch.findings", "from ampwise.rules.amp1xx_order import double_step"))
    assert not list(upward_imports("ampwise.cli.run", "from ampwise.watch.running import run"))
    assert not list(upward_imports("ampwise.train.engine", "from ampwise.train.step import Step"))


def test_what_only_reads_loads_without_torch():
    names = [name for name, _ in modules() if package_of(name) in WITHOUT_TORCH and name not in TENSOR_MODULES]
    assert len(names) > 200
    code = f"import sys, importlib\nsys.modules['torch'] = None\nfor name in {names!r}: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def loads_torch(code):
    script = f"import sys\n{code}\nprint('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return result.stdout.splitlines()[-1] == "True"


def test_importing_ampwise_leaves_torch_out():
    assert not loads_torch("import ampwise; ampwise.Finding, ampwise.Census, ampwise.find_format('half')")


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
        "except ampwise.errors.MissingDependency as error: print(error)\n"
        "import ampwise.trace\n"
        "try: ampwise.trace(len)\n"
        "except ampwise.errors.MissingDependency as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ampwise.census needs torch" in result.stdout
    assert "ampwise.trace needs torch" in result.stdout
    assert "pip install 'ampwise[torch]'" in result.stdout


def test_every_module_has_a_docstring_and_all_exists():
    for found in pkgutil.walk_packages(ampwise.__path__, "ampwise."):
        if found.name.split(".")[-1].startswith("_") or found.name.endswith(("kernel", "launch")):
            continue  # private files; and the kernel needs Triton
        module = importlib.import_module(found.name)
        assert module.__doc__ or hasattr(module, "RULE"), found.name  # the summary of a rule says what its file is
        for name in getattr(module, "__all__", []):
            assert hasattr(module, name), f"{found.name}.{name}"


def test_frameworks_have_short_names():
    for name in ("accelerate", "lightning", "transformers"):
        spec = importlib.util.find_spec(f"ampwise.{name}")
        assert Path(spec.origin) == SOURCE / "integrations" / f"{name}.py"
    assert importlib.util.find_spec("ampwise.nonsense") is None
