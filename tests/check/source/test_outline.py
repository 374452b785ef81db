"""Functions, classes and bindings, as a file defines them."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .reading import code_of, function_of


def outline_of(text):
    return code_of(text).outline


def bound(function, name):
    return [binding.value and ast.unparse(binding.value) for binding in function.bindings.get(name, ())]


@pytest.mark.parametrize(
    ("statement", "values"),
    [
        ("x = 1", ["1"]),
        ("x: int = 1", ["1"]),
        ("x: int", [None]),
        ("y = x = 1", ["1"]),
        ("x, y = 1, 2", ["1"]),
        ("(x, y), z = (1, 2), 3", ["1"]),
        ("x, y = pair()", [None]),
        ("*x, y = 1, 2", [None]),
        ("x += 1", [None]),
        ("for x in range(3): pass", [None]),
        ("for i, x in enumerate([]): pass", [None]),
        ("with open('f') as x: pass", ["open('f')"]),
        ("try:\n    x = 1\nexcept E:\n    x = 2\nfinally:\n    x = 3", ["1", "3", "2"]),
        ("match y:\n    case 1:\n        x = 1\n    case _:\n        x = 2", ["1", "2"]),
        ("if a:\n    x = 1\nelse:\n    x = 2", ["1", "2"]),
        ("y[0] = 1", []),
    ],
)
def test_what_a_statement_binds(statement, values):
    assert bound(outline_of(statement).module, "x") == values


@pytest.mark.parametrize(
    ("statement", "guarded"),
    [
        ("x = 1", False),
        ("with a:\n    x = 1", False),
        ("if a:\n    x = 1", True),
        ("for i in a:\n    x = 1", True),
        ("try:\n    x = 1\nfinally:\n    pass", True),
        ("with a:\n    if b:\n        x = 1", True),
    ],
)
def test_what_may_not_be_bound_at_all_is_guarded(statement, guarded):
    assert outline_of(statement).module.bindings["x"][0].guarded is guarded


def test_global_names_belong_to_the_module():
    code = code_of("def f():\n    global x\n    x = 1\n    y = 2\n")
    assert bound(code.outline.module, "x") == ["1"]
    assert not function_of(code, "f").holds("x")
    assert function_of(code, "f").holds("y")


def test_parameters_and_their_defaults():
    function = function_of(code_of("def f(a, /, b, c=1, *rest, d, e=2, **more): pass"), "f")
    assert set(function.params) == {"a", "b", "c", "d", "e", "rest", "more"}
    assert {name: ast.unparse(node) for name, node in function.defaults.items()} == {"c": "1", "e": "2"}


def test_attributes_of_self_are_gathered_from_all_methods():
    outline = outline_of(
        """
        class Trainer:
            scaler = None

            def __init__(self):
                self.scaler = GradScaler()

            def reset(me):
                def inner():
                    me.scaler = other()
                self.scaler = "not mine"

            @staticmethod
            def make(self):
                self.scaler = "someone else's"
        """
    )
    values = [ast.unparse(binding.value) for binding in outline.classes["Trainer"].attributes["scaler"]]
    assert values == ["None", "GradScaler()", "other()"]


def test_the_text_of_a_function_has_its_decorators():
    code = code_of("x = 1\n@first\n@second(2)\ndef f():\n    return 1\ny = 2\n")
    assert function_of(code, "f").text == "@first\n@second(2)\ndef f():\n    return 1"
    assert [ast.unparse(node) for node in function_of(code, "f").decorators] == ["first", "second(2)"]


def test_functions_know_what_is_around_them():
    code = code_of("class A:\n    def f(self):\n        def g():\n            pass\n")
    assert [function.name for function in function_of(code, "g").scopes] == ["g", "f", ""]
    assert function_of(code, "f").owner is code.outline.classes["A"]
    assert function_of(code, "g").owner is None


def test_what_is_used_like_a_model_is_one():
    models = outline_of(
        "net.eval()\nself.generator.train(True)\nAdam(list(backbone.parameters()))\nother.step()"
    ).models
    assert models == {"net", "self.generator", "backbone"}


@st.composite
def programs(draw, depth=3):
    lines = []
    for number in range(draw(st.integers(1, 3))):
        head = draw(st.sampled_from(["def f{}():", "class C{}:", "if x{}:", "for x{} in y:", "with x{}:", "pass"]))
        lines.append(head.format(number))
        if head.endswith(":"):
            inner = draw(programs(depth - 1)) if depth else "pass"
            lines += [f"    {line}" for line in inner.split("\n")]
    return "\n".join(lines)


@given(programs())
def test_every_function_is_in_the_outline_once_and_in_order(text):
    outline = outline_of(text)
    inside = [node for node in ast.walk(outline.script.tree) if isinstance(node, ast.FunctionDef)]
    found = [function.node for function in outline.functions]
    assert found[0] is outline.script.tree
    assert len(found) == len(set(map(id, found)))
    assert [node.lineno for node in found[1:]] == sorted(node.lineno for node in found[1:])
    missing = {id(node) for node in inside} - set(map(id, found))
    # Only what a class defines under an `if` of its body is passed over.
    assert all(_is_under_a_class(node, outline.script.tree) for node in inside if id(node) in missing)


def _is_under_a_class(node, tree):
    classes = (outer for outer in ast.walk(tree) if isinstance(outer, ast.ClassDef))
    return any(node in ast.walk(outer) for outer in classes)
