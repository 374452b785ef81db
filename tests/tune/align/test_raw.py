"""A layer is left, or gives its own sizes, wherever the model's code may see what padding changes."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from ampwise.tune.align.pad import pad_

from ...for_each import for_each
from .models import Block, CodeTied, mlp

relu = F.relu  # which an argument may hide


class One(nn.Module):
    """A layer, and a list with it; the subclasses say how they take its weight."""

    def __init__(self):
        super().__init__()
        self.h = nn.Linear(256, 1001)
        self.layers = nn.ModuleList([self.h])


class Indexed(One):
    def forward(self, x):
        return F.linear(x, self.layers[0].weight)


class Looped(One):
    def forward(self, x):
        return self.h(x).mean() + sum(layer.weight.square().mean() for layer in self.layers)


class Aliased(One):
    def forward(self, x):
        head = self.h
        return x @ head.weight.T


class OtherName(One):
    def forward(this, x):  # noqa: N805
        return F.linear(x, this.h.weight)


class ByGetattr(One):
    def forward(self, x):
        return F.linear(x, getattr(self, "h").weight)  # noqa: B009


class ByNameOnly(One):
    def forward(self, x, name="weight"):
        return F.linear(x, getattr(self.h, name))


class Unpacked(One):
    def forward(self, x):
        return F.linear(x, *self.h.parameters())


class AllNamed(One):
    def forward(self, x):
        return F.linear(x, dict(self.named_parameters())["h.weight"])


class FromAMethod(One):
    def forward(self, x):
        return F.linear(x, *self.initial())

    def initial(self):
        return self.h.parameters()


class Keeps(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.__dict__["h"] = h

    def forward(self, x):
        return x @ self.h.weight.T


class Unregistered(One):
    def __init__(self):
        super().__init__()
        self.other = Keeps(self.h)

    def forward(self, x):
        return self.other(x) + self.h(x)


def unreadable():
    space = {"One": One, "F": F}
    exec("class Made(One):\n    def forward(self, x):\n        return F.linear(x, self.h.weight)", space)
    return space["Made"]()


@for_each(
    "make",
    [
        *(Indexed, Looped, Aliased, OtherName, ByGetattr, ByNameOnly, Unpacked, AllNamed, FromAMethod, Unregistered),
        unreadable,
    ],
)
def test_a_layer_whose_weight_is_taken_is_left(make):
    model = make()
    x = torch.randn(2, 256)
    plain = model(x)
    padding = pad_(model)
    assert padding.padded == ()
    assert "its weight" in padding.left[0].why
    assert torch.equal(model(x), plain)


def test_what_is_only_likely_gives_way_to_who_names_it():
    model = Looped()
    assert pad_(model).left[0].why == (
        "the code of Looped reads weights of layers it does not name, and may read its weight: if it does not, name "
        "the layer in only="
    )
    assert pad_(model, only="h").padded[0].after == (1008, 256)
    assert pad_(OtherName(), only="h").padded == ()


class Counted(One):
    def forward(self, x):
        return self.h(x)

    def count(self):
        return sum(each.numel() for each in self.parameters())


def test_what_no_forward_comes_to_is_no_matter():
    assert pad_(Counted()).padded


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1001), nn.Linear(1001, 256)


class Initial(Two):
    def initial(self, x):
        return self.up(x).mean(-1, keepdim=True)

    def forward(self, x):
        return self.down(F.relu(self.up(x))) + self.initial(x)


class Reset(Two):
    def reset_parameters(self, x):
        return self.up(x).mean(-1, keepdim=True)

    def forward(self, x):
        return self.down(F.relu(self.up(x))) + self.reset_parameters(x)


class Mixin:
    def extra(self, x):
        return self.up(x).mean(-1, keepdim=True)


class Mixed(Two, Mixin):
    def forward(self, x):
        return self.down(F.relu(self.up(x))) + self.extra(x)


class ShadowedName(Two):
    def forward(self, x, relu=torch.cos):
        return self.down(relu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(256, 1001)])
        self.nets = nn.ModuleList([mlp((256, 1001, 256))])


class OpensBlocks(Blocks):
    def forward(self, x):
        for block in self.blocks:
            x = block(x) + block.expand(x).mean(-1, keepdim=True)
        return x


class OpensNets(Blocks):
    def forward(self, x):
        for net in self.nets:
            x = net(x) + net[0](x).mean(-1, keepdim=True)
        return x


class AliasedBlock(Blocks):
    def forward(self, x):
        inner = self.blocks[0]
        return inner(x) + inner.expand(x).mean(-1, keepdim=True)


@for_each(
    ("kind", "opened"),
    [
        *((Initial, ""), (Reset, ""), (Mixed, ""), (ShadowedName, "")),
        *((OpensBlocks, "blocks"), (OpensNets, "nets"), (AliasedBlock, "blocks")),
    ],
)
def test_hidden_sizes_that_others_see_are_their_own(kind, opened):
    torch.manual_seed(0)
    model = kind()
    padded = copy.deepcopy(model)
    steps = [step for step in pad_(padded).padded if step.names[0].startswith(opened)]
    assert {step.how for step in steps} == {"outputs sliced", "takes padded inputs"}
    x = torch.randn(3, 256)
    for _ in range(2):
        for each in (model, padded):
            each.zero_grad()
            each(x).square().mean().backward()
            with torch.no_grad():
                [parameter.sub_(parameter.grad) for parameter in each.parameters() if parameter.grad is not None]
    assert torch.allclose(padded(x), model(x), rtol=1e-3, atol=1e-3)


class CallsBlocks(Blocks):
    def forward(self, x):
        for block, net in zip(self.blocks, self.nets, strict=True):
            x = net(block(x))
        return x[:, -1]


@for_each("model", [CallsBlocks(), nn.ModuleList([mlp((256, 1001, 256))]), nn.Sequential(Block(256, 1001))])
def test_members_that_are_only_called_stay_padded_inside(model):
    assert "stays padded up to the next layer" in {step.how for step in pad_(model).padded}


def test_weights_that_are_one_in_memory_alone_are_left():
    model = nn.ModuleDict({"e": nn.Linear(256, 1001, bias=False), "d": nn.Linear(1001, 256, bias=False)})
    model["d"].weight.data = model["e"].weight.data.t()
    padding = pad_(model)
    assert padding.padded == ()
    assert padding.left[0].why == ("its weight shares memory with another tensor of the model: make them one parameter")


def test_what_is_written_to_the_weight_of_a_tied_embedding_is_written_to_the_parameter():
    model = CodeTied()
    pad_(model, head="wte")
    whole, tokens, new, seen = model.wte._parameters["weight"], torch.arange(5).view(1, -1), torch.randn(101, 16), []
    model.wte.weight.data = new
    assert torch.equal(model.state_dict()["wte.weight"], new)
    assert whole.shape == (104, 16)
    model.wte.weight.register_hook(lambda gradient: seen.append(gradient.shape) or gradient * 0 + 2)
    model(tokens).sum().backward()
    assert seen == [(101, 16)]
    assert whole.grad[:101].eq(2).all()
    assert not whole.grad[101:].any()
    model.wte.weight.grad = torch.ones(101, 16)
    assert whole.grad.sum() == 101 * 16
    model.wte.weight.grad = None
    assert whole.grad is None
    model.wte.weight.requires_grad_(False)
    assert not whole.requires_grad
    model.wte.weight.requires_grad = True
    assert whole.requires_grad


def test_a_padding_index_from_the_end_is_that_of_its_own_rows():
    model = CodeTied()
    pad_(model, head="wte")
    for options in ((-1,), ()):
        named = {} if options else {"padding_idx": -1}
        F.embedding(torch.tensor([100]), model.wte.weight, *options, **named).sum().backward()
        assert not model.wte._parameters["weight"].grad.any()
