"""Settings: where they come from, and what is said of those that make no sense."""

import pytest

from ampwise.check.config import KEYS, CheckSettings, SettingsByFolder, read_settings
from ampwise.errors import AmpwiseError, BadInput


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return write


def test_all_keys(write):
    write(
        "pyproject.toml",
        """
        [tool.ampwise]
        select = ["AMP1"]
        ignore = ["AMP101"]
        extend-select = ["AMP2"]
        exclude = ["a"]
        extend-exclude = ["b"]
        output-format = "concise"
        target-torch = "2.2"
        [tool.ampwise.per-file-ignores]
        "tests/*" = ["ALL"]
        """,
    )
    found = read_settings("pyproject.toml")
    assert len(KEYS) == 8
    assert (found.select, found.ignore, found.extend_select) == (("AMP1",), ("AMP101",), ("AMP2",))
    assert (found.exclude, found.extend_exclude) == (("a",), ("b",))
    assert (found.output_format, found.target_torch) == ("concise", "2.2")
    assert found.per_file_ignores == {"tests/*": ("ALL",)}


def test_the_nearest_file_that_speaks_of_ampwise_holds(write):
    write("pyproject.toml", '[tool.ampwise]\nselect = ["AMP1"]\n')
    write("a/pyproject.toml", "[project]\nname = 'a'\n")
    write("a/b/ampwise.toml", 'select = ["AMP2"]\n')
    write("a/b/pyproject.toml", '[tool.ampwise]\nselect = ["AMP3"]\n')
    configs = SettingsByFolder()
    assert configs.for_file("x.py").select == ("AMP1",)
    assert configs.for_file("a/x.py").select == ("AMP1",)
    assert configs.for_file("a/b/c/x.py").select == ("AMP2",)
    assert SettingsByFolder(isolated=True).for_file("x.py") == CheckSettings()
    assert SettingsByFolder("a/b/pyproject.toml").for_file("x.py").select == ("AMP3",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("selct = []", "ampwise.toml: unknown key 'selct'. Did you mean select"),
        ("per_file_ignores = {}", "unknown key 'per_file_ignores'. Did you mean per-file-ignores"),
        ("select = 'AMP1'", "ampwise.toml: select: expected a list of strings, got a string"),
        ("select = [1]", "ampwise.toml: select: expected a list of strings, got a list with other values"),
        ("fix = true", "ampwise.toml: fix is not a setting; use it on the command line: ampwise check --fix"),
        (
            "unsafe-fixes = false",
            "unsafe-fixes is not a setting; use it on the command line: ampwise check --unsafe-fixes",
        ),
        ("x = " + "[" * 40, "ampwise.toml: brackets are nested more than 32 deep"),
        ("x = " + "{a=" * 40, "ampwise.toml: brackets are nested more than 32 deep"),
        ("a." * 100_000 + "a = 1", "ampwise.toml: a dotted key has more than 16 parts"),
        ("[" + "'a' . " * 40_000 + "a]", "ampwise.toml: a dotted key has more than 16 parts"),
        ("#" * 250_001, "ampwise.toml: larger than 250 kB, the limit for settings; --isolated ignores settings files"),
        ("per-file-ignores = []", 'per-file-ignores: expected a table such as {"tests/*" = ["AMP101"]}, got a list'),
        ("per-file-ignores = {a = 'b'}", "per-file-ignores.'a': expected a list of strings, got a string"),
        ("output-format = 2020-01-01", 'output-format: expected a name such as "concise", got'),
        ("target-torch = 2.2", 'target-torch: expected a version such as "2.2", got a number'),
        ("target-torch = '>=2'", "target-torch: expected a version such as \"2.2\", got '>=2'"),
        ("a = ", "ampwise.toml is not TOML: Invalid value"),
    ],
)
def test_mistakes_name_the_file_the_key_and_what_is_possible(write, text, message):
    write("ampwise.toml", text)
    with pytest.raises(AmpwiseError) as caught:
        read_settings("ampwise.toml")
    assert message in str(caught.value)


def test_tool_ampwise_that_is_no_table(write):
    write("pyproject.toml", "[tool]\nampwise = 1\n")
    with pytest.raises(BadInput, match=r"tool\.ampwise: expected a table, \[tool\.ampwise\], got a number"):
        read_settings("pyproject.toml")


def test_a_broken_pyproject_that_does_not_mention_us_is_not_our_business(write):
    write("pyproject.toml", "nonsense")
    assert SettingsByFolder().for_file("x.py").source is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": "nowhere.toml"}, "check --config nowhere.toml: no such file"),
        ({"config": "pyproject.toml"}, "check --config pyproject.toml: the file has no [tool.ampwise]"),
        ({"config": "x", "isolated": True}, "check --config x: cannot be combined with --isolated"),
    ],
)
def test_config_that_is_none(write, options, message):
    write("pyproject.toml", "")
    with pytest.raises(BadInput) as caught:
        SettingsByFolder(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        '"""' + "[{" * 50 + '"""',
        "'''" + "a." * 50 + "'''",
        '"' + "[" * 50 + '\\"' + "a." * 50 + '"',
        "'" + "{" * 50 + "'",
        '"""a""""" # ' + "[" * 50,
        "[" + "1.0, " * 50 + "]",
        "[" + "[1], " * 50 + "]",
    ],
)
def test_text_and_long_lists_are_not_taken_for_nesting(write, value):
    write("pyproject.toml", f'[tool.other]\nvalue = {value}\n[tool.ampwise]\nselect = ["AMP1"]\n')
    assert read_settings("pyproject.toml").select == ("AMP1",)


@pytest.mark.parametrize("value", ['"""a"""""', "'''a'''''", '"""\\""""', "'\\'", '"\\\\"'])
def test_nesting_after_odd_strings_is_seen(write, value):
    write("ampwise.toml", f"a = {value}\nb = {'[' * 5000}\n")
    with pytest.raises(BadInput, match="brackets are nested"):
        read_settings("ampwise.toml")
