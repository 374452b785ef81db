"""An Engine on two ranks: gradients are exchanged once a window, and the ranks train as one process would.

The ranks are those of test_distributed.py; what they run is in distributed_engine.py.
"""

import pytest
import torch

from .distributed_pair import the_ranks

RANKS = {"nobody": [], "rank 0": [0], "rank 1": [1], "both": [0, 1]}
OPTIMIZERS = ["adamw-foreach", "adamw-fused"]
SMALL = 64  # elements; the gradients are some hundred
# How far weights and, relatively, norms may be from those of one process, which rounds in other places.
AWAY = {"fp32": 1e-6, "fp16": 1e-5, "bf16": 1e-4}
NORMS_AWAY = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 1e-2}

needs_fsdp2 = pytest.mark.skipif(
    not hasattr(torch.cpu.current_stream(), "record_event"), reason="this version cannot run FSDP2 on a CPU"
)
FSDP2 = pytest.param("fsdp2", marks=needs_fsdp2)
MIXED = pytest.param("mixed", marks=needs_fsdp2)
every_wrapper = pytest.mark.parametrize("wrapper", ["ddp", FSDP2])
every_overflow = pytest.mark.parametrize("overflow", list(RANKS.values()), ids=list(RANKS))


@pytest.fixture(scope="module")
def ask():
    def ask(case, **arguments):
        answers = the_ranks().ask(f"engine_{case}", **arguments)
        assert not [answer["error"] for answer in answers if "error" in answer]
        return answers

    return ask


@pytest.fixture
def train(ask):
    """Train; the facts of both ranks, which agree, and are those of one process."""

    def train(wrapper, optimizer="adamw-foreach", precision="fp32", style="step", **options):
        answers = ask("train", wrapper=wrapper, optimizer=optimizer, precision=precision, style=style, **options)
        for answer in answers:
            assert answer["skipped"] == answer["due"]
            assert sorted(answer["skipped"] + answer["moved"]) == list(range(sum(answer["counts"])))
            assert answer["counts"][1] == len(answer["due"])
            assert not answer["harmed"]
            assert answer["finite"]
            assert answer["away"] <= AWAY[precision]
            assert answer["norms_away"] <= NORMS_AWAY[precision]
        for fact in ("scales", "lrs", "weights", "skipped", "counts"):
            assert answers[0][fact] == answers[1][fact], fact
        return answers

    return train


def exchanges(answers):
    """In which micro-batches gradients were exchanged, the same on both ranks."""
    found = [
        [number for number, sent in enumerate(answer["elements"]) if max(sent, default=0) > SMALL] for answer in answers
    ]
    assert found[0] == found[1]
    for answer in answers:
        assert all(sum(size > SMALL for size in sent) <= 1 for sent in answer["elements"])
    return found[0]


def small_reductions(answers):
    """How many small reductions each micro-batch had, the same on both ranks."""
    found = [[sum(size <= SMALL for size in sent) for sent in answer["elements"]] for answer in answers]
    assert found[0] == found[1]
    return found[0]


# Gradients are exchanged once a window


@pytest.mark.half_by_day
@every_wrapper
@pytest.mark.parametrize("style", ["step", "pieces", "batches"])
def test_gradients_are_exchanged_once_a_window(train, wrapper, style):
    assert exchanges(train(wrapper, style=style)) == [2, 5]


@every_wrapper
def test_the_last_window_may_be_shorter(train, wrapper):
    assert exchanges(train(wrapper, style="batches", micro_batches=8)) == [2, 5, 7]


@every_wrapper
def test_without_accumulation_every_batch_is_exchanged(train, wrapper):
    assert exchanges(train(wrapper, accumulate=1, micro_batches=3)) == [0, 1, 2]


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("style", "micro_batches"), [("step", 6), ("pieces", 6), ("batches", 8)])
def test_the_weights_are_those_of_ddp_by_hand(train, precision, style, micro_batches):
    overflow = {} if precision == "fp32" else {"overflow": [1], "at": [1]}
    answers = train(
        "ddp", "adamw-fused", precision, style, micro_batches=micro_batches, clip=True, hand=True, **overflow
    )
    assert {answer["weights"] for answer in answers} == {answer["by_hand"] for answer in answers}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ddp_needs_no_collective_besides_gradients(train, optimizer):
    answers = train("ddp", optimizer, "fp16", clip=True, overflow=[1], at=[3], micro_batches=9)
    assert [answer["elements"] for answer in answers] == [[[], [], [354]] * 3] * 2


@pytest.mark.half_by_day
@needs_fsdp2
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
def test_fsdp2_needs_one_small_reduction_a_step(train, optimizer, clip):
    answers = train("fsdp2", optimizer, "fp16", clip=clip, overflow=[1], at=[3], micro_batches=9)
    assert small_reductions(answers) == [0, 0, 1] * 3


# Whichever rank overflows, in whichever place of a window


@pytest.mark.few_by_day(4)
@every_wrapper
@every_overflow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_ranks_skip_together(train, wrapper, optimizer, precision, overflow):
    """In windows 0, 2 and 3, at the first, the middle and the last micro-batch of each."""
    answers = train(wrapper, optimizer, precision, overflow=overflow, at=[0, 7, 11], micro_batches=15, clip=True)
    due = [True, False, True, True, False] if overflow else [False] * 5
    scales = [512, 512, 256, 128, 128] if overflow else [1024, 2048, 2048, 4096, 4096]
    lrs = [1e-3 / 2 ** (number - sum(due[:number])) for number in range(6)]
    for answer in answers:
        assert answer["scales"] == (scales if precision == "fp16" else [1] * 5)
        assert answer["lrs"] == pytest.approx(lrs)
        assert exchanges(answers) == [2, 5, 8, 11, 14]


@pytest.mark.few_by_day(4)
@pytest.mark.parametrize("wrapper", [FSDP2, MIXED])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("overflow", [[0], [1], [0, 1]], ids=["rank 0", "rank 1", "both"])
def test_one_shard_overflows(train, wrapper, optimizer, precision, overflow):
    """After gradients were exchanged: only that rank sees it."""
    answers = train(
        wrapper, optimizer, precision, "pieces", overflow=overflow, at=[2, 5], plant="shard", micro_batches=9, clip=True
    )
    assert small_reductions(answers) == [0, 0, 1] * 3


@pytest.mark.half_by_day
@pytest.mark.parametrize("wrapper", [MIXED])
@pytest.mark.parametrize("style", ["step", "pieces", "batches"])
def test_shards_and_plain_parameters_in_one_optimizer(train, wrapper, style):
    answers = train(wrapper, style=style, clip=True)
    assert exchanges(answers) == [2, 5]
    assert small_reductions(answers) == [0, 0, 1] * 2


@pytest.mark.half_by_day
@every_wrapper
@pytest.mark.parametrize("bad_on", [[0], [1], [0, 1]], ids=["rank 0", "rank 1", "both"])
def test_bad_batches_of_some_ranks_leave_the_loss_scale_alone_on_all(ask, wrapper, bad_on):
    first, second = ask("bad_batches", wrapper=wrapper, bad_on=bad_on)
    assert first == second
    assert (first["counts"], first["scale"]) == ([10, 5], 256.0)  # grown after 5 and after 10 good steps


# Tokens


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize(("wrapper", "of_the_step"), [("ddp", 0), pytest.param("fsdp2", 1, marks=needs_fsdp2)])
@pytest.mark.parametrize("style", ["step", "pieces", "batches"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_mean_is_over_the_tokens_of_all_ranks(train, wrapper, of_the_step, style, precision):
    """One more small reduction a step, and one at the very first micro-batch."""
    answers = train(wrapper, "adamw-fused", precision, style, weighed=True, clip=True)
    assert exchanges(answers) == [2, 5]
    assert small_reductions(answers) == [1, 0, of_the_step + 1, 0, 0, of_the_step + 1]


@every_wrapper
def test_tokens_in_a_shorter_last_window(train, wrapper):
    train(wrapper, style="batches", weighed=True, micro_batches=8)


# The end of the data in the middle of a window


@pytest.mark.parametrize("weighed", [False, True], ids=["", "tokens"])
def test_ddp_can_be_flushed(train, weighed):
    answers = train("ddp", style="flush", micro_batches=7, weighed=weighed)
    assert sum(size for size in answers[0]["elements"][-1] if size > 1) == 354


@needs_fsdp2
def test_fsdp2_cannot_be_flushed_and_says_what_to_do(ask):
    for answer in ask("late_flush", wrapper="fsdp2"):
        assert answer["refusal"].startswith("flush(): sharded gradients can only be exchanged in a backward pass.")
        assert "engine.batches(loader)" in answer["refusal"]
        assert answer["closed"] == [False, True], "the window goes on"
        assert answer["away"] <= AWAY["fp32"]


# Ranks that differ


def test_ranks_that_choose_alike_speak_once(ask):
    first, second = ask("auto", alike=True)
    assert first["error_text"] is second["error_text"] is None
    assert first["said"].startswith("ampwise: ")
    assert first["said"].count("\n") == 1
    assert not second["said"]


def test_ranks_that_choose_differently_are_refused(ask):
    for answer in ask("auto", alike=False):
        assert answer["error_text"] == (
            "Engine(precision='auto') chose different precisions: bf16 on rank 0, fp32 on rank 1. "
            "Name one that all ranks can run."
        )
        assert not answer["said"]


# What must not stay


@pytest.mark.half_by_day
@pytest.mark.parametrize("overflow", [[0], [1], [0, 1]], ids=["rank 0", "rank 1", "both"])
def test_batchnorm_forgets_a_skipped_window_on_all_ranks(ask, overflow):
    """DDP has each rank's own statistics after a step, and those of rank 0 when the next is exchanged."""
    answers, without = ask("statistics", overflow=overflow), ask("statistics", overflow=[])
    for answer, unspoilt in zip(answers, without, strict=True):
        first, second, third = answer["statistics"]
        assert answer["skipped"] == [False, True, False]
        assert unspoilt["skipped"] == [False] * 3
        assert second == first == unspoilt["statistics"][0]
        assert third[-1] == 4, "batches tracked"
        assert torch.tensor(third[:2]).isfinite().all()
    assert answers[0]["weights"] == answers[1]["weights"]


@every_wrapper
def test_a_window_whose_backward_pass_failed_leaves_nothing(ask, wrapper):
    for answer in ask("failing", wrapper=wrapper):
        assert answer["failed"] == "on purpose"
        assert answer["away"] <= AWAY["fp32"]


@pytest.mark.half_by_day
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True, "static_graph": True},
        {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True},
    ],
    ids=str,
)
def test_options_of_ddp_change_nothing(ask, options):
    answers = ask("options_of_ddp", **options)
    assert len({weights for answer in answers for weights in answer["weights"]}) == 1


# Resuming


@pytest.mark.half_by_day
@every_wrapper
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_resumed_between_windows(ask, wrapper, precision):
    for answer in ask("resume", wrapper=wrapper, precision=precision, after=3):
        assert answer["weights"][0] == answer["weights"][1]
        assert answer["lrs"][0] == answer["lrs"][1]


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("after", [4, 5])
@pytest.mark.parametrize("weighed", [False, True], ids=["", "tokens"])
def test_ddp_resumed_in_the_middle_of_a_window(ask, precision, after, weighed):
    for answer in ask("resume", wrapper="ddp", precision=precision, after=after, weighed=weighed):
        assert answer["weights"][0] == answer["weights"][1]
        assert answer["lrs"][0] == answer["lrs"][1]


@needs_fsdp2
def test_fsdp2_in_the_middle_of_a_window_is_not_saved():
    """The window's gradients are in FSDP2 itself, and would be lost without a word."""
    for answer in the_ranks().ask("engine_resume", wrapper="fsdp2", precision="fp16", after=4):
        assert answer["error"] == (
            "BadInput: state_dict() between the micro-batches of a step: FSDP2 holds the gradients "
            "internally, where they cannot be saved. Save when step.closed is true."
        )


# A bad step is explained by all ranks together, and told by the first


@pytest.mark.few_by_day(4)
@every_wrapper
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("fault", ["bad batch", "infinite derivative"])
@pytest.mark.parametrize("on", [[0], [1], [0, 1]], ids=["rank 0", "rank 1", "both"])
def test_a_bad_step_is_explained_with_the_rank_it_arose_on(ask, wrapper, precision, fault, on):
    answers = ask("explained", wrapper=wrapper, precision=precision, fault=fault, on=on)
    first, second = answers
    kind = {"bad batch": "bad-batch", "infinite derivative": "infinite-derivative"}[fault]
    assert first["findings"] == [[kind, on[0], 2]]
    assert second["findings"] == []
    assert first["said"].count("error[AMP9") == 1
    assert "AMP9" not in second["said"]
    for answer in answers:
        assert answer["skipped"] == [False, True, False, False]
        assert answer["weights"][0] == answer["weights"][1], "as if nobody had looked"


@pytest.mark.half_by_day
@every_wrapper
@pytest.mark.parametrize("fault", ["bad batch", "infinite derivative"])
def test_the_micro_batch_that_went_bad_is_found_together(ask, wrapper, fault):
    """It is the second of three, on the second rank."""
    first, second = ask("explained", wrapper=wrapper, precision="fp16", fault=fault, on=[1], accumulate=3)
    assert [finding[1:] for finding in first["findings"]] == [[1, 1]]
    for answer in (first, second):
        assert answer["skipped"] == [True, False, False, False]
        assert answer["weights"][0] == answer["weights"][1], "as if nobody had looked"


def test_a_rank_that_cannot_run_again_does_not_leave_the_others_waiting(ask):
    answers = ask("explained", wrapper="ddp", precision="fp32", fault="once", on=[1])
    for answer in answers:
        assert answer["skipped"] == [False, True, False, False]
        assert answer["findings"] == []
