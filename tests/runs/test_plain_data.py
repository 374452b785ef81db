"""Plain data through JSON and back: the same to the bit, and nothing believed that a file says."""

import base64
import copy
import enum
import json
import math
import struct
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from ampwise.errors import BadInput
from ampwise.runs import plain_data as plain
from ampwise.runs.plain_data import Encoded, PlainDecoder, PlainEncoder, from_json, to_json
from ampwise.runs.tensor_files import DTYPES

from ..for_each import for_each


def through(value):
    """As a file has it: strict JSON, in UTF-8."""
    text = json.dumps(to_json(value, "it"), allow_nan=False, ensure_ascii=False).encode()
    return from_json(json.loads(text))


def identical(one, other):
    """The same class and the same bits, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad) and (
            bytes_of(one) == bytes_of(other)
        )
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return identical(one.real, other.real) and identical(one.imag, other.imag)
    if isinstance(one, list | tuple | deque):
        same_room = getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return same_room and len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, dict):
        same_default = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        return same_default and identical(list(one), list(other)) and identical([*one.values()], [*other.values()])
    return one == other


def bytes_of(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


doubles = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", bits.to_bytes(8, "little"))[0])
integers = st.integers(-(2**4096) + 1, 2**4096 - 1) | st.integers()
anything = st.text() | st.text(st.characters(exclude_categories=()))  # the second has halves of surrogate pairs
keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | anything | st.tuples(st.integers())
scalars = st.none() | st.booleans() | integers | doubles | st.complex_numbers() | anything | st.binary()
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=4).map(Counter)
        | st.dictionaries(keys, inner, max_size=4).map(lambda values: defaultdict(list, values))
        | st.lists(inner, max_size=4).map(lambda values: deque(values, maxlen=5))
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
    ),
    max_leaves=12,
)


@given(trees)
def test_what_comes_back_is_what_was_given(value):
    assert identical(through(value), value)


@given(trees)
def test_the_same_value_has_the_same_text(value):
    assert json.dumps(to_json(through(value), "it")) == json.dumps(to_json(value, "it"))


def test_text_that_is_no_unicode():
    name = b"caf\xe9".decode("utf-8", "surrogateescape")  # a file's name, as Python has it
    assert through({name: [name]}) == {name: [name]}


def test_the_comparison_can_fail():
    assert not identical(0.0, -0.0)
    assert not identical([1], (1,))
    assert not identical(deque([1]), deque([1], 3))
    assert not identical({1: 2}, {True: 2})
    assert identical(math.nan, math.nan)


@for_each("dtype", [*DTYPES.values(), torch.complex32, torch.complex128])
def test_tensors_of_every_dtype(dtype):
    values = torch.tensor([0, 1] * 24, dtype=torch.uint8) if dtype is torch.bool else torch.arange(48).byte() * 5
    for tensor in (
        values.view(dtype),
        values.view(dtype)[:0],
        values.view(dtype)[0],
        values.view(dtype).reshape(-1, 3),
    ):
        assert identical(through({"it": tensor}), {"it": tensor})


def test_tensors_that_lie_otherwise_have_the_same_values():
    grid = torch.randn(4, 6)
    for tensor in (grid.t(), grid[:, ::2], grid[0].expand(3, 6), torch.view_as_complex(grid.reshape(12, 2)).conj()):
        assert torch.equal(through(tensor), tensor)
    assert identical(through(grid.clone().requires_grad_()), grid.clone().requires_grad_())
    back = through(grid)
    back += 1  # its memory is its own


@for_each("name", sorted(plain.NUMPY_DTYPES))
def test_arrays_and_numbers_of_numpy(name):
    values = (np.arange(64, dtype=np.uint8) % 2).view(name)
    for value in (values, values.reshape(2, -1), values[:0], values[1]):
        back = through(value)
        assert identical(back, value)
    assert through(values).flags.writeable


def test_numbers_of_numpy_go_on_as_such():
    lr = np.float32(0.1)
    assert identical(through(lr) * 3.3, lr * 3.3)
    assert identical(through(np.float64(0.1)), np.float64(0.1))  # which is also a float of Python's


def test_the_state_of_random_numbers():
    generator = np.random.default_rng(3)
    back = np.random.default_rng()
    back.bit_generator.state = through(generator.bit_generator.state)
    assert (back.random(5) == generator.random(5)).all()
    words = np.random.RandomState(3).get_state(legacy=False)
    assert identical(through(words), words)


class Colour(enum.IntEnum):
    RED = 1


@for_each(
    ("value", "said"),
    [
        (object(), r"it\['a'\]\[0\] is a object\. Supported: numbers"),
        (len, "is a builtin_function_or_method"),
        (Colour.RED, "is a Colour"),
        (namedtuple("Pair", "x y")(1, 2), "is a Pair"),
        (nn.Parameter(torch.ones(1)), "is a Parameter"),
        (torch.ones(2).to_sparse(), "is not dense"),
        (torch.ones(2, device="meta"), "meta device"),
        (torch.zeros(2, dtype=torch.bits8), "bits8"),
        (np.array([object()]), r"numpy ndarray of \|O"),
        (np.zeros(2, dtype=">f4"), "of >f4"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (np.ma.array([1]), "is a MaskedArray"),
        (2**4096, "an integer of 4,097 bits; the limit is 4,096"),
        (defaultdict(lambda: 0), "a defaultdict with the factory <function .*, which cannot be saved"),
        ({object(): 1}, r"a key of it\['a'\]\[0\] is a object"),
        (torch.zeros(16_000_001, dtype=torch.uint8), r"it\['a'\]\[0\] has 16,000,001 bytes; the limit is 16,0"),
        (np.zeros(2_000_001), "has 16,000,008 bytes"),
        (bytes(16_000_001), "has 16,000,001 bytes"),
        ([bytes(9_000_000), bytes(9_000_000)], r"\[1\] has 9,000,000 bytes and other values have 9,000,000"),
    ],
)
def test_what_has_no_form_is_named(value, said):
    with pytest.raises(BadInput, match=said) as caught:
        to_json({"a": [value]}, "it")
    assert "\n" not in str(caught.value)


def test_what_holds_itself():
    loop = []
    loop.append(loop)
    with pytest.raises(BadInput, match="more than 50 deep, or contains itself"):
        to_json(loop, "it")


def tensor(**facts):
    return {"tensor": {"dtype": "float32", "shape": [1], "data": base64.b64encode(bytes(4)).decode(), **facts}}


KINDS = [*PlainDecoder()._kinds, "x"]


def nested(depth, kind="tuple"):
    return 1 if depth == 0 else {kind: [nested(depth - 1, kind)]}


HOSTILE = [
    {"os.system": "id"},
    {"tuple": [], "list": []},
    {},
    {"tuple": "abc"},
    {"dict": [1]},
    {"pairs": [[1]]},
    {"pairs": [[[1], 2]]},  # a list is no key
    {"pairs": [[1, 2], [1.0, 3]]},
    {"set": [[1]]},
    {"set": [1, True]},
    {"frozenset": 3},
    {"float": 1.0},
    {"float": "7ff"},
    {"float": "  " * 4 + "00000000"},
    {"float": "０" * 16},
    {"complex": ["0" * 16]},
    {"bytes": "a"},
    {"bytes": "AAAA\nAAAA"},
    {"bytes": "é==="},
    {"bytes": 3},
    {"text": "//8="},
    {"deque": [1, [1, 2]]},
    {"deque": [-1, []]},
    {"deque": [True, []]},
    {"deque": [2**70, []]},
    {"defaultdict": ["eval", []]},
    {"defaultdict": [["list"], []]},
    {"counter": {"a": 1}},
    {"tensor": 3},
    {"ref": {"name": "../x", "on": "cpu"}},
    {"ref": "w"},
    {"named": {"__class__": 1}},
    {"object": [{}, {}]},
    tensor(dtype="OBJECT"),
    tensor(dtype=["float32"]),
    tensor(dtype="qint8"),
    tensor(dtype="Tensor"),
    tensor(shape=[2]),
    tensor(shape=[2**62]),
    tensor(shape=[2**39, 2**39, 0], data=""),
    tensor(shape=[-1]),
    tensor(shape=[True]),
    tensor(shape=[1] * 65),
    tensor(shape=4),
    tensor(data="####"),
    tensor(data=None),
    tensor(more=1),
    tensor(requires_grad=1),
    tensor(dtype="int32", requires_grad=True),
    tensor(dtype="bool", data="Ag=="),
    {"array": tensor(dtype="object")["tensor"]},
    {"array": tensor(dtype="V4")["tensor"]},
    {"array": tensor(dtype="float32", shape=[2**39])["tensor"]},
    {"array": tensor(dtype="bool", data="Ag==")["tensor"]},
    {"numpy": tensor(dtype="float32")["tensor"]},
    {"array": tensor(dtype="float32", requires_grad=True)["tensor"]},
    math.nan,
    2**5000,
    [math.inf],
    b"bytes",
    nested(60),
    nested(60, "set"),
]


@for_each("node", HOSTILE)
def test_what_is_no_such_data_is_refused(node):
    with pytest.raises(ValueError, match=r"[a-z]"):
        from_json(node)


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KINDS), inner, max_size=2),
        max_leaves=8,
    )
)
def test_no_json_does_more_than_be_refused(node):
    try:
        value = from_json(node)
    except ValueError:
        return
    assert identical(through(value), value)


# --- tensors by name -----------------------------------------------------------------------------------------------


def by_name(value, device=torch.device):
    found = {}
    node = json.loads(json.dumps(PlainEncoder(found).encode(value, "ema")))
    return found, PlainDecoder(found, device).decode(node)


def test_tensors_by_name_come_back_as_they_were_and_as_their_own():
    shared = torch.ones(2)
    value = {
        "shared": [shared, shared],
        1: nn.Parameter(torch.zeros(1)),
        "1": torch.tensor([1 + 2j], dtype=torch.complex128),
        "a/b": {"c": torch.ones(3, requires_grad=True)},
        "a" * 2000: torch.zeros(2),
        "decay": 0.9,
    }
    found, back = by_name(value)
    assert identical(list(back), list(value))
    assert len(found) == 5
    assert found["ema['shared'][0]"].data_ptr() == shared.data_ptr()
    assert back["shared"][0] is back["shared"][1]
    assert back["shared"][0] is not shared
    assert isinstance(back[1], nn.Parameter)
    assert identical(back["1"], value["1"])
    assert back["a/b"]["c"].requires_grad
    assert all(len(name) < 1200 and name.isprintable() for name in found)


def test_tensors_that_are_made_when_they_are_asked_for_are_not_mistaken_for_each_other():
    class Made(UserDict):
        def __getitem__(self, key):
            return torch.full((2,), float(self.data[key]))  # freed when it is saved, and its id used again

    found = {}
    values = [Made({"x": number}) for number in range(20)]
    node = PlainEncoder(found, objects=True).encode(values, "it")
    back = PlainDecoder(found).decode(node)
    assert [each.x.tolist() for each in back] == [[float(number)] * 2 for number in range(20)]


def test_a_subclass_of_a_tensor_is_named():
    class Own(torch.Tensor):
        pass

    with pytest.raises(BadInput, match="ema is a Own, which would be restored as a plain tensor"):
        by_name(torch.ones(1).as_subclass(Own))


def test_a_forged_dtype_of_a_tensor_by_name_is_refused():
    for dtype in ("qint8", "complex128", "float16", "Tensor", 3):
        with pytest.raises(ValueError, match=r"[a-z]"):
            PlainDecoder({"w": torch.ones(3)}).decode({"ref": {"name": "w", "on": "cpu", "dtype": dtype}})


def test_what_is_json_already_is_kept_as_it_is():
    inner = to_json((1, math.inf), "it")
    assert through({"a": Encoded(inner)}) == {"a": Encoded(inner)}


# --- states of torch -----------------------------------------------------------------------------------------------


class Falling:
    """A function with a state, which LambdaLR saves."""

    def __init__(self):
        self.rate = 0.9

    def __call__(self, epoch):
        return self.rate**epoch


def in_turn(optimizer):
    first = lr_scheduler.LinearLR(optimizer, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.StepLR(optimizer, 2)], milestones=[3])


def chained(optimizer):
    parts = [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.MultiStepLR(optimizer, [2, 4, 4], 0.5)]
    return lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)


SCHEDULERS = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "LambdaLR of an object": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Falling()),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.9),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "SequentialLR": in_turn,
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 7),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, mode="triangular2"),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2, 2),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "SWALR": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05),
}


def test_every_scheduler_of_torch_is_tried():
    abstract = {"LRScheduler", "_LRScheduler"}
    known = {name for name, kind in vars(lr_scheduler).items() if isinstance(kind, type) and kind.__module__ ==
             lr_scheduler.__name__ and issubclass(kind, lr_scheduler.LRScheduler)}  # fmt: skip
    assert known - abstract <= {name.split()[0] for name in SCHEDULERS}


def scheduled(name, lr=0.1):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=lr, momentum=0.9)
    return optimizer, SCHEDULERS[name](optimizer)


def rates(optimizer, scheduler, count):
    """A number for each step, to the bit; the losses are such that a plateau is seen."""
    found = []
    for step in range(count):
        optimizer.step()
        scheduler.step(*[1.0 + step % 3] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else [])
        found.append([(float(group["lr"]), group.get("momentum")) for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_scheduler_goes_on_to_the_bit(name):
    optimizer, scheduler = scheduled(name)
    rates(optimizer, scheduler, 5)
    saved = json.dumps([to_json(scheduler.state_dict(), "it"), to_json(optimizer.state_dict()["param_groups"], "it")])
    expected = rates(optimizer, scheduler, 8)
    optimizer, scheduler = scheduled(name)
    of_scheduler, groups = map(from_json, json.loads(saved))
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    scheduler.load_state_dict(of_scheduler)
    assert rates(optimizer, scheduler, 8) == expected


OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}


def optimized(kind, lr):
    torch.manual_seed(0)
    sparse = kind is torch.optim.SparseAdam
    model = nn.Embedding(8, 4, sparse=True) if sparse else nn.Linear(4, 4, bias=False)
    return model, kind(model.parameters(), **({"lr": lr} if lr else {}))


def trained(model, optimizer, steps):
    for step in range(steps):

        def loss(step=step):
            optimizer.zero_grad()
            given = torch.tensor([step % 8]) if isinstance(model, nn.Embedding) else torch.full((1, 4), 1.0 + step)
            value = model(given).square().sum()
            value.backward()
            return value

        optimizer.step(loss)
    return model.weight.detach().clone()


@for_each("name", OPTIMIZERS)
def test_an_optimizer_goes_on_to_the_bit(name):
    model, optimizer = optimized(OPTIMIZERS[name], 1e-3)
    trained(model, optimizer, 3)
    weights = copy.deepcopy(model.state_dict())
    saved = json.dumps(to_json(optimizer.state_dict(), "it"))
    expected = trained(model, optimizer, 4)
    with warnings.catch_warnings():
        model, optimizer = optimized(OPTIMIZERS[name], None)
    model.load_state_dict(weights)
    optimizer.load_state_dict(from_json(json.loads(saved)))
    assert torch.equal(trained(model, optimizer, 4), expected)


def test_a_learning_rate_that_is_a_tensor():
    _, optimizer = optimized(torch.optim.Adam, torch.tensor(1e-2))
    back = through(optimizer.state_dict()["param_groups"])
    assert identical(back[0]["lr"], torch.tensor(1e-2))
