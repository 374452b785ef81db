"""A search that is interrupted goes on where it was; the file of another is refused."""

import dataclasses
import json

import pytest
import torch

from ampwise.errors import BadInput
from ampwise.tune.search.search import search
from ampwise.tune.search.trials import SearchTrial

from .models import deep


class Interrupting:
    """Ctrl-C, after some trials."""

    def __init__(self, after):
        self.left, self.told = after, []

    def __call__(self, told):
        self.told.append(told)
        if "error" in told.doing:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt


def searched(path, batches, function, **options):
    return search(function, batches, tolerance=0.05, formats=("bf16", "fp32"), resume=path, **options)


@pytest.mark.half_by_day
@pytest.mark.parametrize("after", [1, 4])
def test_it_goes_on_from_the_trials_done(tmp_path, after):
    path = tmp_path / "search.part"
    model, function, batches = deep(6, cancelling=[2], batches=3)
    whole = search(function, batches, tolerance=1e-3, formats=("bf16", "fp32"))
    calls = []
    counted = lambda x: calls.append(1) or function(x)  # noqa: E731
    options = {"tolerance": 1e-3, "formats": ("bf16", "fp32"), "resume": path, "model": model}
    with pytest.raises(KeyboardInterrupt):
        search(counted, batches, progress=Interrupting(after), **options)
    kept = json.loads(path.read_text())
    assert len(kept["trials"]) == after
    calls.clear()
    found = search(counted, batches, **options)
    assert found.modules == whole.modules
    assert found.trials == whole.trials
    assert len(calls) < whole.passes
    assert f"{after} trials came from an earlier run" in found.notes
    assert not path.exists()


def test_an_error_leaves_the_file_and_an_end_removes_it(tmp_path):
    path = tmp_path / "search.part"
    model, function, batches = deep(3, batches=2)
    calls = []

    def fails(x):
        calls.append(1)
        if len(calls) > 8:
            raise ValueError("out of data")
        return function(x)

    with pytest.raises(ValueError, match="out of data"):
        searched(path, batches, fails, model=model)
    assert path.exists()
    searched(path, batches, function, model=model)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ("weights", "weights"),
        ("batches", "batches"),
        ("tolerance", "tolerance"),
        ("formats", "formats"),
        ("modules", "modules, weights, losses in FP32"),
        ("function", "losses in FP32"),
    ],
)
def test_the_file_of_another_search_is_refused(tmp_path, change, differs):
    path = tmp_path / "search.part"
    model, function, batches = deep(3, batches=1)
    options = {"tolerance": 1e-3, "formats": ("bf16", "fp32"), "resume": path}
    with pytest.raises(KeyboardInterrupt):
        search(function, batches, progress=Interrupting(1), **options)
    if change == "weights":
        with torch.no_grad():
            model.layers[1].weight[0, 0] += 1e-5
    elif change == "batches":
        batches = [(batches[0][0] + 1e-5,)]
    elif change == "tolerance":
        options["tolerance"] = 2e-3
    elif change == "formats":
        options["formats"] = ("fp16", "fp32")
    elif change == "function":
        options["model"], first = model, function
        function = lambda x: 1.1 * first(x)  # noqa: E731
    else:
        _, function, _ = deep(4, batches=1)
    with pytest.raises(BadInput, match=rf"it belongs to another search; these differ: {differs}\. Name"):
        search(function, batches, **options)
    assert path.exists()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"what": "something"}', '{"what": "progress of ampwise search", "version": 1}']
)
def test_what_is_no_such_file_is_refused(tmp_path, text):
    path = tmp_path / "search.part"
    path.write_text(text)
    _, function, batches = deep(2, batches=1)
    with pytest.raises(BadInput, match="cannot resume from it"):
        searched(path, batches, function)
    assert path.read_text() == text


def test_a_folder_that_is_not_there(tmp_path):
    _, function, batches = deep(2, batches=1)
    with pytest.raises(BadInput, match=r"nowhere' is not a writable folder"):
        searched(tmp_path / "nowhere" / "search.part", batches, function)
    with pytest.raises(BadInput, match="it is a folder"):
        searched(tmp_path, batches, function)


def test_without_trials_there_is_no_file(tmp_path):
    _, function, batches = deep(2, batches=1)
    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path / "search.part", batches, function, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def interrupt(told):
    raise KeyboardInterrupt


def test_a_trial_comes_back_as_it_was():
    trial = SearchTrial(assignment=(0, 2, 1), loss=float("inf"), gradient=0.25, worst="a.b", whole=False, problem="no")
    from ampwise.finding.strict_json import dumps, loads

    assert SearchTrial.from_dict(loads(dumps(dataclasses.asdict(trial)))) == trial
