import ast
import pathlib

from ampwise.check.source import tree_walk
from ampwise.check.source.tree_walk import NOT_WALKED, children, walk


def test_it_finds_what_ast_finds_in_the_same_order():
    text = pathlib.Path(tree_walk.__file__).read_text() + "match x:\n    case {'a': [1, *_], **rest} if y := 2: pass\n"
    tree = ast.parse(text.replace("if y := 2", "if (y := 2)"))
    assert list(walk(tree)) == [node for node in ast.walk(tree) if type(node) not in NOT_WALKED]
    for node in walk(tree):
        if not isinstance(node, ast.Constant):
            assert children(node) == [one for one in ast.iter_child_nodes(node) if type(one) not in NOT_WALKED]
