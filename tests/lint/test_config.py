"""Settings: where they come from, and what is said of those that make no sense."""

import pytest

from ampwise.errors import AmpwiseError, BadInput
from ampwise.lint.config import KEYS, Configs, Settings, read_settings


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
        [tool.ampwise.per-file-ignores]
        "tests/*" = ["ALL"]
        """,
    )
    found = read_settings("pyproject.toml")
    assert len(KEYS) == 7
    assert (found.select, found.ignore, found.extend_select) == (("AMP1",), ("AMP101",), ("AMP2",))
    assert (found.exclude, found.extend_exclude) == (("a",), ("b",))
    assert found.output_format == "concise"
    assert found.per_file_ignores == {"tests/*": ("ALL",)}


def test_the_nearest_file_that_speaks_of_ampwise_holds(write):
    write("pyproject.toml", '[tool.ampwise]\nselect = ["AMP1"]\n')
    write("a/pyproject.toml", "[project]\nname = 'a'\n")
    write("a/b/ampwise.toml", 'select = ["AMP2"]\n')
    write("a/b/pyproject.toml", '[tool.ampwise]\nselect = ["AMP3"]\n')
    configs = Configs()
    assert configs.for_file("x.py").select == ("AMP1",)
    assert configs.for_file("a/x.py").select == ("AMP1",)
    assert configs.for_file("a/b/c/x.py").select == ("AMP2",)
    assert Configs(isolated=True).for_file("x.py") == Settings()
    assert Configs("a/b/pyproject.toml").for_file("x.py").select == ("AMP3",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("selct = []", "ampwise.toml: unknown key 'selct'. Did you mean select"),
        ("per_file_ignores = {}", "unknown key 'per_file_ignores'. Did you mean per-file-ignores"),
        ("select = 'AMP1'", "ampwise.toml: select is a string; it must be a list of strings"),
        ("select = [1]", "ampwise.toml: select is a list with something else than strings; it must be a list of"),
        ("fix = true", "ampwise.toml: fix is for the command line, not for settings: ampwise check --fix"),
        (
            "unsafe-fixes = false",
            "unsafe-fixes is for the command line, not for settings: ampwise check --unsafe-fixes",
        ),
        ("x = " + "[" * 40, "ampwise.toml: brackets nested more than 32 deep; no settings are"),
        ("x = " + "{a=" * 40, "ampwise.toml: brackets nested more than 32 deep; no settings are"),
        ("a." * 100_000 + "a = 1", "ampwise.toml: a dotted key of more than 16 parts; no setting has one"),
        ("[" + "'a' . " * 40_000 + "a]", "ampwise.toml: a dotted key of more than 16 parts; no setting has one"),
        ("#" * 250_001, "ampwise.toml: larger than 250 kB, and settings are read up to that; --isolated reads none"),
        ("per-file-ignores = []", "per-file-ignores is a list"),
        ("per-file-ignores = {a = 'b'}", "per-file-ignores.'a' is a string; it must be a list of strings"),
        ("output-format = 'jsn'", "unknown output-format in ampwise.toml 'jsn'. Did you mean json"),
        ("output-format = 2020-01-01", "output-format is a date; it must be one of concise, full"),
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
    with pytest.raises(BadInput, match=r"tool\.ampwise is a number; it must be a table"):
        read_settings("pyproject.toml")


def test_a_broken_pyproject_that_does_not_mention_us_is_not_our_business(write):
    write("pyproject.toml", "nonsense")
    assert Configs().for_file("x.py").source is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": "nowhere.toml"}, "check --config nowhere.toml: there is no such file"),
        ({"config": "pyproject.toml"}, "check --config pyproject.toml: it has no [tool.ampwise]"),
        ({"config": "x", "isolated": True}, "check --config x --isolated: settings of a file, or none at all"),
    ],
)
def test_config_that_is_none(write, options, message):
    write("pyproject.toml", "")
    with pytest.raises(BadInput) as caught:
        Configs(**options)
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
    with pytest.raises(BadInput, match="brackets nested"):
        read_settings("ampwise.toml")
