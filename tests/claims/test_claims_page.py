"""The page of claims: one of each, none without its test, and every test that is named is there."""

import importlib
from pathlib import Path

import pytest

from ampwise.errors import BadInput
from tools import claims_page as page

from .claim import VERDICTS

ROOT = Path(__file__).parents[2]

GOOD = '''"""Formats: what they hold."""
from .claim import claim

@claim("One is two.", verdict="false", truth="One is one.", also=["tests/other/test_there.py::test_other"])
def test_one():
    assert 1 != 2
'''


@pytest.fixture
def made(tmp_path):
    """The page of a repository with one module of claims, and a test elsewhere."""
    other = tmp_path / "tests/other/test_there.py"
    other.parent.mkdir(parents=True)
    other.write_text("def test_other():\n    assert True\n\ndef helper():\n    pass\n")
    folder = tmp_path / "tests/claims"
    folder.mkdir()

    def make(text, name="test_formats.py"):
        (folder / name).write_text(text, encoding="utf-8")
        return page.claims_page(tmp_path)["docs/claims.md"]

    return make


def test_a_claim_is_shown_with_its_verdict_its_truth_and_its_tests(made):
    text = made(GOOD)
    assert text.endswith(
        "## Formats: what they hold\n\n"
        "| claim | verdict |\n| --- | --- |\n| [One is two](#one) | false |\n\n"
        '<a id="one"></a>\n\n### One is two\n\n**False.** One is one.\n\n'
        "- [`tests/claims/test_formats.py::test_one`](../tests/claims/test_formats.py#L4)\n"
        "- [`tests/other/test_there.py::test_other`](../tests/other/test_there.py)\n"
    )
    assert "1 claims from guides, forum threads and colleagues. 1 are false, 0 true, and 0 depend" in text


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def test_one", "def one", "`one` carries a claim and is no test; make it a function test_..."),
        ("def test_one():\n    assert 1 != 2", "class Test:\n    pass", "`Test` carries a claim and is no test"),
        ("assert 1 != 2", "print(1)", "`test_one` asserts nothing; assert what makes the claim true or false"),
        (
            "test_there.py::test_other",
            "test_there.py::test_gone",
            "there is no test tests/other/test_there.py::test_gone",
        ),
        ("test_there.py::test_other", "test_there.py::helper", "there is no test tests/other/test_there.py::helper"),
        (
            "test_there.py",
            "test_gone.py",
            "there is no test tests/other/test_gone.py::test_other; name it as path::test",
        ),
        ('"false"', '"perhaps"', "the verdict is 'perhaps'; it can be true, false, depends"),
        (
            'truth="One is one.", ',
            "",
            "a claim has said, verdict and truth, and may have also; this has verdict, also, said",
        ),
        ('"One is one."', '""', "a claim has said, verdict and truth"),
        ('"One is one."', "str(1)", "a claim is read, not run; write its texts out"),
        ("also=", "so=", "a claim has said, verdict and truth, and may have also"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(made, old, new, said):
    assert old in GOOD
    with pytest.raises(BadInput) as refused:
        made(GOOD.replace(old, new))
    assert said in str(refused.value)
    assert "tests/claims/test_formats.py:" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "name"),
    [(GOOD, "formats.py"), (GOOD.replace("@claim", "if 0:\n  @claim").replace("\ndef", "\n  def"), "test_formats.py")],
    ids=["module", "nested"],
)
def test_a_test_that_pytest_would_not_find_is_none(made, text, name):
    with pytest.raises(BadInput, match=r"is no test; make it a function test_\.\.\. of a module test_\.\.\.\.py"):
        made(text, name)


def test_a_test_that_raises_as_it_should_asserts_something(made):
    assert "One is two" in made(GOOD.replace("assert 1 != 2", "pytest.raises(ValueError, int, 'x')"))


def test_a_claim_is_settled_once(made):
    made(GOOD)
    with pytest.raises(BadInput, match=r"'One is two\.' is settled twice"):
        made(GOOD, name="test_more.py")


def test_no_tests_no_page_and_no_claims_an_error(made, tmp_path):
    assert page.claims_page(tmp_path / "elsewhere") == {}
    with pytest.raises(BadInput, match="tests/claims has no claims"):
        made("")


def test_the_page_of_this_repository():
    """As many claims as the modules carry when they are imported: none is lost in the reading."""
    (text,) = page.claims_page(ROOT).values()
    modules = [
        importlib.import_module(f".{file.stem}", __package__) for file in Path(__file__).parent.glob("test_*.py")
    ]
    claims = {value.claim for module in modules for value in vars(module).values() if hasattr(value, "claim")}
    assert len(claims) == text.count("\n### ") > 30
    assert all(f"{claim.truth}\n" in text for claim in claims)
    assert {claim.verdict for claim in claims} == set(VERDICTS) == set(page.VERDICTS)
