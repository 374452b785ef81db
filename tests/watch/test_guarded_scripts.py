"""A script that guards itself against NaN learns where it comes from, although no step follows."""

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampwise.watch import overhead
from ampwise.watch.watch import Watch


def spread(output):
    return output.sum(-1).sub(5).sqrt().mean()  # the root of a negative number


def distance(output):
    return (output - output.detach()).square().sum(-1).sqrt().mean()  # infinite derivative


class Stop(Exception):
    """Raised by a script."""


def skip_by_isnan(loss):
    return bool(torch.isnan(loss))


def skip_by_method(loss):
    return not loss.isfinite().all()


def skip_by_number(loss):
    return not math.isfinite(loss.item())


def skip_by_float(loss):
    return math.isnan(float(loss.detach()))


def raise_by_isnan(loss):
    if torch.isnan(loss):
        raise Stop
    return False


def no_guard(loss):
    return False


def train(loss_of, skip=no_guard, *, steps=4, max_norm=None, error=False):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        x = torch.randn(3, 4) if step == 2 else torch.full((3, 4), 2.0)
        output = model(x) if step == 2 else model(x).abs() + 10
        loss = loss_of(output) if step == 2 else output.mean()
        if skip(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, error_if_nonfinite=error)
            if not torch.isfinite(norm):
                optimizer.zero_grad()
                continue
        optimizer.step()


def places(watch):
    found = [seen.finding for seen in watch.seen() if seen.finding.rule.names_the_cause]
    return [(each.rule.name, each.place.line, each.place.step) for each in found]


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


NEGATIVE = ("outside-domain", line_of("the root of a negative number"), 3)


@pytest.mark.parametrize("skip", [skip_by_isnan, skip_by_method, skip_by_number, skip_by_float])
def test_a_skipped_loss_is_explained(skip):
    with Watch(timing=False) as watch:
        train(spread, skip)
    assert places(watch) == [NEGATIVE]
    assert watch.failures == []


def test_a_script_that_dies_of_it_is_explained():
    watch = Watch(timing=False)
    with pytest.raises(Stop), watch:
        train(spread, raise_by_isnan)
    assert places(watch) == [NEGATIVE]


@pytest.mark.parametrize("error", [False, True])
def test_gradients_that_the_script_drops_are_explained(error):
    watch = Watch(timing=False)
    with watch:
        if error:
            with pytest.raises(RuntimeError, match="non-finite"):
                train(distance, max_norm=1.0, error=True)
        else:
            train(distance, max_norm=1.0)
    assert places(watch) == [("infinite-derivative", line_of("infinite derivative"), 3)]


def cleaned_in_place(model):
    for each in model.parameters():
        if not torch.isfinite(each.grad).all():
            each.grad[~torch.isfinite(each.grad)] = 0.0


def cleaned_by_name(model):
    for each in model.parameters():
        torch.nan_to_num_(each.grad, nan=0.0)


def cleaned_copies(model):
    for each in model.parameters():
        each.grad = each.grad.nan_to_num(0.0)


@pytest.mark.parametrize("clean", [cleaned_in_place, cleaned_by_name, cleaned_copies])
def test_gradients_that_the_script_replaces_by_numbers_are_explained(clean):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(timing=False) as watch:
        for step in range(4):
            output = model(torch.randn(3, 4))
            loss = distance(output) if step == 2 else output.square().mean()
            optimizer.zero_grad()
            loss.backward()
            clean(model)
            optimizer.step()
    assert places(watch) == [("infinite-derivative", line_of("infinite derivative"), 3)]


def test_a_distribution_that_refuses_its_parameters_is_explained():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = Watch(timing=False)

    def script():
        for step in range(4):
            x = torch.rand(3, 4) * (step != 2)
            x = x / x.amax(-1, keepdim=True)  # a row of zeros
            made = torch.distributions.Normal(model(x), 1.0, validate_args=True)  # compiling switches the default off
            loss = -made.log_prob(x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with watch, pytest.raises(ValueError, match="invalid values"):
        script()
    assert places(watch) == [("division-by-zero", line_of("a row of zeros"), 3)]


def test_rows_of_a_loss_that_the_script_replaces_by_numbers_are_explained():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(timing=False) as watch:
        for step in range(4):
            rows = model(torch.randn(3, 4)).square().mean(-1)
            if step == 2:
                rows = rows * torch.tensor([0.0, 1.0, 1.0]).log().exp().sub(1).sqrt()  # the root of a negative row
            loss = torch.nan_to_num(rows, nan=0.0).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert places(watch)[:1] == [("outside-domain", line_of("the root of a negative row"), 3)]


def test_gradients_that_fail_in_a_skipped_step_are_explained(monkeypatch):
    """Most steps of tiny models are only counted."""
    monkeypatch.setattr(overhead, "IN_FULL", 2)
    monkeypatch.setattr(overhead, "TOO_EXPENSIVE", 0.0)
    torch.manual_seed(0)
    watch = Watch(timing=False)

    def script():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(60):
            output = model(torch.randn(3, 4))
            loss = distance(output) if step == 50 else output.square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()

    with watch, pytest.raises(RuntimeError, match="non-finite"):
        script()
    found = [(name, line) for name, line, _ in places(watch)]
    assert found == [("infinite-derivative", line_of("infinite derivative"))]


def test_anomaly_detection_of_torch_does_not_get_in_the_way():
    watch = Watch(timing=False)
    failed = pytest.raises(RuntimeError, match="nan values")
    with warnings.catch_warnings(action="ignore"), watch, torch.autograd.detect_anomaly(), failed:
        train(spread)
    assert places(watch) == [NEGATIVE]


@pytest.mark.parametrize("skip", [no_guard, skip_by_isnan, skip_by_number])
def test_the_script_computes_the_same_as_without_a_watch(skip):
    def weights():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3))
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(6):
            output = model(torch.randn(3, 4))
            loss = spread(output) if step == 3 else output.square().mean()
            if not skip(loss) and (step != 3 or skip is no_guard):
                optimizer.zero_grad()
                loss.backward()
                if step != 3:
                    optimizer.step()
        return torch.get_rng_state(), model[0].weight.detach().clone(), model[0].weight.grad.clone()

    plain = weights()
    with Watch(timing=False) as watch:
        watched = weights()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert len(places(watch)) == 1


def test_a_nan_that_is_no_loss_is_not_explained():
    with Watch(timing=False) as watch:
        train(torch.mean, lambda loss: math.isnan(torch.tensor(math.nan).item()) and False)
    assert [seen.finding.rule.name for seen in watch.seen()] == []


def test_a_value_that_nobody_can_read_is_left_alone():
    """As in vmap, on the meta device, and where torch tries an operation of DTensors without their values."""

    def looked_at(x):
        questions = [torch.isnan(x), x.isfinite(), x != x, x > 0, torch.nan_to_num(x), torch._refs.clamp(x, max=1.0)]
        return torch.stack([each.float() for each in questions])

    values = torch.tensor([math.nan, 2.0])
    expected = torch.tensor([[1.0, 0, 1, 0, 0, math.nan], [0, 1, 0, 1, 2, 1]])
    with Watch(timing=False) as watch:
        train(torch.mean)
        watched = torch.func.vmap(looked_at)(values)
        shapes = [looked_at(torch.ones((), device="meta", requires_grad=True)).shape]
        with FakeTensorMode():
            shapes.append(looked_at(torch.ones((), requires_grad=True)).shape)
    assert torch.equal(watched.nan_to_num(7), expected.nan_to_num(7))
    assert shapes == [(6,), (6,)]
    assert watch.seen() == []
