"""What an event says of a sink that let a run down."""

from ampwise.runs.sinks.run_sinks import SinkFailure, SinkPhase

from ...for_each import for_each


@for_each(
    ("trouble", "message"),
    [
        (
            SinkFailure(sink="wandb", when=SinkPhase.OPENING, error="OSError: no"),
            "the sink `wandb` could not be opened: OSError: no",
        ),
        (
            SinkFailure(sink="jsonl", when=SinkPhase.SENDING, error="OSError: full", sent=1),
            "the sink `jsonl` failed after 1 row and was dropped: OSError: full",
        ),
        (
            SinkFailure(sink="jsonl", when=SinkPhase.CLOSING, error="OSError: full", sent=1200),
            "the sink `jsonl` received 1,200 rows, and failed on closing: OSError: full",
        ),
        (
            SinkFailure(sink="mlflow", when=SinkPhase.WAITING, sent=3, lost=4000),
            "the sink `mlflow` was still busy when the run ended and was abandoned: 3 rows sent, 4,000 not",
        ),
        (
            SinkFailure(sink="mlflow", when=SinkPhase.WAITING, sent=1, lost=600, in_hand=500),
            "the sink `mlflow` was still busy when the run ended and was abandoned: at least 1 row sent, up to 600 not",
        ),
        (
            SinkFailure(sink="mlflow", when=SinkPhase.SENDING, error="OSError: away", sent=500, lost=600, in_hand=500),
            "the sink `mlflow` failed after at least 500 rows and was dropped: OSError: away",
        ),
        (
            SinkFailure(sink="trackio", when=SinkPhase.KEEPING_UP, sent=30, lost=2),
            "the sink `trackio` is slower than the training: 2 rows were dropped, 30 rows sent",
        ),
    ],
)
def test_one_event_says_what_happened(trouble, message):
    event = trouble.logged()
    assert (event.name, event.level, event.message, event.step) == ("sink-failed", "warning", message, None)
    assert event.fields == {
        "sink": trouble.sink,
        "when": str(trouble.when),
        "sent": trouble.sent,
        "lost": trouble.lost,
    }


def test_each_trouble_has_its_way_out():
    ways = {when: SinkFailure(sink="wandb", when=when, error="OSError: no").logged().advice for when in SinkPhase}
    assert all(way.endswith("The record is complete: `ampwise report RUN`.") for way in ways.values())
    assert "AMPWISE_SINK_WAIT" in ways[SinkPhase.WAITING]
    assert "local" in ways[SinkPhase.KEEPING_UP]
    assert "another target" in ways[SinkPhase.OPENING]
