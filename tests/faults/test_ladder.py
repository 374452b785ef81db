"""The rungs: each can be left out, a wider precision mends what a narrow one cannot hold, and the way back up."""

import pytest

from ..night import by_night
from .conftest import written
from .programs import SAMPLES, times_trained, train

pytestmark = pytest.mark.usefixtures("way")

IN_A_ROW = tuple(range(20, 23))


def stops(outcome, tmp_path):
    assert outcome.code == 70
    assert outcome.told[-1] == "training-stopped"
    assert list((tmp_path / "capsules").glob("*/*")), "a capsule of the bad step"
    return outcome.why


@written("engine")
def test_no_rung_but_the_last(tmp_path, capsys):
    outcome = train(tmp_path, fault="nan", at=IN_A_ROW, ladder={"rollbacks": 0, "change_precision": False})
    assert "nothing else is allowed" in stops(outcome, tmp_path)
    assert outcome.told == ["step-skipped", "step-skipped", "training-stopped"]
    assert "`x` was passed to the step with" in capsys.readouterr().err


@written("engine")
def test_the_first_bad_step_can_be_the_last(tmp_path):
    outcome = train(tmp_path, fault="nan", at=(20,), ladder={"skips": 1, "rollbacks": 0, "change_precision": False})
    stops(outcome, tmp_path)
    assert outcome.told == ["training-stopped"]
    assert max(outcome.lineage) == 20


@pytest.mark.parametrize("skips", [*by_night(1), 2, 5])
def test_so_many_skips_before_more_is_done(tmp_path, skips):
    outcome = train(tmp_path, fault="nan", at=tuple(range(20, 25)), ladder={"skips": skips, "rollbacks": 5})
    assert outcome.told.index("rolled-back") == skips - 1
    assert outcome.code == 0
    assert len(outcome.passed_over) == (4 if skips == 2 else 5)


@written("engine")
def test_without_a_tracer_bad_data_is_met_with_all_rungs(tmp_path):
    """Nobody knows then that it is the data's fault."""
    outcome = train(tmp_path, fault="nan", at=tuple(range(20, 1000)), engine={"trace": False})
    assert outcome.code == 70
    rungs = [each for each in outcome.told if each != "step-skipped"]
    assert rungs == ["rolled-back", "precision-changed", "training-stopped"], (
        "each where the one before changed nothing"
    )


@written("engine")
def test_what_overflows_in_fp16_goes_on_wider_and_learns_as_in_bf16(tmp_path):
    expected = train(tmp_path / "bf16", model="loud", precision="bf16", guarded=False)
    outcome = train(tmp_path / "run", model="loud", precision="fp16")
    assert outcome.code == 0
    assert "precision-changed" in outcome.told
    assert (outcome.precision, outcome.kept) == ("fp16", ["loud"]), "the module that the tracer names is kept in FP32"
    assert outcome.loss == pytest.approx(expected.loss, rel=0.3)
    assert len(outcome.lineage) >= 48 - 12


@written("engine")
def test_without_a_tracer_it_is_all_of_the_model(tmp_path):
    outcome = train(tmp_path, model="loud", precision="fp16", engine={"trace": False})
    assert (outcome.code, outcome.precision, outcome.kept) == (0, "bf16", [])


@written("engine")
def test_a_wider_precision_is_kept_when_the_run_is_resumed(tmp_path):
    first = train(tmp_path, model="loud", precision="fp16", epochs=2)
    second = train(tmp_path, model="loud", precision="fp16")
    assert (second.precision, second.kept) == (first.precision, first.kept)
    assert second.began_at > 0
    assert second.told == []


@written("engine")
def test_gradients_that_overflow_at_any_scale_bring_it_to_its_floor(tmp_path):
    outcome = train(tmp_path, model="steep", precision="fp16")
    assert "scale-at-floor" in outcome.told
    assert outcome.told.index("scale-at-floor") < outcome.told.index("precision-changed")
    assert outcome.code == 0
    assert outcome.precision == "bf16" or outcome.kept


@written("engine", *by_night("loop", "own steps"))
def test_a_floor_without_a_wider_precision_is_the_end(tmp_path):
    outcome = train(tmp_path, model="steep", precision="fp16", ladder={"change_precision": False})
    assert outcome.code == 70
    assert "scale-at-floor" in outcome.told
    assert outcome.told[-1] == "training-stopped"
    assert outcome.lineage == {}


@written("engine")
def test_back_up_after_a_healthy_stretch_if_asked(tmp_path):
    """What was bad for a while only: FP16 again, and to the end."""
    options = {"fault": "nan", "at": tuple(range(6)), "engine": {"trace": False}, "precision": "fp16"}
    stays = train(tmp_path / "stays", ladder={"rollbacks": 0}, **options)
    climbs = train(tmp_path / "climbs", ladder={"rollbacks": 0, "climb_after": 10}, **options)
    assert (stays.precision, "climbed-back" in stays.told) == ("fp32", False)
    assert (climbs.precision, climbs.told.count("climbed-back")) == ("fp16", 2)


@written("engine")
def test_what_cannot_be_climbed_back_to_is_left_again(tmp_path):
    outcome = train(
        tmp_path, model="loud", precision="fp16", engine={"trace": False}, ladder={"climb_after": 10, "rollbacks": 0}
    )
    assert outcome.code == 0
    changes = [each for each in outcome.told if each in ("precision-changed", "climbed-back")]
    assert changes[:3] == ["precision-changed", "climbed-back", "precision-changed"]
    assert outcome.loss < 1.0


@pytest.fixture(scope="module")
def healthy(way, tmp_path_factory):
    return train(tmp_path_factory.mktemp("healthy"), epochs=8, precision="fp32")


@pytest.mark.nightly
def test_a_spike_is_reported_of(tmp_path, healthy):
    assert healthy.told == []
    outcome = train(tmp_path / "run", epochs=8, precision="fp32", fault="spike", at=(70,))
    assert outcome.told == ["loss-spike"]
    assert len(outcome.lineage) == 96
    assert outcome.passed_over == []


@pytest.mark.nightly
def test_a_spike_is_gone_around_if_asked(tmp_path, healthy):
    options = {"fault": "spike", "at": (70,), "ladder": {"on_spike": "rollback"}}
    outcome = train(tmp_path / "run", epochs=8, precision="fp32", **options)
    assert outcome.told == ["loss-spike", "rolled-back"]
    assert outcome.passed_over == [[5, 10]]
    passed = set(healthy.lineage[71])
    assert times_trained(outcome.steps) == {sample: 8 - (sample in passed) for sample in range(SAMPLES)}
    assert outcome.loss == pytest.approx(healthy.loss, rel=0.25)


def test_spikes_without_end_are_lived_with(tmp_path):
    options = {"fault": "spike", "at": tuple(range(70, 1000)), "ladder": {"on_spike": "rollback"}}
    outcome = train(tmp_path, epochs=16, precision="fp32", **options)
    assert outcome.code == 0
    assert outcome.told.count("rolled-back") >= 1
