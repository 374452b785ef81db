"""Objects keep their keys under other names; names give up what they may hold."""

import ast

import pytest

from .reading import asked, code_of, function_of, keys_asked, values_asked

SAME = {
    "a parameter": """
        def main(opt, scaler):
            ask(opt)
            inner(scaler, optimizer=opt)

        def inner(grad_scaler, optimizer):
            ask(optimizer)
            grad_scaler.step(optimizer)
        """,
    "two calls deep": """
        def main(opt, scaler):
            ask(opt)
            middle(scaler, opt)

        def middle(scaler, o):
            inner(scaler, o)

        def inner(scaler, optimizer):
            ask(optimizer)
            scaler.step(optimizer)
        """,
    "an alias": """
        def main(opt, scaler):
            other = opt
            ask(opt, other)
            scaler.step(other)
        """,
    "an attribute in two methods": """
        class Trainer:
            def __init__(self):
                self.opt = make()

            def train(self, scaler):
                ask(self.opt)
                self.finish(scaler)

            def finish(self, scaler):
                ask(self.opt)
                scaler.step(self.opt)
        """,
    "an attribute of a base class": """
        class Base:
            def finish(self, scaler):
                ask(self.opt)
                scaler.step(self.opt)

        class Trainer(Base):
            def train(self, scaler):
                self.opt = make()
                ask(self.opt)
                self.finish(scaler)
        """,
    "a call of super": """
        class Base:
            def finish(self, scaler):
                ask(self.opt)
                scaler.step(self.opt)

        class Trainer(Base):
            def finish(self, scaler):
                ask(self.opt)
                super().finish(scaler)
        """,
    "a global": """
        opt = make()

        def main(scaler):
            ask(opt)
            scaler.step(opt)

        def other(scaler):
            ask(opt)
            scaler.step(opt)
        """,
    "a name of the function around": """
        def main(opt, scaler):
            def step():
                ask(opt)
                scaler.step(opt)
            ask(opt)
            step()
        """,
    "a wrapped model": """
        def main(model, scaler, opt):
            ask(model, model.module)
            scaler.step(opt)
        """,
    "an object of a class of the file": """
        class Trainer:
            def __init__(self, opt):
                self.opt = opt

            def step(self, scaler):
                ask(self.opt)
                scaler.step(self.opt)

        def main(opt, scaler):
            trainer = Trainer(opt)
            ask(trainer.opt)
            trainer.step(scaler)
        """,
    "an element": """
        def main(opts, scaler):
            ask(opts["g"])
            scaler.step(opts["g"])
            ask(opts["g"])
        """,
}


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_one_object_has_one_key(text):
    first, second = keys_asked(text)
    assert first == second
    assert first is not None


DIFFERENT = {
    "two parameters": """
        def main(opt_g, opt_d, scaler):
            ask(opt_g, opt_d)
            scaler.step(opt_g)
        """,
    "one name in two functions": """
        def first(opt, scaler):
            ask(opt)
            scaler.step(opt)

        def second(opt, scaler):
            ask(opt)
            scaler.step(opt)
        """,
    "two elements": """
        def main(opts, scaler):
            ask(opts[0], opts[1])
            scaler.step(opts[0])
        """,
    "two attributes": """
        class Trainer:
            def train(self, scaler):
                ask(self.opt_g, self.opt_d)
                scaler.step(self.opt_g)
        """,
    "two classes": """
        class A:
            def train(self, scaler):
                ask(self.opt)
                scaler.step(self.opt)

        class B:
            def train(self, scaler):
                ask(self.opt)
                scaler.step(self.opt)
        """,
    "a name bound twice": """
        def main(first, second, scaler, flag):
            opt = first
            if flag:
                opt = second
            ask(opt, first)
            scaler.step(opt)
        """,
}


@pytest.mark.parametrize("text", DIFFERENT.values(), ids=DIFFERENT)
def test_two_objects_have_two_keys(text):
    first, second = keys_asked(text)
    assert first != second


CALLED_TWICE = {
    "a parameter": "ask(given); scaler.step(given)",
    "an alias": "other = given; ask(other); scaler.step(other)",
    "an alias of an alias": "one = given; other = one; ask(other); scaler.step(one)",
    "an element": "ask(given[0]); scaler.step(given[0])",
    "a name of the function around": "exec('')\n    def inner():\n        ask(given); scaler.step(given)\n    inner()",
}


@pytest.mark.parametrize("body", CALLED_TWICE.values(), ids=CALLED_TWICE)
def test_what_is_known_from_one_caller_is_not_taken_for_another(body):
    text = f"""
scaler, opt, net = GradScaler(), torch.optim.Adam(p), Net()

def helper(given):
    {body}

helper(opt)
helper(net)
helper(opt)
"""
    (first, one), (second, other), (third, again) = asked(code_of(text))
    assert first.frame.key(one) == third.frame.key(again) != second.frame.key(other)
    assert first.frame.role(one) == third.frame.role(again) != second.frame.role(other)


def test_what_no_caller_has_a_part_in_is_found_out_once(monkeypatch):
    text = """
def helper(given):
    opt = torch.optim.Adam(given)
    ask(opt)
    scaler.step(opt)

def main():
    helper(first)
    helper(second)
"""
    made = []
    monkeypatch.setattr("ampwise.check.source.frame.role_of_constructor", lambda name: made.append(name) or "optimizer")
    (first, one), (second, other) = asked(code_of(text))
    assert first.frame is not second.frame
    assert first.frame.role(one) == second.frame.role(other) == "optimizer"
    assert made.count("torch.optim.Adam") + made.count("Adam") == 1


def test_a_key_goes_through_a_file_that_is_given_too():
    main = """
        from helpers import finish

        def main(opt):
            scaler = GradScaler()
            ask(opt)
            finish(opt, scaler)
        """
    helper = "def finish(optimizer, s):\n    ask(optimizer)\n    s.scale(1).backward()\n    s.step(optimizer)\n"
    first, second = keys_asked(main, helpers=helper)
    assert first == second


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ("x = 1\n    ask(x)", ["1"]),
        ("x = 1 if scaler else 2\n    ask(x)", ["1", "2"]),
        ("x = scaler or make()\n    ask(x)", [None, "make()"]),
        ("x = 1\n    if scaler:\n        x = 2\n    ask(x)", ["1", "2"]),
        ("x = y = 1\n    ask(y)", ["1"]),
        ("x = y\n    y = 1\n    ask(x)", ["1"]),
        ("ask(unknown)", ["unknown"]),
        ("ask(scaler)", [None]),
        ("x += 1\n    ask(x)", [None]),
        ("x = x\n    ask(x)", [None]),
        ("ask(f(1))", ["f(1)"]),
    ],
)
def test_a_name_may_hold_whatever_is_assigned_to_it(body, values):
    (found,) = values_asked(f"def main(scaler, opt):\n    {body}\n    scaler.step(opt)\n")
    assert found == values


@pytest.mark.parametrize(
    ("call", "values"),
    [
        ("inner(scaler, opt)", ["1"]),
        ("inner(scaler, opt, 2)", ["2"]),
        ("inner(scaler, opt, x=3)", ["3"]),
        ("inner(scaler, opt, **options)", [None, "1"]),
        ("inner(scaler, *rest)", [None, "1"]),
        ("pass", [None, "1"]),
    ],
)
def test_a_parameter_holds_what_it_is_given_or_its_default(call, values):
    (found,) = values_asked(
        f"def main(scaler, opt):\n    {call}\n    scaler.update()\n\n"
        "def inner(scaler, opt, x=1):\n    ask(x)\n    scaler.step(opt)\n"
    )
    assert found == values


def test_an_attribute_holds_what_any_method_gives_it():
    (found,) = values_asked(
        """
        class Base:
            def prepare(self):
                self.x = 2

        class Trainer(Base):
            x = 0

            def __init__(self):
                self.x = 1

            def train(self, scaler, opt):
                ask(self.x)
                scaler.step(opt)
        """
    )
    assert sorted(found) == ["0", "1", "2"]


def test_attributes_of_the_base_class_count_also_when_the_base_comes_from_another_file():
    (found,) = values_asked(
        """
        from base import Base

        class Trainer(Base):
            def train(self, scaler, opt):
                ask(self.x)
                scaler.step(opt)
        """,
        base="class Base:\n    def __init__(self):\n        self.x = 1\n        self.scaler = GradScaler()\n",
    )
    assert found == ["1"]


@pytest.mark.parametrize(
    ("line", "role"),
    [
        ("x = torch.amp.GradScaler()", "scaler"),
        ("x = torch.cuda.amp.GradScaler() if flag else None", "scaler"),
        ("x = torch.optim.Adam([])", "optimizer"),
        ("x = torch.optim.lr_scheduler.StepLR(o, 1)", "scheduler"),
        ("x = get_cosine_schedule_with_warmup(o, 1, 2)", "scheduler"),
        ("x = StandardScaler()", None),
        ("x = torch.amp.GradScaler(enabled=False)", None),
        ("x = make()", None),
    ],
)
def test_a_role_by_what_made_the_object(line, role):
    code = code_of(f"import torch\ndef main(flag, o, scaler):\n    {line}\n    ask(x)\n    scaler.step(o)\n")
    ((context, node),) = asked(code)
    assert context.frame.role(node) == role


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("grad_scaler", "scaler"),
        ("self.amp_scaler", "scaler"),
        ("opt_g", "optimizer"),
        ("self.optimizers[0]", "optimizer"),
        ("lr_schdr", "scheduler"),
        ("optimizer.scheduler", "scheduler"),
        ("model", None),
        ("options", None),
        ("adaptation", None),
    ],
)
def test_a_role_by_name_where_nothing_else_says(name, role):
    code = code_of(f"def main(o, scaler):\n    ask({name})\n    scaler.step(o)\n")
    ((context, node),) = asked(code)
    assert context.frame.role(node) == role


@pytest.mark.parametrize(
    ("line", "qualified"),
    [
        ("ask(torch.autocast)", "torch.autocast"),
        ("cast = torch.autocast\n    ask(cast)", "torch.autocast"),
        ("cast = torch.autocast if scaler else None\n    ask(cast)", "torch.autocast"),
        ("ask(opt)", None),
    ],
)
def test_a_full_name_goes_through_an_assignment(line, qualified):
    code = code_of(f"import torch\ndef main(scaler, opt):\n    {line}\n    scaler.step(opt)\n")
    ((context, node),) = asked(code)
    assert context.frame.qualified(node) == qualified


def test_a_parameter_hides_an_import():
    code = code_of("import torch\ndef main(torch, scaler, opt):\n    ask(torch.autocast)\n    scaler.step(opt)\n")
    ((context, node),) = asked(code)
    assert context.frame.qualified(node) is None


def test_recursion_comes_to_an_end():
    code = code_of(
        """
        def main(scaler, opt):
            x = other(scaler, opt)
            ask(x)
            x = y
            y = x
            ask(y)
            scaler.step(opt)
            main(scaler, x)

        def other(scaler, opt):
            main(scaler, opt)
            scaler.step(opt)
        """
    )
    for context, node in asked(code):
        assert context.frame.values(node)
        assert context.frame.key(node)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("helper(1)", "helper"),
        ("Trainer(1)", "__init__"),
        ("Trainer(1).train", None),
        ("trainer.train(1)", "train"),
        ("trainer(1)", "__call__"),
        ("unknown(1)", None),
        ("torch.save(1)", None),
    ],
)
def test_a_call_finds_its_function(call, name):
    code = code_of(
        f"""
        import torch

        def helper(x): pass

        class Trainer:
            def __init__(self, x): pass
            def train(self, x): pass
            def __call__(self, x): pass

        def main():
            trainer = Trainer(1)
            return {call}
        """
    )
    main = function_of(code, "main")
    returned = main.body[-1].value
    target = code.frame(main).callee(returned) if isinstance(returned, ast.Call) else None
    assert (target[0].name if target else None) == name
