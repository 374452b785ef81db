"""The zoo of failures: programs fail where their labels say, healthy ones do not, and the tracer names what is guilty.

The labels are what the tracer is judged by. Here they are held against an oracle of their own: a dispatch mode that
notes at which lines a value that is not finite appears although all that went in was finite.
"""

import functools
import re
import sys

import pytest
import torch
from benchmarks.failures import __main__ as command
from benchmarks.failures.case import KINDS, Label, Program, failing, healthy, label_of, named
from benchmarks.failures.others import anomaly_says, hooks_say
from benchmarks.failures.plain import first_bad, train
from benchmarks.failures.score import Score, engine_finds, of_trace, totals, trace_finds, traces
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ampwise.errors import BadInput
from ampwise.finding import Place, Rule, Severity

FAILING, HEALTHY = failing(), healthy()
READ = {"bad-batch", "bad-weights", "poisoned-statistics", "optimizer-division"}  # the bad value was there before
BACKWARD = {"infinite-derivative", "gradient-overflow"}  # of a forward pass that is finite

# By day the first of each kind, and every third.
FIRST = {program.label.kind: program.name for program in reversed(FAILING)}.values()
BY_DAY = [program.name for number, program in enumerate(FAILING) if number % 3 == 0 or program.name in FIRST]
some_failing = pytest.mark.parametrize(
    "program",
    [pytest.param(each, marks=[pytest.mark.nightly] * (each.name not in BY_DAY)) for each in FAILING],
    ids=lambda program: program.name,
)
every_healthy = pytest.mark.parametrize("program", HEALTHY, ids=lambda program: program.name)


@functools.cache
def first_failure(program):
    """Of a plain loop; each program is asked for it several times."""
    return first_bad(program.case())


needs_tracing = pytest.mark.skipif(not traces(), reason="this ampwise has no Engine.findings")


# Labels


def test_there_are_enough_programs_and_each_kind_has_one():
    assert len(FAILING) >= 42
    assert len(HEALTHY) >= 16
    assert {program.label.kind for program in FAILING} == set(KINDS)


def test_a_failing_program_is_labelled_and_says_what_happens():
    for program in FAILING:
        text = program.path.read_text()
        assert program.label.kind in KINDS, program.name
        assert text.startswith('"""'), program.name
        assert text.count("guilty") == 1, program.name


def test_a_healthy_program_has_no_label():
    for program in HEALTHY:
        assert program.label is None, program.name
        assert "guilty" not in program.path.read_text(), program.name


def test_two_labels_are_refused(tmp_path):
    path = tmp_path / "two.py"
    path.write_text("x = 1  # guilty: overflow\ny = 2  # guilty: overflow\n")
    with pytest.raises(BadInput, match=r"two\.py: 2 lines are labelled guilty; a program has one"):
        label_of(path)


def test_a_kind_that_is_not_known_is_refused(tmp_path):
    path = tmp_path / "odd.py"
    path.write_text("\nx = 1  # guilty: bad-luck\n")
    with pytest.raises(BadInput, match=r"odd\.py:2: no kind 'bad-luck'; there are bad-batch, "):
        label_of(path)


def test_a_name_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(BadInput, match="no program 'nonesuch' in benchmarks/failures; there are adagrad_without_eps, "):
        named(["nonesuch"])


# The truth about the programs, from a loop by hand


@some_failing
def test_a_failing_program_fails_in_a_plain_loop_at_scale_one(program):
    bad = first_failure(program)
    assert bad is not None
    if program.label.kind in BACKWARD and program.name not in BEYOND_THE_ORACLE:
        assert bad.loss_is_finite, "the forward pass is to be finite"
        assert bad.bad_gradients
    else:  # what is bad in a forward pass may be hidden on its way to the loss
        assert not bad.is_finite


@pytest.mark.few_by_day(3)
@every_healthy
def test_a_healthy_program_is_finite_throughout(program):
    seen = list(train(program.case()))
    assert len(seen) >= 3
    assert all(each.is_finite for each in seen)


@pytest.mark.nightly
def test_programs_fail_at_steps_of_all_sorts():
    indices = [first_failure(program).index for program in FAILING]
    assert sum(index >= 2 for index in indices) > len(indices) / 2


def test_a_case_is_alike_each_time():
    program = next(each for each in FAILING if each.name == "dropout_overflow")
    assert [str(seen) for seen in train(program.case())] == [str(seen) for seen in train(program.case())]


class Births(TorchDispatchMode):
    """Lines at which a value that is not finite comes out of an operation that was given none, and those that read one.

    A NaN out of infinities is a origin too. Those of a backward operation are the forward lines that made it.
    """

    def __init__(self, program):
        super().__init__()
        self.path = str(program.path)
        self.born, self.read = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = _badness((args, kwargs))
        result = function(*args, **(kwargs or {}))
        line = self._line(sys._getframe(1))
        if before:
            self.read.append(line)
        by_hand = re.match(r"(masked_)?fill|empty|full", function.__name__)
        if not by_hand and _badness(result) > before:
            self.born.append(line)
        return result

    def _line(self, frame):
        while frame is not None:
            if frame.f_code.co_filename == self.path:
                return frame.f_lineno
            frame = frame.f_back
        node = torch._C._current_autograd_node()
        while node is not None:  # one of a double backward pass stands in the line of its parent
            told = "".join(node.metadata.get("traceback_", []))
            if lines := re.findall(re.escape(self.path) + r'", line (\d+)', told):
                return int(lines[-1])
            node = node.metadata.get("parent_")
        return None


def _badness(tree):
    """0 where all is finite, 1 with an infinity, 2 with a NaN."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    tensors = [leaf for leaf in tensors if not leaf._is_zerotensor() and leaf.layout == torch.strided]
    return max((2 if tensor.isnan().any() else int(tensor.isinf().any()) for tensor in tensors), default=0)


# What a mode that only compares inputs and results cannot judge: numbers of Python's, sparse and complex values, masks
# that are computed, weights that are read under another name, derivatives of derivatives.
BEYOND_THE_ORACLE = {
    "inner_loop_root",
    "log_of_mask",
    "nan_loss_weight",
    "numpy_batch",
    "second_derivative_at_zero",
    "sparse_adjacency",
    "sparse_embedding_gradient",
    "tied_weights",
    "unit_phase",
}


@pytest.mark.few_by_day(4)
@pytest.mark.parametrize(
    "program", [each for each in FAILING if each.name not in BEYOND_THE_ORACLE], ids=lambda program: program.name
)
def test_the_label_is_where_the_bad_value_is_born_or_first_read(program):
    index = first_failure(program).index
    steps = train(program.case())
    for _ in range(index):
        next(steps)
    with Births(program) as looking, torch.autograd.set_detect_anomaly(True, check_nan=False):
        next(steps)
    lines = looking.read if program.label.kind in READ else looking.born
    in_program = [line for line in lines if line is not None]
    assert in_program[0] == program.label.line


def test_the_oracle_would_notice_a_label_on_another_line():
    program = next(each for each in FAILING if each.name == "ffn_overflow")
    with Births(program) as looking:
        list(train(program.case()))
    assert program.label.line in looking.born
    assert program.label.line - 1 not in looking.born


# What others say


def test_anomaly_detection_names_a_line_of_the_backward_pass_and_is_silent_of_infinities():
    assert str(anomaly_says(*named(["gradient_penalty"]))).endswith("✓")
    assert not anomaly_says(*named(["dice_intersection_overflow"])).spoke


def test_forward_hooks_name_a_module_and_know_nothing_of_losses_and_gradients():
    said = hooks_say(*named(["ffn_overflow"]))
    assert (said.what, said.right) == ("ffn.wo (Linear)", True)
    assert not hooks_say(*named(["bce_by_hand"])).spoke
    assert not hooks_say(*named(["triplet_distance_zero"])).spoke


def test_a_module_that_only_passes_on_what_was_born_before_is_not_right():
    said = hooks_say(*named(["constant_column"]))
    assert (said.what, said.right) == ("0 (Linear)", False)


def test_anomaly_detection_calls_an_overflow_of_scaled_gradients_an_error():
    assert anomaly_says(*named(["settling_scale"])).spoke
    assert not hooks_say(*named(["settling_scale"])).spoke


# The score


def rule(name, code="AMP901"):
    return Rule(code=code, name=name, severity=Severity.ERROR, summary="s", why="w", fix="f", bad="b", good="g")


def found(program, *, line=None, kind=None, file=None):
    place = Place(file=str(file or program.path), line=line or program.label.line)
    return rule(kind or program.label.kind).at(place, "m")


@pytest.fixture
def guilty(tmp_path):
    path = tmp_path.resolve() / "guilty.py"
    path.touch()
    return Program("guilty", path, Label(7, "overflow"))


@pytest.fixture
def innocent(tmp_path):
    return Program("innocent", tmp_path / "innocent.py", None)


def test_line_and_kind_are_judged_on_the_same_finding(guilty):
    elsewhere = [found(guilty, line=8), found(guilty, kind="half-overflow")]
    assert Score(guilty, [found(guilty)]).kind_is_right
    assert Score(guilty, elsewhere).line_is_right
    assert not Score(guilty, elsewhere).kind_is_right
    assert not Score(guilty, [found(guilty, line=8)]).line_is_right
    assert not Score(guilty, [found(guilty, file=guilty.path.with_name("other.py"))]).line_is_right
    assert not Score(guilty, []).line_is_right


def test_what_is_asked_directly_has_to_be_right_too(guilty):
    assert Score(guilty, [found(guilty)], [found(guilty)]).kind_is_right
    assert not Score(guilty, [found(guilty)], []).line_is_right
    assert not Score(guilty, [found(guilty)], [found(guilty, kind="bad-batch")]).kind_is_right


def test_totals_reach_the_aim_or_do_not(guilty, innocent):
    right, wrong = Score(guilty, [found(guilty)]), Score(guilty, [found(guilty, kind="bad-batch")])
    silent, alarm = Score(innocent, []), Score(innocent, [rule("overflow").at(Place(), "m")])
    assert totals([right, silent]).reach_the_aim
    assert totals([right] * 19 + [wrong]).reach_the_aim
    assert not totals([right] * 18 + [wrong]).reach_the_aim
    assert not totals([right, alarm]).reach_the_aim
    assert str(totals([right, wrong, alarm])) == (
        "Lines: 2 of 2 (100%); wanted: all. Kinds: 1 of 2 (50%); wanted: 95% at least. "
        "False alarms: 1 in 1 healthy programs; wanted: none."
    )


def test_findings_of_other_rules_are_none_of_the_tracers(guilty):
    others = rule("scale-collapse", code="AMP501").at(Place(), "m")
    assert of_trace([others, found(guilty)]) == [found(guilty)]


def test_a_row_says_what_was_reported_and_ticks_only_what_is_right_and_alone(guilty, innocent):
    assert command.row(Score(guilty, [found(guilty)], [])) == ["guilty", "7 overflow", "✓", "nothing", "", ""]
    told = command.row(Score(guilty, [found(guilty), found(guilty, line=9, kind="bad-batch")]))
    assert told[2] == "7 overflow, 9 bad-batch"
    assert command.row(Score(innocent, []))[1:3] == ["healthy", "silent ✓"]


def test_without_a_tracer_the_command_says_so(monkeypatch):
    monkeypatch.setattr(command, "traces", lambda: False)
    with pytest.raises(SystemExit, match=r"does not trace: Engine\.findings and ampwise\.trace are missing"):
        command.main(["ffn_overflow"])


def test_a_name_that_is_not_there_ends_the_command():
    with pytest.raises(SystemExit, match=r"benchmarks\.failures: no program 'nonesuch'"):
        command.main(["nonesuch"])


@needs_tracing
def test_named_programs_are_shown_and_not_published(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.harness.RESULTS", tmp_path)
    assert command.main(["ffn_overflow", "settling_scale", "--others"]) == 0
    shown = capsys.readouterr().out
    assert "ffn_overflow" in shown
    assert "Lines: 1 of 1 (100%)" in shown
    assert "detect_anomaly: speaks in 1 of 1" in shown
    assert not list(tmp_path.iterdir())


# The tracer itself


@needs_tracing
@some_failing
def test_the_tracer_names_the_guilty_line_and_kind(program):
    case = program.case()
    directly = trace_finds(program.case()) if case.direct else None
    told = command.row(Score(program, engine_finds(program.case()), directly))[2:4]
    assert told == ["✓", "✓" if case.direct else ""]


@pytest.mark.few_by_day(3)
@needs_tracing
@every_healthy
def test_the_tracer_is_silent_of_healthy_programs(program):
    assert engine_finds(program.case()) == []
