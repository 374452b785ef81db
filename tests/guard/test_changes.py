"""A script that is not the one that the checkpoint was saved by: it is said, refused, or the script's if it says so."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ampwise import BadInput, Engine, Guard, Ladder
from ampwise.guard.disk.catalog import checkpoints
from ampwise.runs.plain_data import from_json

BATCHES = [torch.full((4, 3), float(number)) for number in range(1, 5)]


class Average:
    def __init__(self, value=0.0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def warm_up(optimizer, steps=4):
    return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)


def run(directory, *, epochs=1, precision="fp32", kind=torch.optim.AdamW, schedule=None, scaling=None, batches=BATCHES,
        parameters=None, state=None, override=(), **options):  # fmt: skip
    """Train so many epochs in all; the optimizer's group, the engine and the guard."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    trained = [each for name, each in model.named_parameters() if name in (parameters or ("weight", "bias"))]
    optimizer = kind(trained, **{"lr": 0.01, **options})
    extra = {} if schedule is None else {"scheduler": schedule(optimizer)}
    engine = Engine(model, optimizer, precision, scaling=scaling, **extra)
    guard = Guard(engine, directory, state=state or {}, override=override, ladder=Ladder(healthy=2))
    with guard:
        for batch in guard.batches(batches, epochs=epochs):
            guard.step(lambda x: F.mse_loss(model(x).float(), x.sum(1, keepdim=True)), batch)
    return optimizer.param_groups[0], engine, guard


def lines(capsys):
    """What was said, but for where it goes on from."""
    said = [line.removeprefix("ampwise: ") for line in capsys.readouterr().err.splitlines()]
    return [line for line in said if not line.startswith("resuming from")]


def refused(directory, **options):
    with pytest.raises(BadInput) as error:
        run(directory, epochs=2, **options)
    words = str(error.value)
    assert "\n" not in words
    return words.removeprefix(f"{checkpoints(directory)[0].path} cannot be resumed: ")


@pytest.mark.parametrize("schedule", [None, warm_up])
def test_a_script_that_is_the_same_hears_nothing(tmp_path, capsys, schedule):
    """Though its rate has moved since, and what a scheduler writes down."""
    for epochs in (1, 2, 3):
        run(tmp_path, epochs=epochs, schedule=schedule, state={"average": Average()})
    assert lines(capsys) == []


def test_changed_options_of_the_optimizer_are_the_checkpoints_and_said_each_time(tmp_path, capsys):
    run(tmp_path)
    changed = {"lr": 0.5, "weight_decay": 0.25, "amsgrad": True}
    for epochs in (2, 3):
        group, _, _ = run(tmp_path, epochs=epochs, **changed)
        assert (group["lr"], group["weight_decay"], group["amsgrad"]) == (0.01, 0.01, False)
        assert lines(capsys) == [
            "the script has changed lr (0.01 -> 0.5), weight_decay (0.01 -> 0.25), amsgrad (False -> True) since the "
            "checkpoint. The checkpoint's values are used; to use the script's: "
            "Guard(override=['lr', 'weight_decay', 'amsgrad'])"
        ]


def test_what_is_overridden_is_the_scripts_from_then_on(tmp_path, capsys):
    run(tmp_path)
    group, _, _ = run(tmp_path, epochs=2, lr=0.5, eps=1e-3, override=["lr"])
    assert (group["lr"], group["eps"]) == (0.5, 1e-8)
    assert lines(capsys) == [
        "the script has changed eps (1e-08 -> 0.001) since the checkpoint. The checkpoint's values are used; to use "
        "the script's: Guard(override=['eps'])"
    ]
    group, _, _ = run(tmp_path, epochs=3, lr=0.5)
    assert (group["lr"], lines(capsys)) == (0.5, [])


def test_a_changed_schedule(tmp_path, capsys):
    run(tmp_path, schedule=warm_up)

    def longer(optimizer):
        return warm_up(optimizer, 8)

    _, engine, _ = run(tmp_path, epochs=2, schedule=longer)
    assert engine.state_dict()["schedulers"][0]["total_iters"] == 4
    assert lines(capsys) == [
        "the script has changed scheduler.total_iters (4 -> 8) since the checkpoint. The checkpoint's values are "
        "used; to use the script's: Guard(override=['schedulers'])"
    ]
    _, engine, _ = run(tmp_path, epochs=3, schedule=longer, override=["schedulers"])
    schedule = engine.state_dict()["schedulers"][0]
    assert (schedule["total_iters"], schedule["last_epoch"]) == (8, 4)
    assert lines(capsys) == ["the script has changed scheduler.total_iters (4 -> 8), which starts fresh"]
    _, engine, _ = run(tmp_path, epochs=4, schedule=longer, override=["schedulers"])
    assert (engine.state_dict()["schedulers"][0]["last_epoch"], lines(capsys)) == (8, []), "once"


def test_a_changed_loss_scale(tmp_path, capsys):
    run(tmp_path, precision="fp16")
    changed = {"precision": "fp16", "scaling": {"growth_interval": 7}}
    _, engine, _ = run(tmp_path, epochs=2, **changed)
    assert engine.state_dict()["scaler"]["growth_interval"] == 2000
    assert lines(capsys)[-1].endswith("values are used; to use the script's: Guard(override=['scaler'])")
    _, engine, _ = run(tmp_path, epochs=3, **changed, override=["scaler"])
    assert engine.state_dict()["scaler"]["growth_interval"] == 7
    assert lines(capsys) == ["the script has changed scaler.growth_interval (2000 -> 7), which starts fresh"]


def test_a_rate_that_a_scheduler_sets_is_overridden_with_it(tmp_path, capsys):
    run(tmp_path, schedule=warm_up)
    run(tmp_path, epochs=2, schedule=warm_up, lr=0.02)
    said = lines(capsys)
    assert "Guard(override=['lr', 'initial_lr', 'schedulers'])" in said[0]
    with pytest.raises(BadInput) as error:
        run(tmp_path, epochs=3, schedule=warm_up, lr=0.02, override=["lr"])
    assert str(error.value) == "Guard(override=['lr']): a scheduler sets it. Override both: ['lr', 'schedulers']."
    names = ["lr", "initial_lr", "schedulers"]
    group, _, _ = run(tmp_path, epochs=3, schedule=warm_up, lr=0.02, override=names)
    assert group["lr"] == pytest.approx(0.02), "four steps of a warm-up of four"


def test_another_optimizer_is_refused_or_begins_anew(tmp_path, capsys):
    run(tmp_path)
    assert refused(tmp_path, kind=torch.optim.SGD) == (
        "it was saved with AdamW, and the script trains with SGD. Create the optimizer as it was, or start it fresh "
        "on the checkpoint's weights: Guard(override=['optimizer'])."
    )
    sgd = {"kind": torch.optim.SGD, "momentum": 0.5, "lr": 0.25, "override": ["optimizer"]}
    group, engine, _ = run(tmp_path, epochs=2, **sgd)
    assert (group["lr"], group["momentum"], engine.applied_steps) == (0.25, 0.5, 8)
    assert lines(capsys) == ["SGD starts fresh, without the checkpoint's state of AdamW"]
    run(tmp_path, epochs=3, **sgd)
    assert lines(capsys) == [], "it goes on with what it has now"


def test_a_parameter_that_is_trained_no_more(tmp_path, capsys):
    run(tmp_path)
    run(tmp_path, epochs=2, parameters=["weight"])
    assert lines(capsys) == ["the optimizer no longer trains model.bias: its state in the checkpoint is dropped"]


def test_another_precision_is_refused_or_the_scripts(tmp_path, capsys):
    run(tmp_path, precision="fp32")
    assert refused(tmp_path, precision="bf16") == (
        "it was saved in fp32, and the script's engine trains in bf16. Create the engine as it was, or use the "
        "script's precision: Guard(override=['precision'])."
    )
    _, engine, _ = run(tmp_path, epochs=2, precision="bf16", override=["precision"])
    assert (engine.precision, engine.applied_steps) == ("bf16", 8)
    assert lines(capsys) == ["saved in fp32; resuming in the script's bf16"]
    _, engine, _ = run(tmp_path, epochs=3, precision="bf16")
    assert (engine.precision, lines(capsys)) == ("bf16", [])


def test_a_precision_that_the_guard_has_changed_stays_and_is_said(tmp_path, capsys):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), 0.01), "fp16")
    with Guard(engine, tmp_path) as guard:
        guard.step(lambda x: model(x).float().mean(), BATCHES[0])
        guard._recovery._before.append(engine.policy)  # as the ladder does
        engine.change_precision("bf16")
    _, engine, _ = run(tmp_path, precision="fp16")
    assert engine.precision == "bf16"
    assert lines(capsys)[0] == "resuming in bf16: the guard has changed the precision from fp16"


@pytest.mark.parametrize("make", [Average, lambda: nn.Linear(1, 1)], ids=["object", "module"])
def test_states_that_come_and_go(tmp_path, capsys, make):
    run(tmp_path)
    run(tmp_path, epochs=2, state={"average": make()})
    assert lines(capsys) == [
        "the checkpoint has no state of 'average': it starts with the values that the script gave it"
    ]
    assert refused(tmp_path) == (
        "it has the state of 'average', and Guard(state=...) does not name it. Name it, or drop the saved state: "
        "Guard(override=['state'])."
    )
    run(tmp_path, epochs=3, override=["state"])
    assert lines(capsys) == ["the checkpoint's state of 'average' is dropped"]
    run(tmp_path, epochs=4)
    assert lines(capsys) == []


def test_other_data_is_refused_or_begins_its_epoch(tmp_path, capsys):
    run(tmp_path)
    assert "Guard(override=['data'])" in refused(tmp_path, batches=BATCHES[:3])
    _, engine, _ = run(tmp_path, epochs=2, batches=BATCHES[:3], override=["data"])
    assert engine.applied_steps == 4 + 3, "the first epoch was over"
    assert lines(capsys) == ["the data has changed: continuing at the start of epoch 1"]


@pytest.mark.parametrize("override", ["lr", ["learning_rate"], [3]])
def test_what_can_be_overridden(tmp_path, override):
    with pytest.raises(BadInput) as error:
        run(tmp_path / "run", override=override)
    assert str(error.value) == (
        f"Guard(override={override!r}): expected a list of 'precision', 'optimizer', 'schedulers', 'scaler', "
        "'state', 'data' and optimizer options: amsgrad, betas, capturable, decoupled_weight_decay, "
        "differentiable, eps, foreach, fused, lr, maximize, weight_decay."
    )
    assert not (tmp_path / "run").exists()


@pytest.fixture
def altered(monkeypatch):
    """A change to what checkpoints say, as if their sums matched."""

    def alter(change):
        def read(node):
            plain = from_json(node)
            change(plain)
            return plain

        monkeypatch.setattr("ampwise.guard.resuming.from_json", read)

    return alter


@pytest.mark.parametrize(
    "given",
    [3, [1], {}, {"optimizers": 1}, {"optimizers": [{"kind": "AdamW"}], "schedulers": [], "scaler": {}},
     {"optimizers": [{"kind": "AdamW", "groups": [{}, {}]}], "schedulers": 1, "scaler": 2}],
)  # fmt: skip
def test_a_checkpoint_that_lies_about_its_script_is_refused_or_gone_on_from(tmp_path, altered, capsys, given):
    run(tmp_path)
    altered(lambda plain: plain["guard"].update(given=given))
    with contextlib.suppress(BadInput):
        run(tmp_path, epochs=2)
    capsys.readouterr()


def test_what_a_checkpoint_says_cannot_drive_the_terminal(tmp_path, altered, capsys):
    run(tmp_path)

    def change(plain):
        plain["guard"]["given"]["optimizers"][0]["groups"][0]["lr"] = "\x1b[2J"
        plain["optimizers"][0]["state"]["\x1b]0;title\x07"] = {}

    altered(change)
    run(tmp_path, epochs=2)
    said = capsys.readouterr().err
    assert "the optimizer no longer trains" in said
    assert "the script has changed lr" in said
    assert not {"\x1b", "\x07"} & set(said)
