"""What a finding says of a sink that let a run down."""

import pytest

from ampwise.evidence.delivery import SinkTrouble, When
from ampwise.rules import rules_about
from ampwise.rules.run.sink_failed import RULE, check


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (
            SinkTrouble(sink="wandb", when=When.OPENING, error="OSError: no"),
            "the sink `wandb` could not be opened: OSError: no",
        ),
        (
            SinkTrouble(sink="jsonl", when=When.SENDING, error="OSError: full", sent=1),
            "the sink `jsonl` failed after 1 row, and got no more: OSError: full",
        ),
        (
            SinkTrouble(sink="jsonl", when=When.CLOSING, error="OSError: full", sent=1200),
            "the sink `jsonl` got 1,200 rows, and failed when it was closed: OSError: full",
        ),
        (
            SinkTrouble(sink="mlflow", when=When.WAITING, sent=3, lost=4000),
            "the sink `mlflow` was still busy when the run was over, and was not waited for: 3 rows sent, 4,000 not",
        ),
        (
            SinkTrouble(sink="mlflow", when=When.WAITING, sent=1, lost=600, in_hand=500),
            "the sink `mlflow` was still busy when the run was over, and was not waited for: "
            "at least 1 row sent, up to 600 not",
        ),
        (
            SinkTrouble(sink="mlflow", when=When.SENDING, error="OSError: away", sent=500, lost=600, in_hand=500),
            "the sink `mlflow` failed after at least 500 rows, and got no more: OSError: away",
        ),
        (
            SinkTrouble(sink="trackio", when=When.KEEPING_UP, sent=30, lost=2),
            "the sink `trackio` is slower than the training: 2 rows were left out, 30 rows sent",
        ),
    ],
    ids=lambda each: str(each.when) if isinstance(each, SinkTrouble) else "",
)
def test_one_finding_says_what_happened(trouble, message):
    (finding,) = check(trouble)
    assert finding.rule is RULE
    assert finding.message == message
    assert finding.evidence == {
        "sink": trouble.sink,
        "when": str(trouble.when),
        "sent": trouble.sent,
        "lost": trouble.lost,
    }


def test_each_trouble_has_its_way_out():
    ways = {when: next(check(SinkTrouble(sink="wandb", when=when, error="OSError: no"))).fix for when in When}
    assert all(way.endswith("The record has all of it: `ampwise report RUN`.") for way in ways.values())
    assert "AMPWISE_SINK_WAIT" in ways[When.WAITING]
    assert "nearer" in ways[When.KEEPING_UP]
    assert "another target" in ways[When.OPENING]


def test_its_room_is_about_the_run():
    assert RULE in [module.RULE for module in rules_about("run")]
