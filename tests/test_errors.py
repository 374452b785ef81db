"""The exceptions: one tree, each also what Python's own code would catch, with texts that help."""

from ampwise import errors
from ampwise.errors import UnknownName, nearest

from .for_each import for_each


@for_each(
    ("name", "builtin"),
    [
        ("UnknownName", LookupError),
        ("BadInput", ValueError),
        ("UnsupportedTensor", TypeError),
        ("MissingDependency", ImportError),
    ],
)
def test_each_error_is_ours_and_pythons(name, builtin):
    assert issubclass(getattr(errors, name), errors.AmpwiseError)
    assert issubclass(getattr(errors, name), builtin)


def test_the_drawn_tree_names_every_exception():
    for name in errors.__all__:
        assert name in errors.__doc__


def test_an_unknown_name_says_what_is_near_and_where_the_list_is():
    error = UnknownName("command", "explan", ["explain", "rules"], listing="`ampwise --help` lists the commands.")
    assert str(error) == "unknown command 'explan'. Did you mean explain? `ampwise --help` lists the commands."
    assert (error.kind, error.name, error.nearest) == ("command", "explan", ["explain"])


def test_nothing_near_means_no_guess():
    error = UnknownName("command", "zzzzz", ["explain"], listing="`ampwise --help` lists the commands.")
    assert str(error) == "unknown command 'zzzzz'. `ampwise --help` lists the commands."


def test_a_hostile_name_is_quoted():
    assert "\x1b" not in str(UnknownName("rule", "\x1b[2J\nAMP", [], listing=""))


def test_nearest_ignores_case_and_keeps_the_known_spelling():
    assert nearest("BF61", ["bf16", "E4M3FN"]) == ["bf16"]
    assert nearest("e4m3", ["E4M3FN"]) == ["E4M3FN"]


def test_nearest_finds_a_part_of_a_long_name():
    assert nearest("clip", ["unscale-twice", "clip-scaled-grads"]) == ["clip-scaled-grads"]


def test_nearest_gives_no_more_than_asked():
    assert len(nearest("fp", [f"fp{n}" for n in range(9)], limit=2)) == 2
    assert nearest("", ["fp16"]) == []
