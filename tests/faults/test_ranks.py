"""Two ranks: both do the same in the same step, and neither waits for one that is gone."""

import pytest

from ampwise.guard.disk.catalog import checkpoints

from ..night import by_night
from .programs import SAMPLES, times_trained

IN_A_ROW = [20, 21, 22]


def both(ended, code=0):
    assert [each.code for each in ended] == [code, code], ended[0].said + ended[1].said
    first, second = (each.outcome for each in ended)
    assert first.weights == second.weights
    assert [each for each in first.told if each != "lock-taken-over"] == second.told  # which the first rank does
    assert [number for number, _, _ in first.steps] == [number for number, _, _ in second.steps]
    return first, second


@pytest.mark.parametrize("kind", ["nan", *by_night("huge")])
def test_a_bad_batch_on_one_rank_is_skipped_by_both(children, tmp_path, kind):
    first, second = both(children.train(tmp_path / "run", ranks=2, fault=kind, at=[20], on_rank=1))
    assert first.told == ["step-skipped"]
    assert len(first.lineage) == len(second.lineage) == 47


@pytest.mark.nightly
def test_bad_batches_on_one_rank_are_gone_around_by_both(children, tmp_path):
    first, second = both(children.train(tmp_path / "run", ranks=2, fault="nan", at=IN_A_ROW, on_rank=1))
    assert first.told == ["step-skipped", "step-skipped", "rolled-back"]
    assert first.passed_over == second.passed_over == [[1, 8], [1, 9], [1, 10]]
    trained = times_trained(first.steps) + times_trained(second.steps)
    assert sorted(trained.values()) == [3] * 24 + [4] * (SAMPLES - 24), "none twice, none lost but for these"


def test_without_end_both_stop(children, tmp_path):
    ended = children.train(tmp_path / "run", ranks=2, fault="nan", at=list(range(20, 1000)), on_rank=1)
    assert [each.code for each in ended] == [70, 70], ended[0].said + ended[1].said
    assert ended[0].outcome.told == ended[1].outcome.told
    assert ended[0].outcome.told[-1] == "training-stopped"
    assert "training was stopped" in ended[0].said
    assert "training was stopped" not in ended[1].said, "one of them speaks"


def test_nan_in_the_weights_of_one_rank_is_put_back_on_both(children, tmp_path):
    first, _ = both(children.train(tmp_path / "run", ranks=2, fault="nan weights", at=[20], on_rank=1))
    assert first.told[-1] == "rolled-back"
    assert first.loss < 1


def test_a_signal_to_one_rank_ends_both(children, tmp_path):
    unbroken, _ = both(children.train(tmp_path / "whole", ranks=2, epochs=2))
    ended = children.train(
        tmp_path / "run", ranks=2, epochs=2, fault="SIGTERM", at=[14], on_rank=1, guard={"exit_code": 3}
    )
    assert [each.code for each in ended] == [3, 3], ended[0].said + ended[1].said
    assert [each.outcome.told for each in ended] == [["preempted"], ["preempted"]]
    assert checkpoints(tmp_path / "run")[0].step == 15
    resumed, _ = both(children.train(tmp_path / "run", ranks=2, epochs=2))
    assert resumed.began_at == 15
    assert (resumed.weights, resumed.loss) == (unbroken.weights, unbroken.loss)


@pytest.mark.parametrize("fault", ["SIGKILL", "hang"])
def test_a_rank_that_is_gone_ends_the_other(children, tmp_path, fault):
    """One that hangs does so for longer than the children are waited for."""
    guard = {"patience": "3s" if fault == "hang" else "120s", "every": "1h"}
    gone = {1: {"fault": fault, "at": [20]}}
    ended = children.train(tmp_path / "run", ranks=2, guard=guard, by_rank=gone, save_at=[12])
    survivor = ended[0]
    assert survivor.code == 70, survivor.said
    assert "rank-lost" in survivor.said
    saved = [each.step for each in checkpoints(tmp_path / "run")]
    assert saved == [12] or (fault == "hang" and not saved), "where the machine hung before, there may be none"
    resumed, _ = both(children.train(tmp_path / "run", ranks=2, guard={"every": "1h"}))
    assert resumed.began_at == max(saved, default=0)


def test_fsdp2_rolls_back_and_resumes_to_the_bit(children, tmp_path):
    options = {"wrap": "fsdp2", "ranks": 2, "epochs": 2}
    bad = {"fault": "nan", "at": [5, 6, 7], "on_rank": 1}
    unbroken, _ = both(children.train(tmp_path / "whole", **bad, **options))
    assert unbroken.told == ["step-skipped", "step-skipped", "rolled-back"]
    stopped = children.train(tmp_path / "run", **bad, **options, by_rank={0: {"kill_at_batch": 18}})
    assert stopped[0].code == -9
    assert stopped[1].code == 70, stopped[1].said
    resumed, _ = both(children.train(tmp_path / "run", **options))
    assert resumed.passed_over == [[0, 5], [0, 6], [0, 7]]
    assert resumed.weights == unbroken.weights


def test_on_another_number_of_ranks_the_epoch_begins_anew_and_that_is_said(children, tmp_path):
    """Its batches have other numbers, also those that were passed over."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "passed_over.json").write_text('{"passed_over": [[1, 1]]}')
    two = children.train(tmp_path / "run", ranks=2, epochs=2, fault="SIGTERM", at=[14], on_rank=1)
    assert [each.code for each in two] == [0, 0], two[0].said + two[1].said
    assert "1 batch that failed before will be left out" in two[0].said
    one = children.train(tmp_path / "run", epochs=2)
    assert one.outcome.told == ["ranks-changed"]
    assert one.outcome.began_at == 15
    assert [len(samples) for _, samples, _ in one.outcome.steps] == 12 * [8], "all of the second epoch"
    assert one.outcome.passed_over == []
    assert "each rank gets new random numbers and restarts the epoch's data" in one.said
    assert "ampwise: the data has changed: continuing at the start of epoch 1\n" in one.said
    assert "ampwise: 1 batch that failed before will be used again: batches have other numbers now\n" in one.said
