"""FSDP2 with a MixedPrecisionPolicy on two ranks, four at night: all decide alike, the watch counts every shard."""

import pytest

from .distributed_pair import the_ranks
from .test_engine_distributed import needs_fsdp2

pytestmark = needs_fsdp2
FOUR = pytest.param(4, marks=pytest.mark.nightly)
# How far weights may be from those of one process in FP32, after five steps of 1e-2.
AWAY = {"fp32": 1e-6, "fp16": 1e-4, "bf16": 1e-3}


@pytest.fixture(scope="module")
def ask():
    def ask(case, **arguments):
        answers = the_ranks().ask(f"fsdp2_{case}", **arguments)
        assert not [answer["error"] for answer in answers if "error" in answer]
        return answers

    return ask


@pytest.mark.few_by_day(5)
@pytest.mark.parametrize("ranks", [2, FOUR])
@pytest.mark.parametrize(
    ("precision", "policy"),
    [
        ("fp16", {"compute": "fp16", "reduce": "fp32"}),
        ("fp16", {"compute": "fp16"}),  # gradients are summed in FP16
        ("bf16", {"compute": "bf16", "reduce": "fp32", "output": "fp32"}),
        ("fp32", {"compute": "bf16", "reduce": "fp32"}),  # no autocast: FSDP casts
        ("bf16", {"compute": "bf16", "reduce": "fp32", "compiled": True}),
        ("fp32", {"layout": "mixed"}),  # a plain parameter among the shards, in one group of the optimizer
        ("fp16", {"layout": "mixed", "optimizer": "fused"}),
        ("fp32", {"layout": "tensor"}),
        ("bf16", {"layout": "tensor", "optimizer": "fused"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_ranks_clip_skip_and_scale_alike_whatever_the_policy(ask, ranks, precision, policy):
    for spoilt in (None, 1):
        answers = ask("engine", ranks=ranks, precision=precision, spoilt=spoilt, **policy)
        for answer in answers:
            assert answer["skipped"] == [False, False, spoilt == 1, False, False]
            assert answer["away"] <= AWAY["bf16" if policy.get("compute") == "bf16" else precision]
            for fact in ("norms", "scale", "weights"):
                assert answer[fact] == answers[0][fact], fact


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("ranks", [2, FOUR])
@pytest.mark.parametrize(
    "options",
    [
        {"scaler": "torch"},
        {"scaler": "ampwise", "layout": "mixed"},
        {"scaler": None, "compute": "bf16", "compiled": True},
        {"scaler": None, "compute": None, "layout": "tensor"},
        {"scaler": "ampwise", "layout": "hsdp"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_the_watch_counts_every_gradient_once(ask, ranks, options):
    answers = ask("watched", ranks=ranks, **options)
    # Ranks that hold the model together; with tensor parallelism over two of four ranks there are two such groups.
    leaders = {0, 2} if options.get("layout") == "tensor" and ranks == 4 else {0}
    for rank, answer in enumerate(answers):
        assert (answer["failures"], answer["findings"], answer["not_counted"]) == ([], [], [])
        assert (answer["steps"], answer["precision"]) == (9, options.get("compute", "fp16") or "fp32")
        if rank in leaders:
            assert answer["seen"] == pytest.approx(answer["norms"], rel=1e-6)
            assert answer["counted"] == answer["numbers"]
            assert answer["samples"] == 4
        else:
            assert (answer["seen"], answer["samples"]) == ([], 0)


@pytest.mark.parametrize("watching", [0, 1])
def test_a_rank_that_is_not_watched_is_not_waited_for(ask, watching):
    answer = ask("watched", watching=[watching])[watching]
    assert (answer["steps"], answer["seen"], answer["failures"]) == (9, [], [])
    assert answer["not_counted"] == (
        [
            "Gradients of 9 steps were not counted: some rank that has shards of them sent no counts. They are counted "
            "if every rank is watched."
        ]
        if watching == 0
        else []
    )


@pytest.mark.parametrize("order", [(1, 2, 1), pytest.param((1, 2, 4, 2, 1), marks=pytest.mark.nightly)])
def test_a_guard_resumes_on_another_number_of_ranks(ask, tmp_path, order):
    """Weights and moments are the same bits, however they are sharded."""
    folder, last = tmp_path / "".join(map(str, order)), None
    for number, ranks in enumerate(order):
        answers = ask("guarded", ranks=ranks, folder=str(folder))
        assert len({answer["after"] for answer in answers}) == 1
        assert answers[0]["steps"] == [2 * number, 2 * number + 2]
        assert last in (None, answers[0]["before"])
        last = answers[0]["after"]
