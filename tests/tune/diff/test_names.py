"""The models of a function are found where it has them, and named as one names them."""

import functools

import pytest
from torch import nn

from ampwise.errors import UnknownName
from ampwise.tune.diff.names import ModuleNames, find_models

MODEL = nn.Linear(2, 2)


def at_module_level(x):
    return MODEL(x).sum()


def helper(x):
    return at_module_level(x)


class Trainer:
    def __init__(self):
        self.net, self.teacher = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)

    def loss(self, x):
        return (self.net(x) - self.teacher(x)).square().mean()


def names_in(function, *args, **kwargs):
    return list(find_models(function, args, kwargs))


def test_where_a_function_has_its_models():
    inner, criterion = nn.Linear(2, 2), nn.MSELoss()
    assert names_in(lambda x: criterion(inner(x), x)) == ["criterion", "inner"]
    assert names_in(at_module_level) == ["MODEL"]
    assert names_in(helper) == ["MODEL"]
    assert names_in(Trainer().loss) == ["net", "teacher"]
    assert find_models(functools.partial(lambda model, x: model(x), inner), (), {}) == {"": inner}
    assert names_in(lambda model: model, inner) == ["argument 1"]
    assert names_in(lambda *, model: model, model=inner) == ["model"]
    assert names_in(lambda x: x.sum()) == []


def test_a_part_of_a_model_is_no_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    head = model[1]
    assert names_in(lambda x: model(x).sum() + head(x).sum()) == ["model"]


def test_the_one_that_is_trained_needs_no_prefix():
    trainer = Trainer()
    names = ModuleNames(find_models(trainer.loss, (), {}))
    assert names.main is trainer.net
    assert (names.of(trainer.net), names.of(trainer.teacher)) == ("", "teacher")
    assert names.of_parameter(trainer.net.weight) == "weight"
    assert names.of_parameter(trainer.teacher.bias) == "teacher.bias"
    assert names.parameters() == [trainer.net.weight, trainer.net.bias]


def test_of_several_each_has_its_name():
    one, two = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))
    names = ModuleNames({"one": one, "two": two})
    assert names.main is None
    assert (names.of(one), names.of(two[0])) == ("one", "two.0")
    late = nn.Linear(1, 1)
    names.learn(late)
    names.learn(nn.Linear(1, 1))
    assert names.of(late) == "Linear"


def test_patterns_say_which_modules():
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Tanh()), nn.Linear(1, 1))
    assert list(ModuleNames({"": model}, ["0.*"]).watched(model)) == [model[0][0], model[0][1]]
    with pytest.raises(UnknownName, match=r"unknown module '2'. .*Use names of model.named_modules\(\)"):
        ModuleNames({"": model}, ["0.*", "2"])
