"""What was found: put on a model it does what was tried, and it comes back from a file as it was."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from ampwise.errors import BadInput, UnknownName
from ampwise.train.engine import Engine
from ampwise.tune.search.fp32_error import ErrorTally, Fp32Reference, ParameterGroups
from ampwise.tune.search.passes import PassResult, PassRunner, SearchBatch
from ampwise.tune.search.result import SearchResult
from ampwise.tune.search.search import search

from .models import net


@pytest.fixture(scope="module")
def mixed():
    """A policy with all three formats, in which the model itself is wide, and an attention between narrow modules."""
    torch.manual_seed(0)
    model, batches = net(2)
    found = search(model, batches, tolerance=0.5, gpu="h200")
    formats = {
        "attention.qkv": "e4m3",
        "attention": "bf16",
        "attention.out": "fp32",
        "body.0": "e4m3",
        "body.2": "bf16",
    }
    return model, batches, _with(model, found, formats | {"": "fp32"})


def _with(model, found, formats):
    """The same with other formats, made as a search makes it."""
    from ampwise.tune.search.arrangement import arrange_formats, parse_formats
    from ampwise.tune.search.build_result import ModuleGlobs

    choices = {choice.name: choice for choice in parse_formats(found.formats)}
    units = found._units(model)
    chosen = [choices[formats[unit.name]] for unit in units]
    arrangement, names = arrange_formats(units, chosen, torch.device("cpu")), ModuleGlobs(model)
    return dataclasses.replace(
        found,
        modules={unit.name: choice.name for unit, choice in zip(units, chosen, strict=True)},
        policy=names.policy(arrangement),
        narrow=names.narrow(units, chosen),
        widened=tuple(names.of(arrangement.widened)),
    )


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def test_put_on_it_gives_what_the_search_has_measured():
    model, batches = net(1)
    found = search(model, batches, tolerance=0.004)
    passes = PassRunner(model, model, torch.device("cpu"))
    batch = SearchBatch(batches[0], {})
    tally = ErrorTally(Fp32Reference(ParameterGroups(model, passes.parameters), [passes.outcome(batch)], 1))
    with found.apply(model) as on:
        with on.forward():
            loss = model(*batches[0])
        tally.add(PassResult(loss.item(), gradients(model, loss)))
    assert tally.difference.loss == pytest.approx(found.loss_error)
    assert tally.difference.gradient == pytest.approx(found.gradient_error)


def test_what_it_says_by_patterns_is_what_it_does(mixed):
    model, batches, found = mixed
    assert found.policy.base == "fp32"
    assert found.policy.modules(model) == {
        "attention": "bf16",
        "attention.out": "fp32",
        "body.0": "bf16",
        "body.2": "bf16",
    }
    assert found.narrow == {"attention.qkv": "e4m3", "body.0": "e4m3"}
    assert found.widened == ("attention", "body.0", "body.2")
    seen = {}
    with found.apply(model), on_outputs(model, seen):
        model(*batches[0])
    assert seen == {
        "": torch.float32,
        "words": torch.float32,
        "norm": torch.float32,
        "attention": torch.float32,
        "attention.qkv": torch.bfloat16,
        "attention.out": torch.float32,
        "body": torch.float32,
        "body.0": torch.float32,
        "body.1": torch.float32,
        "body.2": torch.float32,
    }


class on_outputs:  # noqa: N801
    """Notes the types of what modules return."""

    def __init__(self, model, seen):
        self.hooks = [
            module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out.dtype}))
            for name, module in model.named_modules()
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()


def test_an_engine_trains_inside(mixed):
    model, batches, found = mixed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.body[0].weight.detach().clone()
    with found.apply(model):
        engine = Engine(model, optimizer, precision=found.policy)
        steps = [engine.step(model, *batches[0]) for _ in range(3)]
        engine.policy.apply(model).remove()
    assert not any(step.skipped for step in steps)
    assert steps[-1].loss < steps[0].loss
    assert not torch.equal(model.body[0].weight, before)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_file_holds_all_of_it(mixed, tmp_path):
    _, _, found = mixed
    found.save(tmp_path / "policy.json")
    again = SearchResult.load(tmp_path / "policy.json")
    assert again == found
    assert str(again) == str(found)
    assert list(tmp_path.iterdir()) == [tmp_path / "policy.json"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "is not marked as 'a policy of ampwise search'"),
        ("[1]", "is not marked as"),
        ("{", "not a file of ampwise search"),
        ('{"what": "a policy of ampwise search", "version": 99}', "version 1"),
        ('{"what": "a policy of ampwise search", "version": 1}', "name"),
    ],
)
def test_another_file_is_refused(tmp_path, text, said):
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=said):
        SearchResult.load(path)
    with pytest.raises(BadInput, match=r"SearchResult.load\(.*nothing.json"):
        SearchResult.load(tmp_path / "nothing.json")


def test_formats_that_it_does_not_name_are_refused(mixed, tmp_path):
    _, _, found = mixed
    data = found.as_dict()
    with pytest.raises(BadInput, match="its modules have formats that its list of formats lacks"):
        SearchResult.from_dict(data | {"modules": data["modules"] | {"body.0": "e5m2"}})


def test_a_file_that_was_tampered_with_is_refused(mixed, tmp_path):
    _, _, found = mixed
    for change in ({"narrow": 5}, {"modules": None}, {"gain": []}, {"ranking": [{}]}, {"verified": {}}):
        (tmp_path / "policy.json").write_text(json.dumps(found.as_dict() | change))
        with pytest.raises(BadInput, match="not a file of ampwise search"):
            SearchResult.load(tmp_path / "policy.json")


def test_it_cannot_be_put_on_another_model(mixed):
    _, _, found = mixed
    with pytest.raises(UnknownName, match=r"unknown module 'attention.qkv'"), found.apply(nn.Linear(2, 2)):
        pass
    with pytest.raises(BadInput, match=r"expected a torch.nn.Module, got int"), found.apply(5):
        pass


def test_a_place_that_cannot_be_written_to(mixed, tmp_path):
    _, _, found = mixed
    with pytest.raises(BadInput, match=r"SearchResult.save\(.*No such file"):
        found.save(tmp_path / "nowhere" / "policy.json")


def test_as_text_and_html_nothing_of_the_users_is_markup(mixed):
    _, _, found = mixed
    bad = dataclasses.replace(found.ranking[0], name="<b>[red]\x1b[2J", narrower="e4m3", reasons=("<script>",))
    found = dataclasses.replace(found, name="<img>\x07", ranking=(bad, *found.ranking[1:]))
    shown = str(found)
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "<b>[red]\\x1b[2J" in shown
    page = found._repr_html_()
    assert "<script>" not in page
    assert "<img>" not in page
    assert "&lt;script&gt;" in page
    assert repr(found).startswith("<SearchResult for <img>")


def test_the_gain_says_what_it_rests_on(mixed):
    _, _, found = mixed
    shown = str(found)
    for words in ("(derived: bits, weighted by FLOPs)", "by the peaks of h200 (datasheet)", "(measured here)"):
        assert words in shown
