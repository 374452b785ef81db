"""The example: it names the layer that it has on purpose, and trains with what was found."""

from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "search_policy.py"


def test_it_finds_the_layer_and_trains(load_script, capsys):
    assert load_script(EXAMPLE).main(["--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "5 in e4m3, 1 in bf16, of 6 modules" in out
    assert "layers.2: its sums cancel" in out
    assert "step   2  loss" in out
