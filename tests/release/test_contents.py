"""What is in the wheel and the sdist: all that is needed, and nothing else."""

import email
import sysconfig
import tarfile
import zipfile

import pytest

from .conftest import RELEASED

NATIVE = "ampwise/numbers/census/_native.abi3.so"
VENDORED = "report/page/vendor"


@pytest.fixture(scope="module")
def source(tree):
    """{name: content} of the package as a checkout has it: whatever the files are, all are needed."""
    files = (path for path in (tree / "src" / "ampwise").rglob("*") if path.is_file())
    return {path.relative_to(tree / "src").as_posix(): path.read_bytes() for path in files}


def in_the_wheel(path):
    """{name: content} of the package, and of its metadata by their last names."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    package = {name: data for name, data in files.items() if name.startswith("ampwise/")}
    about = {name.partition(".dist-info/")[2]: data for name, data in files.items() if ".dist-info/" in name}
    assert len(package) + len(about) == len(files), "nothing lies beside the package"
    return package, about


@pytest.fixture(scope="module")
def contents(wheel):
    return in_the_wheel(wheel)


def test_the_wheel_has_the_package_whole(contents, source):
    package, _ = contents
    assert set(package) == {*source, NATIVE}
    assert [name for name, data in source.items() if package[name] != data] == []


def test_that_is_more_than_python(contents):
    kinds = {name.rpartition(".")[2] for name in contents[0]}
    assert kinds == {"py", "pyi", "c", "so", "toml", "html", "css", "js", "json", "typed", "LICENSE"}


def test_licences_travel(contents, source):
    package, about = contents
    files = {name.rpartition("/")[2].partition(".")[0] for name in source if f"/{VENDORED}/" in name}
    assert files
    licences = {name.removeprefix("licenses/"): data for name, data in about.items() if name.startswith("licenses/")}
    assert set(licences) == {"LICENSE", *(f"src/ampwise/{VENDORED}/{name}.LICENSE" for name in files)}
    assert b"Apache License" in licences["LICENSE"]
    for name in files:
        assert b"MIT" in package[f"ampwise/{VENDORED}/{name}.LICENSE"]
    assert email.message_from_bytes(about["METADATA"])["License-Expression"] == "Apache-2.0 AND MIT"


def test_one_wheel_serves_every_python_of_a_platform(wheel, contents, project):
    about = email.message_from_bytes(contents[1]["WHEEL"])
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert about["Tag"] == f"cp311-abi3-{platform}"
    assert about["Root-Is-Purelib"] == "false"
    assert wheel.name == f"ampwise-{project['version']}-cp311-abi3-{platform}.whl"


@pytest.mark.nightly
def test_without_a_compiler_only_the_c_loop_is_missing(contents, bare_wheel):
    """Built from the tree, too, and the other from the sdist: that has all that the tree has."""
    package, about = in_the_wheel(bare_wheel)
    assert package == {name: data for name, data in contents[0].items() if name != NATIVE}
    assert {name: data for name, data in about.items() if name != "RECORD"} == {
        name: data for name, data in contents[1].items() if name != "RECORD"
    }


def test_the_sdist_has_what_builds_it_and_no_more(sdist, project, source):
    top = f"ampwise-{project['version']}"
    assert sdist.name == f"{top}.tar.gz"
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    names = {member.name.removeprefix(f"{top}/") for member in members if member.isfile()}
    made = {"PKG-INFO", "setup.cfg", *(name for name in names if name.startswith("src/ampwise.egg-info/"))}
    assert names == {f"src/{name}" for name in source} | {*RELEASED} | made


def test_the_page_of_the_package_can_be_shown(contents, project):
    about = email.message_from_bytes(contents[1]["METADATA"])
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_payload().startswith("# ampwise")
    assert about["Requires-Python"] == project["requires-python"]
    assert set(about.get_all("Provides-Extra")) == set(project["optional-dependencies"])
