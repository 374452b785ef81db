"""Modules are found as ``pkgutil`` finds them."""

import pkgutil
import zipfile

import pytest

import ampwise.cli
import ampwise.report.printers.outputs
from ampwise.finding.package_modules import module_names


@pytest.mark.parametrize(
    "package", [ampwise.cli, ampwise.report.printers.outputs], ids=lambda package: package.__name__
)
def test_as_pkgutil(package):
    found = module_names(package.__path__)
    assert len(found) > 4
    assert found == sorted(
        module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")
    )


def test_private_ones_and_other_files_are_left_out(tmp_path):
    for name in ("__init__.py", "_own.py", "one.py", "two.py", "three.txt", "__pycache__"):
        (tmp_path / name).touch()
    assert module_names([str(tmp_path)]) == ["one", "two"]


def test_in_a_zip(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("verbs/__init__.py", "verbs/check.py", "verbs/_own.py"):
            archive.writestr(name, "")
    assert module_names([str(tmp_path / "a.zip" / "verbs")]) == ["check"]
