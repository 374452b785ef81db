"""A hidden size stays padded only where the code proves that nothing else sees it."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwise.tune.align.data_flow import find_chains, modules_taken_apart
from ampwise.tune.align.module_source import find_weight_readers

from ...for_each import for_each
from .models import Block, CodeTied, Gated, Statements, mlp


def names(module):
    known = {id(child): name for name, child in module.named_modules()}
    return [([known[id(each)] for each in chain.sources], known[id(chain.into)]) for chain in find_chains(module)]


class Two(nn.Module):
    """Two layers; the subclasses say what is done with them."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.act, self.drop = nn.Linear(5, 9), nn.Linear(9, 5), nn.GELU(), nn.Dropout(0.1)
        self.depth = 2


class Nested(Two):
    def forward(self, x):
        return self.down(F.relu(self.up(x), inplace=True))


class Methods(Two):
    def forward(self, x):
        hidden = self.up(x).relu().square() * 0.5
        return self.down(hidden)


class InABranch(Two):
    def forward(self, x):
        if self.training:
            hidden = self.act(self.up(x))
            x = x + self.down(hidden)
        return x


class Inherited(Nested):
    pass


class Checkpointed(Two):
    def forward(self, x):
        return checkpoint(self._inner, x, use_reentrant=False)

    def _inner(self, x):
        return self.down(self.act(self.up(x)))


def test_where_it_is_certain():
    for kind in (Nested, Methods, InABranch, Inherited):
        assert names(kind()) == [(["up"], "down")], kind
    assert names(Block()) == [(["expand"], "contract")]
    assert names(Statements()) == [(["fc1"], "fc2")]
    assert names(Gated()) == [(["gate", "up"], "down")]
    assert names(mlp((3, 4, 5, 6))) == [(["0"], "2"), (["2"], "4")]
    assert names(nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 5))) == [(["0"], "1")]


class Sigmoid(Two):
    def forward(self, x):
        return self.down(torch.sigmoid(self.up(x)))  # zero becomes a half


class Bias(Two):
    def forward(self, x):
        return self.down(self.up(x) + 1)


class Drops(Two):
    def forward(self, x):
        return self.down(self.drop(self.up(x)))


class Returns(Two):
    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden), hidden


class UsedTwice(Two):
    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden * hidden.mean())


class ReadLater(Two):
    def forward(self, x):
        hidden = self.up(x)
        made = self.down(hidden)
        return made + hidden.sum()


class OnOneWay(Two):
    def forward(self, x):
        hidden = self.up(x)
        if self.training:
            return hidden
        return self.down(hidden)


class Elsewhere(Two):
    def forward(self, x):
        return self.down(self.act(self.up(x)))

    def features(self, x):
        return self.up(x)


class InALoop(Two):
    def forward(self, x):
        for _ in range(self.depth):
            hidden = self.up(x)
            x = self.down(hidden)
        return x


class ByName(Two):
    def forward(self, x):
        return self.down(self.act(self.up(x))) + getattr(self, "up")(x).sum()  # noqa: B009


class Shadowed(Two):
    def forward(self, xs):
        hidden = self.up(xs[0])  # noqa: F841
        return torch.stack([self.down(hidden) for hidden in xs])


class InALambda(Two):
    def forward(self, x):
        hidden = self.up(x)  # noqa: F841
        apply = lambda hidden: self.down(hidden)  # noqa: E731
        return apply(x)


class Normed(Two):
    def forward(self, x):
        return self.down(F.layer_norm(self.up(x), (9,)))


class Augmented(Two):
    def forward(self, x):
        hidden = self.up(x)
        hidden += 1
        return self.down(hidden)


class Caught(Two):
    def forward(self, x):
        try:
            hidden = self.up(x)
            return self.down(hidden)
        except RuntimeError:
            return hidden


def decorated(function):
    return lambda self, x: function(self, x)


class Decorated(Two):
    @decorated
    def forward(self, x):
        return self.down(self.act(self.up(x)))


UNCERTAIN = [
    Sigmoid, Bias, Drops, Returns, UsedTwice, ReadLater, OnOneWay, Elsewhere, InALoop, ByName, Shadowed, InALambda,
    Normed, Augmented, Caught, Decorated, Checkpointed,
]  # fmt: skip


@for_each("kind", UNCERTAIN)
def test_where_it_is_not(kind):
    assert names(kind()) == []


def test_a_forward_put_in_by_somebody_else_proves_nothing(monkeypatch):
    monkeypatch.setattr(Nested, "forward", lambda self, x: self.up(x))
    from ampwise.tune.align.module_source import read_forward

    read_forward.cache_clear()
    assert names(Nested()) == []
    read_forward.cache_clear()
    model = Methods()
    model.forward = lambda x: model.up(x)
    assert names(model) == []


def test_who_listens_sees_the_sizes_it_knows():
    model = Nested()
    model.up.register_forward_hook(lambda module, args, made: None)
    assert names(model) == []
    model = mlp((3, 4, 5))
    model[1].register_forward_pre_hook(lambda module, args: None)
    assert names(model) == []


@for_each(
    "between",
    [nn.Sigmoid(), nn.Softplus(), nn.Hardtanh(1, 2), nn.Dropout(0.5), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.PReLU(4)],
)
def test_a_sequence_with_something_that_does_not_keep_zero(between):
    assert names(nn.Sequential(nn.Linear(3, 4), between, nn.Linear(4, 5))) == []


@for_each("between", [nn.Hardtanh(), nn.Identity(), nn.Dropout(0), nn.ELU(), nn.Mish(), nn.Softshrink()])
def test_a_sequence_with_something_that_does(between):
    assert names(nn.Sequential(nn.Linear(3, 4), between, nn.Linear(4, 5))) == [(["0"], "2")]


class OwnSiLU(nn.Module):
    def forward(self, input):
        return nn.functional.silu(input)


class OwnGELU(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = partial(F.gelu, approximate="tanh")

    def forward(self, input):
        return self.act(input)


class Halves(nn.Module):
    def forward(self, input):
        return F.silu(input.chunk(2, -1)[0])


class Shifted(nn.Module):
    def forward(self, input):
        return F.silu(input) + 1


class OwnNorm(nn.Module):
    def forward(self, input):
        return F.normalize(input)


@for_each(("kind", "keeps"), [(OwnSiLU, True), (OwnGELU, True), (Halves, False), (Shifted, False), (OwnNorm, False)])
def test_modules_that_only_call_a_function(kind, keeps):
    assert bool(names(nn.Sequential(nn.Linear(3, 4), kind(), nn.Linear(4, 5)))) is keeps


def test_code_that_cannot_be_read_proves_nothing():
    space = {"nn": nn}
    exec("class Made(nn.Module):\n    def forward(self, x):\n        return self.down(self.up(x))", space)
    model = space["Made"]()
    model.up, model.down = nn.Linear(5, 9), nn.Linear(9, 5)
    assert names(model) == []
    found = find_weight_readers(model.modules())
    assert found[id(model.up)].doubt == "cannot be parsed, and may read"


class Apart(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.whole = mlp((3, 5, 7)), mlp((3, 5, 7))

    def forward(self, x):
        return self.net[0](x), self.whole(x)


def test_what_is_taken_apart_and_whose_weights_are_read():
    model = Apart()
    assert list(modules_taken_apart(model)) == [model.net]
    model = CodeTied()
    assert set(find_weight_readers(model.modules())) == {id(model.wte)}
    layer = nn.TransformerEncoderLayer(8, 2)
    assert {id(layer.linear1), id(layer.linear2)} <= set(find_weight_readers(layer.modules()))
