"""What a user's function has to make, and what is said when it makes something else."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ampwise.errors import BadInput
from ampwise.tune.train_case import load_factory, make_factory

from ..for_each import for_each


def make(batch=6):
    model = nn.Linear(4, 3)
    x, y = torch.randn(batch, 4), torch.randint(3, (batch,))
    return model, (x, y), lambda x, y: nn.functional.cross_entropy(model(x), y)


def test_a_subject_has_the_loss_of_its_batch():
    torch.manual_seed(0)
    subject = make_factory(make).make()
    model, (x, y) = subject.model, subject.args
    assert subject.loss().item() == nn.functional.cross_entropy(model(x), y).item()
    assert (subject.rows, subject.tokens, subject.optimizer) == (6, None, None)
    assert subject.parameters == [model.weight, model.bias]


def test_the_function_is_reported_the_size_it_is_asked_for():
    maker = make_factory(make)
    assert maker.size_name == "batch"
    assert maker.make(batch=11).rows == 11
    assert make_factory(lambda batch_size=2: make(batch_size)).make(batch=5).rows == 5


def test_a_batch_of_a_function_without_a_size_is_cut_or_repeated():
    maker = make_factory(lambda: make(4))
    assert maker.size_name is None
    whole = maker.make()
    for rows in (1, 3, 4, 5, 9):
        x, y = whole.resized(rows).args
        places = torch.arange(rows) % 4
        assert torch.equal(x, whole.args[0][places])
        assert torch.equal(y, whole.args[1][places])


def test_what_has_no_row_for_each_sample_stays():
    mask, x = torch.ones(3, 3), torch.randn(6, 3)
    model = nn.Linear(3, 1)
    subject = make_factory(
        lambda: (model, {"x": x, "mask": mask, "flag": True}, lambda **given: model(given["x"]).mean())
    )
    resized = subject.make().resized(2)
    assert resized.kwargs["mask"] is mask
    assert resized.kwargs["flag"] is True
    assert resized.rows == 2


def test_tokens_are_counted_where_the_batch_is_of_integers():
    model = nn.Embedding(10, 1)
    ids = torch.randint(10, (4, 7))
    assert make_factory(lambda: (model, ids, lambda ids: model(ids).mean())).make().tokens == 28


def test_nothing_is_allocated_on_meta():
    subject = make_factory(make).make(device="meta")
    assert {tensor.device.type for tensor in (*subject.parameters, *subject.tensors)} == {"meta"}
    assert subject.loss().shape == ()


def test_a_batch_made_elsewhere_by_name_is_moved():
    def elsewhere():
        model = nn.Linear(4, 1)
        return model, torch.ones(2, 4, device="cpu"), lambda x: model(x).mean()

    assert make_factory(elsewhere).make(device="meta").args[0].device.type == "meta"


def test_a_loss_with_extras_is_its_first_part():
    model = nn.Linear(4, 1)
    made = make_factory(lambda: (model, torch.ones(2, 4), lambda x: (model(x).mean(), "extra"))).make()
    assert made.loss().shape == ()


def test_an_optimizer_may_be_the_fourth():
    def with_optimizer():
        model = nn.Linear(4, 1)
        return model, torch.ones(2, 4), lambda x: model(x).mean(), torch.optim.SGD(model.parameters())

    assert isinstance(make_factory(with_optimizer).make().optimizer, torch.optim.SGD)


@for_each(
    ("made", "told"),
    [
        (None, "it returned None; expected a function that returns the model, a batch"),
        (nn.Linear(2, 2), "it returned a Linear; expected"),
        ((1, 2, 3), "it returned an int as the model"),
        ((nn.ReLU(), torch.ones(1)), "has no parameters"),
        ((nn.Linear(2, 2), "words"), "is a str without tensors"),
        ((nn.Linear(2, 2), torch.ones(2, 2), 3), "it returned an int as the loss function"),
        ((nn.Linear(2, 2), torch.ones(2, 2), None, "adam"), "it returned a str as the optimizer"),
    ],
)
def test_what_is_made_wrongly(made, told):
    with pytest.raises(BadInput, match=told) as caught:
        make_factory(lambda: made, "train:make").make()
    assert str(caught.value).startswith("train:make: ")


def test_the_example_is_one_that_works():
    from ampwise.tune.train_case import EXPECTED

    code = f"def make(net=Linear(4, 2), x=torch.ones(3, 4), y=torch.ones(3).long()):\n    {EXPECTED.split('`')[1]}"
    place = {"torch": torch, "F": nn.functional, "Linear": nn.Linear}
    exec(code, place)
    assert make_factory(place["make"]).make().loss().isfinite()


@pytest.mark.parametrize(
    ("loss", "told"),
    [(lambda x: x, r"a tensor of shape \(2, 2\), not a tensor with one"), (lambda x: 0.5, "is a float, not a")],
)
def test_a_loss_that_is_none(loss, told):
    with pytest.raises(BadInput, match=told):
        make_factory(lambda: (nn.Linear(2, 2), torch.ones(2, 2), loss)).make().loss()


def test_a_function_that_needs_arguments():
    with pytest.raises(BadInput, match=r"it must be callable without arguments, but requires width, depth"):
        make_factory(lambda width, depth, batch=1: None)


@pytest.mark.parametrize("rows", [0, -3])
def test_sizes_that_make_no_sense(rows):
    with pytest.raises(BadInput, match=f"expected a batch of at least 1 row, got {rows}"):
        make_factory(make).make(batch=rows)
    with pytest.raises(BadInput, match=f"expected a batch of at least 1 row, got {rows}"):
        make_factory(make).make().resized(rows)


@for_each(
    ("batch", "told"),
    [
        (torch.ones(2, 5), r"the batch \(\(2, 5\) float32\) does not fit the loss function: RuntimeError: mat1"),
        ((torch.ones(2, 4), torch.ones(2)), "does not fit the loss function: TypeError: .* positional argument"),
        ({"inputs": torch.ones(2, 4)}, "does not fit the loss function: TypeError: .* keyword argument 'inputs'"),
    ],
)
def test_a_batch_that_does_not_fit(batch, told):
    model = nn.Linear(4, 1)
    with pytest.raises(BadInput, match=told) as caught:
        make_factory(lambda: (model, batch, lambda x: model(x).mean()), "train:make").make().loss()
    assert "\n" not in str(caught.value)


def test_errors_of_a_batch_that_fits_stay_as_they_are():
    def fail(x):
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match=r"^no memory$"):
        make_factory(lambda: (nn.Linear(4, 1), torch.ones(2, 4), fail)).make().loss()


def test_a_script_that_trains_on_import_is_not_imported(tmp_path, monkeypatch):
    code = "import pathlib\npathlib.Path('imported').touch()\ndef train():\n    loss.backward()\ndef make(): pass\n"
    (tmp_path / "eager_subject.py").write_text(f"{code}for epoch in range(9):\n    train()\n")
    (tmp_path / "calm_subject.py").write_text(f"{code}if __name__ == '__main__':\n    train()\n")
    monkeypatch.chdir(tmp_path)
    for name in ("eager_subject.py:make", "eager_subject:make"):
        with pytest.raises(BadInput, match=r"eager_subject.py trains when it is imported \(line 7: train\(\)\)\. Put "):
            load_factory(name)
    assert not (tmp_path / "imported").exists()
    assert load_factory("calm_subject.py:make").name == "calm_subject.py:make"


def test_a_model_is_no_function():
    with pytest.raises(BadInput, match="got a Linear; expected a function"):
        make_factory(nn.Linear(2, 2), "train:model")


def test_what_fails_is_reported_in_a_line_with_its_place(tmp_path, monkeypatch):
    (tmp_path / "broken_subject.py").write_text("def make():\n    raise KeyError('data')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"make\(\) failed: KeyError: 'data' \(broken_subject.py:2\)"):
        load_factory("broken_subject.py:make").make()
    with pytest.raises(BadInput, match="has no function 'build'"):
        load_factory("broken_subject.py:build")
    with pytest.raises(BadInput, match=r"there is no file nowhere\.py"):
        load_factory("nowhere.py:make")
    with pytest.raises(BadInput, match="No module named 'nowhere_at_all'"):
        load_factory("nowhere_at_all:make")
    with pytest.raises(BadInput, match=r"'train': expected train.py:make or train:make"):
        load_factory("train")


def test_what_is_imported_late_is_found_beside_the_file(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "late_parts.py").write_text("from torch import nn\nmodel = nn.Linear(2, 1)\n")
    text = "import torch\ndef make():\n    from late_parts import model\n    return model, torch.ones(1, 2)\n"
    (folder / "late_subject.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert load_factory("project/late_subject.py:make").make().rows == 1


@for_each(
    "wrapped", [lambda loss: {"loss": loss}, lambda loss: SimpleNamespace(loss=loss), lambda loss: (loss, "more")]
)
def test_a_loss_may_be_in_what_is_returned(wrapped):
    model = nn.Linear(4, 1)
    made = make_factory(lambda: (model, torch.ones(2, 4), lambda x: wrapped(model(x).mean()))).make()
    assert made.loss().shape == ()


def test_what_cannot_be_made_on_the_device_is_made_on_the_cpu_and_moved():
    def shuffled():
        model = nn.Linear(8, 4)
        data = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8, shuffle=True)
        (x,) = next(iter(data))
        return model, x, lambda x: model(x).mean()

    subject = make_factory(shuffled).make(device="meta")
    assert subject.rows == 8
    assert {tensor.device.type for tensor in (*subject.parameters, *subject.tensors)} == {"meta"}

    def named():
        model = nn.Linear(8, 4).to("cpu")
        return model, torch.ones(2, 8, device="cpu"), lambda x: model(x).mean()

    assert make_factory(named).make(device="meta").device.type == "meta"


def test_an_empty_batch():
    with pytest.raises(BadInput, match=r"the batch it returned is empty: \(0, 4\)"):
        make_factory(lambda: make(0)).make()


@pytest.mark.gpu
def test_another_device_of_the_same_kind_is_another():
    place = torch.device("cuda", torch.cuda.current_device())
    subject = make_factory(make).make(device="cuda")
    assert subject.device == place
