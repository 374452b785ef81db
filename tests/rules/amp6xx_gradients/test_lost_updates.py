import pytest
import torch

from ampwise.rules.amp6xx_gradients.lost_updates import check_gradients
from ampwise.runs.rows import StepRow
from ampwise.watch.gradient_health import GradientHealth, UpdateCounts


def updated(*reports):
    health = GradientHealth(precision="bf16")
    for step, report in enumerate(reports, start=1):
        health.add_step(StepRow(step=step, lr=1e-3))
        health.add_updates(step, report)
    return health


def bf16_training(lr, dtype, steps=4):
    """Adam on real weights; which of them an update changes is looked at, not computed."""
    torch.manual_seed(0)
    weight = torch.randn(40, 40).to(dtype).requires_grad_()
    optimizer = torch.optim.Adam([weight], lr=lr)
    reports = []
    for _ in range(steps):
        before = weight.detach().clone()
        (weight.float() ** 2).sum().backward()
        tried = weight.grad != 0
        optimizer.step()
        moved = (weight.detach() != before) & tried
        reports.append({"weight": UpdateCounts(int(moved.sum()), int(tried.sum()))})
        optimizer.zero_grad()
    return updated(*reports)


def test_small_updates_of_bf16_weights_are_found():
    (finding,) = check_gradients(bf16_training(1e-4, torch.bfloat16))
    assert finding.place.parameter == "weight"
    assert finding.evidence["moved_share"] < 0.2
    assert finding.message.startswith("the weights hardly move: ")


@pytest.mark.parametrize(("lr", "dtype"), [(1e-4, torch.float32), (3e-2, torch.bfloat16)])
def test_fp32_weights_and_large_updates_are_fine(lr, dtype):
    assert not list(check_gradients(bf16_training(lr, dtype)))


STUCK, FINE = UpdateCounts(2, 1000), UpdateCounts(990, 1000)


def test_the_worst_is_named_and_the_others_counted():
    (finding,) = check_gradients(updated(*[{"a": FINE, "b": UpdateCounts(300, 1000), "c": STUCK}] * 3))
    assert finding.place.parameter == "c"
    assert finding.evidence["parameters"] == 2
    assert "(and too few in 1 more parameters)" in finding.message


def test_few_reports_or_few_weights_say_nothing():
    assert not list(check_gradients(updated({"a": STUCK})))
    assert not list(check_gradients(updated(*[{"a": UpdateCounts(0, 10)}] * 3)))
    assert not list(check_gradients(updated()))


def test_a_learning_rate_of_zero_moves_nothing_and_is_not_counted():
    health = GradientHealth()
    for step in range(1, 6):
        health.add_step(StepRow(step=step, lr=0.0))
        health.add_updates(step, {"a": UpdateCounts(0, 1000)})
    assert not list(check_gradients(health))


def test_it_is_the_latest_that_count():
    assert not list(check_gradients(updated(*[{"a": STUCK}] * 20, *[{"a": FINE}] * 8)))
