"""Which files are found, in which order, and what is said of paths that give none."""

import os

import pytest

from ampwise.check.config import SettingsByFolder
from ampwise.check.files import DEFAULT_EXCLUDE, find_files, glob_matcher


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Make files (by name, empty unless a text is given) and stand in their folder."""
    monkeypatch.chdir(tmp_path)

    def make(*paths, **texts):
        for path in paths:
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(texts.get(path, ""))
        return tmp_path

    return make


def found(*paths, **options):
    return find_files(paths or ["."], SettingsByFolder(**options))


def test_folders_are_walked_in_order_without_what_is_not_ones_own(tree):
    excluded = [f"{name}/x.py" for name in DEFAULT_EXCLUDE]
    tree("b.py", "a/z.py", "a/y.ipynb", "a/b/c.py", "notes.txt", "a/data.json", *excluded)
    assert found().files == ["b.py", "a/y.ipynb", "a/z.py", "a/b/c.py"]
    assert found("a", "b.py").files == ["a/y.ipynb", "a/z.py", "a/b/c.py", "b.py"]


def test_a_file_given_by_name_is_always_checked_and_once(tree):
    tree("build/x.py", "script", "a.py")
    assert found("build/x.py", "script", "./a.py", "a.py", ".").files == ["build/x.py", "script", "a.py"]


def test_exclude_replaces_the_usual_list_and_extend_exclude_adds_to_it(tree):
    root = tree("build/x.py", "gen/a_pb2.py", "gen/b.py", "sub/gen/c.py", "docs/d/e.py", "keep.py")
    (root / "pyproject.toml").write_text('[tool.ampwise]\nextend-exclude = ["*_pb2.py", "docs/**", "/sub/gen"]\n')
    assert found().files == ["keep.py", "gen/b.py"]
    (root / "pyproject.toml").write_text('[tool.ampwise]\nexclude = ["**/gen"]\n')
    assert found().files == ["keep.py", "build/x.py", "docs/d/e.py"]
    assert "sub/gen/c.py" in found(isolated=True).files


def test_the_nearest_settings_exclude(tree):
    root = tree("a/x.py", "a/y.py", "b/x.py")
    (root / "a" / "ampwise.toml").write_text('exclude = ["x.py"]\n')
    assert found().files == ["a/y.py", "b/x.py"]


def test_excluded_even_if_named(tree, monkeypatch):
    root = tree("dist/project/a.py", "dist/project/build/b.py", "dist/project/gen/x/c.py", "dist/project/gen/d_pb2.py")
    monkeypatch.chdir(root / "dist" / "project")
    paths = ["a.py", "build/b.py", "gen/x/c.py", "gen/d_pb2.py"]
    force = find_files(paths, SettingsByFolder(), force_exclude=True)
    assert (force.files, force.excluded) == (["a.py", "gen/x/c.py", "gen/d_pb2.py"], 1), "dist is above the project"
    assert find_files(["build"], SettingsByFolder(), force_exclude=True).files == []
    (root / "dist" / "project" / "ampwise.toml").write_text('extend-exclude = ["gen/x", "*_pb2.py"]\n')
    assert find_files(paths, SettingsByFolder(), force_exclude=True).files == ["a.py"]
    monkeypatch.chdir(root)
    paths = [f"dist/project/{path}" for path in paths]
    assert find_files(paths, SettingsByFolder(), force_exclude=True).files == ["dist/project/a.py"]
    assert find_files([str(root / path) for path in paths], SettingsByFolder(), force_exclude=True).excluded == 3
    monkeypatch.chdir("/")
    assert find_files([str(root / paths[0])], SettingsByFolder(), force_exclude=True).excluded == 0


def test_missing_and_empty(tree):
    tree("docs/readme.md", "a.py")
    result = found("nowhere.py", "docs", "a.py")
    assert result.files == ["a.py"]
    assert [str(error) for error in result.unreadable] == ["nowhere.py: no such file or folder"]
    assert result.notes == ["docs: no Python file or notebook in this folder"]


def test_a_folder_whose_files_were_named_before_is_not_called_empty(tree):
    tree("src/a.py")
    assert found("src/a.py", "src", "src").notes == []


def test_loops_of_links(tree):
    root = tree("a/x.py", "b/y.py")
    (root / "a" / "up").symlink_to(root)
    (root / "self.py").symlink_to(root / "self.py")
    (root / "dangling.py").symlink_to(root / "gone")
    (root / ".#lock.py").symlink_to("user@host:1")
    (root / "c").symlink_to(root / "b")
    result = found()
    assert result.files == ["a/x.py", "b/y.py"]
    assert result.notes == ["a/up: a loop of symbolic links, not followed"]
    assert sorted(str(error) for error in result.unreadable) == [
        "dangling.py: a broken symbolic link",
        "self.py: a loop of symbolic links",
    ]
    assert str(found("self.py").unreadable[0]) == "self.py: a loop of symbolic links"


def test_links_that_lead_out_are_counted_and_not_followed(tree, tmp_path_factory):
    root = tree("a.py", "sub/b.py")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "z.py").write_text("")
    (root / "0").symlink_to(elsewhere)
    assert found().notes == ["1 symlink leads out of the checked folder and was not followed: 0"]
    (root / "sub" / "z.py").symlink_to(elsewhere / "z.py")
    (root / "sub" / "up.py").symlink_to("../a.py")
    (root / "sub" / "above").symlink_to("..")
    result = found("sub")
    assert result.files == ["sub/b.py"]
    assert result.notes == [
        "3 symlinks lead out of the checked folder and were not followed: sub/above, sub/up.py, sub/z.py"
    ]
    assert found("sub", "a.py").files == ["sub/b.py", "a.py"]


def test_links_that_are_named_are_checked(tree, tmp_path_factory):
    root = tree()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "z.py").write_text("")
    (root / "0").symlink_to(elsewhere)
    (root / "y.py").symlink_to(elsewhere / "z.py")
    assert found("0").files == ["0/z.py"]
    assert found("y.py").files == ["y.py"]
    assert found("y.py", "0", str(elsewhere / "z.py")).files == ["y.py"], "one file, checked once"


def test_a_file_in_the_folder_is_known_by_its_own_path(tree):
    root = tree("b/real.py", "b/script", "build/c.py")
    (root / "a.py").symlink_to("b/real.py")
    (root / "c.py").symlink_to("build/c.py")
    (root / "d.py").symlink_to("b/script")
    assert found().files == ["b/real.py", "c.py", "d.py"], "the last two have no other way in"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read(tree):
    root = tree("a/x.py", "b.py")
    (root / "a").chmod(0)
    result = found()
    (root / "a").chmod(0o700)
    assert result.files == ["b.py"]
    assert [error.reason for error in result.unreadable] == ["permission denied"]


def test_odd_names(tree):
    root = tree("[x].py", " .py")
    (root / os.fsdecode(b"\xff.py")).write_text("")
    assert len(found().files) == 3


@pytest.mark.parametrize(
    ("glob", "hits", "misses"),
    [
        ("tests/*", ["tests/a.py", "tests/b/c.py"], ["src/tests.py"]),
        ("**/gen", ["gen", "a/gen"], ["gen.py"]),
        ("./a.py", ["a.py"], ["b/a.py"]),
        ("*.py", ["a.py", "b/a.py"], ["a.pyc"]),
        ("dir/", ["dir"], ["dirs"]),
    ],
)
def test_globs(glob, hits, misses):
    matcher = glob_matcher((glob,))
    assert all(matcher.match(path) for path in hits)
    assert not any(matcher.match(path) for path in misses)
