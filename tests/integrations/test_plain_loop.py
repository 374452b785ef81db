"""``with ampwise.watch() as run``: a loop that is already there, in a script, a class or under ``ampwise run``."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils import clip_grad_norm_  # noqa: E402, a name of this module, as in most scripts

import ampwise  # noqa: E402
from ampwise.errors import BadInput  # noqa: E402

ORIGINAL = (clip_grad_norm_,)  # in a tuple, where names are not looked for


class Trainer:
    """Made before the watch begins; its parts are attributes and members of lists."""

    def __init__(self, clip_first=False):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.05)]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.clip_first = clip_first

    def fit(self, steps, spoil=None):
        optimizer = self.optimizers[0]
        for step in range(steps):
            optimizer.zero_grad()
            values = self.model(torch.randn(16, 4)).square()
            if step == spoil:
                values = values * torch.log(values * 0)
            self.scaler.scale(values.mean()).backward()
            if not self.clip_first:
                self.scaler.unscale_(optimizer)
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(optimizer)
            self.scaler.update()
        return self

    def weights(self):
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


def names(run):
    return [finding.rule.name for finding in run.findings]


def test_a_mistake_of_a_trainer_made_before_is_found_while_it_runs_and_afterwards():
    trainer = Trainer(clip_first=True)
    with ampwise.watch(quiet=True, every=1) as run:  # else the norm of a step is read if there is time for it
        trainer.fit(3)
        assert names(run) == ["clip-scaled-grads"]
        assert [row["step"] for row in run.history] == [1, 2, 3]
    assert names(run) == ["clip-scaled-grads"]
    (finding,) = run.findings
    assert finding.place.file == __file__
    assert run.run.status == "finished"
    assert {row["loss_scale"] for row in run.history} == {1024.0}
    assert all(row["loss"] > 0 and row["grad_norm"] > 0 and row["lr"] == 0.05 for row in run.history)


def test_the_history_has_every_step_also_on_a_slow_disk(monkeypatch):
    monkeypatch.setattr("ampwise.runs.files.WRITING_SHARE", 1e-12)  # as if the first line had taken hours
    with ampwise.watch(quiet=True, every=1) as run:
        Trainer().fit(3)
        assert [row["step"] for row in run.history] == [1, 2, 3]


def test_the_right_order_is_silent():
    trainer = Trainer()
    with ampwise.watch(quiet=True) as run:
        trainer.fit(3)
    assert names(run) == []


def test_a_scaler_made_before_the_block_may_have_been_used_there():
    trainer = Trainer().fit(2)
    for made, expected in ((False, []), (True, ["scaler-unused"])):
        with ampwise.watch(quiet=True) as run:
            unused = torch.amp.GradScaler("cpu") if made else trainer.scaler
            trainer.model(torch.randn(16, 4)).square().mean().backward()
            trainer.optimizers[0].step()
            trainer.optimizers[0].zero_grad()
        assert names(run) == expected
        assert unused.is_enabled()


def test_weights_are_the_same_bit_for_bit_and_torch_is_as_before():
    plain = Trainer().fit(5).weights()
    watched = Trainer()
    with ampwise.watch(quiet=True):
        assert clip_grad_norm_ is not ORIGINAL[0]  # the name of this module leads to the wrapper
        watched.fit(5)
    assert torch.equal(plain, watched.weights())
    assert clip_grad_norm_ is ORIGINAL[0]
    assert torch.nn.utils.clip_grad_norm_ is ORIGINAL[0]


def test_what_is_made_inside_is_found_and_a_block_can_be_entered_again():
    watch = ampwise.watch(quiet=True)
    for clip_first in (True, False):
        with watch as run:
            Trainer(clip_first).fit(2)
        assert names(run) == (["clip-scaled-grads"] if clip_first else [])


def test_a_nan_has_its_line_and_an_error_reaches_the_caller(capfd):
    trainer = Trainer()
    watch = ampwise.watch()

    def fails():
        with watch:
            trainer.fit(3, spoil=1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert watch.run.status == "failed"
    assert "The watched block failed with ZeroDivisionError." in capfd.readouterr().err
    places = {finding.place.line for finding in watch.findings if finding.severity == "error"}
    lines = Path(__file__).read_text().splitlines()
    guilty = next(number for number, line in enumerate(lines, 1) if "torch.log(values * 0)" in line)
    assert guilty in places


def test_a_summary_says_how_to_keep_the_record(capfd):
    with ampwise.watch():
        Trainer(clip_first=True).fit(2)
    error = capfd.readouterr().err
    assert "1 error in 2 steps of the watched block of " in error
    assert "error[AMP101] clip-scaled-grads" in error
    assert "`ampwise.watch(output='RUN')` keeps the record, for `ampwise report RUN`." in error


def test_the_record_is_one_for_report_and_is_not_overwritten(tmp_path):
    folder = tmp_path / "today"
    with ampwise.watch(folder, quiet=True):
        Trainer(clip_first=True).fit(2)
    assert [seen.finding.rule.code for seen in ampwise.Run.read(folder).findings] == ["AMP101"]
    with pytest.raises(BadInput, match=r"ampwise\.watch\(output=.*force=True"), ampwise.watch(folder):
        pass
    with ampwise.watch(folder, force=True, quiet=True) as run:
        Trainer().fit(2)
    assert ampwise.Run.read(folder).findings == [] == run.findings


def test_wrong_arguments_are_refused_before_anything_runs():
    with pytest.raises(BadInput, match=r"ampwise\.watch\(every=0\)"):
        ampwise.watch(every=0)


SCRIPT = """
import torch, ampwise
model = torch.nn.Linear(4, 1)
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
with ampwise.watch("never-made") as run:
    for _ in range(3):
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
print([finding.rule.code for finding in run.findings], len(run.history))
"""


def test_under_ampwise_run_it_shows_that_run(tmp_path, warm):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = warm.run("-m", "ampwise", "run", "-o", "run", "train.py", cwd=tmp_path)
    assert done.stdout == "['AMP101'] 3\n"
    assert done.returncode == 0
    assert done.stderr.count("error[AMP101]") == 1
    assert not (tmp_path / "never-made").exists()
    assert json.loads((tmp_path / "run" / "findings.json").read_text())
