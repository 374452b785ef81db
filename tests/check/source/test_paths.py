"""The ways through a block: nothing invented, nothing contradicted."""

import itertools
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.check.source.events import Branch, BranchGuard, EventBlock, FollowedCall, Jump, Loop, SourceEvent
from ampwise.check.source.execution_paths import MOST_PATHS, MOST_SAMPLED, paths_through, sampled_paths
from ampwise.check.source.walk import events_in

from .reading import code_of, kinds

HEAD = "def main(loss, opt, scaler, flag, other, xs):\n"


def paths_of(body):
    """The kinds of events on each way through a function."""
    lines = "\n".join(f"    {line}" for line in body.split("\n"))
    code = code_of(f"{HEAD}{lines}\n    return None\n    scaler.unscale_(opt)\n")
    (trace,) = (trace for trace in code.traces if trace.frame.function.name == "main")
    return sorted(kinds(path.events) for path in paths_through(trace.block))


def test_an_if_has_two_ways():
    assert paths_of("if flag:\n    scaler.update()\nscaler.step(opt)") == [["scaler step"], ["update", "scaler step"]]


def test_two_ifs_on_one_question_agree():
    body = "if flag:\n    scaler.scale(loss).backward()\nelse:\n    loss.backward()\n"
    body += "if flag is not None:\n    scaler.step(opt)\nelse:\n    opt.step()"
    assert paths_of(body) == [["backward", "optimizer step"], ["scaled backward", "scaler step"]]


def test_two_ifs_on_two_questions_do_not():
    body = "if flag:\n    scaler.scale(loss).backward()\nif other:\n    scaler.step(opt)"
    assert len(paths_of(body)) == 4


def test_elif_excludes_what_came_before():
    body = "if flag:\n    scaler.step(opt)\nelif other:\n    opt.step()\nelse:\n    scaler.update()"
    assert paths_of(body) == [["optimizer step"], ["scaler step"], ["update"]]


def test_an_early_continue_leaves_out_the_rest_of_the_loop_only():
    body = "for x in xs:\n    if flag:\n        opt.step()\n        continue\n    scaler.step(opt)\nscaler.update()"
    assert paths_of(body) == [["optimizer step", "update"], ["scaler step", "update"]]


def test_an_early_break_too():
    body = "while True:\n    if flag:\n        break\n    scaler.step(opt)\nscaler.update()"
    assert paths_of(body) == [["scaler step", "update"], ["update"]]


def test_an_early_return_leaves_out_all():
    body = "if flag:\n    opt.step()\n    return 1\nscaler.step(opt)\nscaler.update()"
    assert paths_of(body) == [["optimizer step"], ["scaler step", "update"]]


def test_a_return_in_a_function_that_is_called_ends_only_that():
    code = code_of(
        """
        def main(loss, opt, scaler, flag):
            finish(opt, scaler, flag)
            scaler.update()

        def finish(opt, scaler, flag):
            if flag:
                return
            scaler.step(opt)
        """
    )
    (trace,) = (trace for trace in code.traces if trace.frame.function.name == "main")
    assert sorted(kinds(path.events) for path in paths_through(trace.block)) == [["scaler step", "update"], ["update"]]


def test_a_way_that_raises_is_no_way():
    body = "if flag:\n    scaler.update()\n    raise ValueError\nscaler.step(opt)"
    assert paths_of(body) == [["scaler step"]]


def test_what_an_except_does_is_no_part_of_training():
    body = "try:\n    scaler.step(opt)\nexcept RuntimeError:\n    opt.step()\nfinally:\n    scaler.update()"
    assert paths_of(body) == [["scaler step", "update"]]


def test_a_choice_within_an_expression_has_two_ways():
    body = "(scaler.scale(loss) if flag else loss).backward()\nscaler.step(opt) if flag else opt.step()"
    assert paths_of(body) == [["backward", "optimizer step"], ["scaled backward", "scaler step"]]


def test_a_constant_decides():
    assert paths_of("if True:\n    scaler.step(opt)\nelse:\n    opt.step()") == [["scaler step"]]


def test_a_match_takes_one_case():
    body = "match flag:\n    case 1:\n        scaler.step(opt)\n    case _:\n        opt.step()"
    found = paths_of(body)
    assert ["scaler step"] in found
    assert ["optimizer step"] in found


def branches(number, same):
    names = ["flag" if same else f"x{i}" for i in range(number)]
    return EventBlock(
        [
            Branch(
                (BranchGuard(name, True),), (BranchGuard(name, False),), EventBlock([event()]), EventBlock([event()])
            )
            for name in names
        ]
    )


def event():
    return SourceEvent("update", None, None)


def test_too_many_ways_are_none_at_all():
    number = MOST_PATHS.bit_length()
    assert paths_through(branches(number, same=False)) is None
    assert len(paths_through(branches(number, same=True))) == 2


def test_a_sample_takes_every_pair_of_sides():
    block = branches(30, same=False)
    found = sampled_paths(block)
    assert len(found) <= MOST_SAMPLED
    sides = [node.then.nodes[0] for node in block.nodes] + [node.orelse.nodes[0] for node in block.nodes]
    for first, second in itertools.combinations(sides, 2):
        if sides.index(second) - sides.index(first) != 30:  # not the two sides of one branch
            assert any(first in path.events and second in path.events for path in found)


def test_a_sample_reaches_what_is_nested_and_what_follows_early_exits():
    inner = EventBlock([event()])
    deepest = inner.nodes[0]
    for number in range(12):
        inner = EventBlock(
            [Branch((BranchGuard(f"in{number}", True),), (BranchGuard(f"in{number}", False),), inner, EventBlock())]
        )
    exits = [
        Branch(
            (BranchGuard(f"x{i}", True),), (BranchGuard(f"x{i}", False),), EventBlock([Jump("continue")]), EventBlock()
        )
        for i in range(12)
    ]
    last = event()
    found = sampled_paths(EventBlock([Loop(None, None, EventBlock([*exits, *inner.nodes, last]))]))
    assert any(deepest in path.events for path in found)
    assert any(last in path.events and deepest not in path.events for path in found)


def test_ways_that_are_merged_still_agree_with_later_questions():
    """A question asked twice is not forgotten when paths with the same events become one."""
    first = Branch((BranchGuard("flag", True),), (BranchGuard("flag", False),), EventBlock(), EventBlock())
    scaled, plain = event(), event()
    again = [
        Branch((BranchGuard("flag", True),), (BranchGuard("flag", False),), EventBlock([one]), EventBlock([other]))
        for one, other in ((scaled, plain), (scaled, plain))
    ]
    empty = [
        Branch((BranchGuard(f"x{i}", True),), (BranchGuard(f"x{i}", False),), EventBlock(), EventBlock())
        for i in range(12)
    ]
    found = paths_through(EventBlock([first, *empty, again[0], *empty, again[1]]))
    assert {tuple(map(id, path.events)) for path in found} == {(id(scaled),) * 2, (id(plain),) * 2}


def test_ways_with_the_same_events_are_one_where_there_are_many():
    block = branches(20, same=False)
    for branch in block.nodes:
        branch.then.nodes, branch.orelse.nodes = [], []
    assert 1 <= len(paths_through(block)) <= MOST_PATHS


guards = st.builds(BranchGuard, st.sampled_from("abcd"), st.booleans())
jumps = st.sampled_from(["continue", "break", "return", "raise"])


def opposite(guard):
    return BranchGuard(guard.text, not guard.holds)


blocks = st.recursive(
    st.lists(st.builds(event), max_size=3).map(EventBlock),
    lambda inner: st.lists(
        st.one_of(
            st.builds(event),
            jumps.map(Jump),
            st.builds(lambda g, a, b: Branch((g,), (opposite(g),), a, b), guards, inner, inner),
            inner.map(lambda block: Loop(None, None, block)),
            inner.map(lambda block: FollowedCall(None, block)),
        ),
        max_size=4,
    ).map(EventBlock),
    max_leaves=12,
)


@given(blocks)
def test_every_way_is_a_part_of_the_source_in_its_order(block):
    places = {id(one): number for number, one in enumerate(events_in(block))}
    for path in paths_through(block) or ():
        order = [places[id(one)] for one in path.events]
        assert all(a < b for a, b in pairwise(order))


def walk(block, answers):
    """An oracle: run the block with the answers given; the events, and the jump that ended it."""
    events = []
    for node in block.nodes:
        ended = None
        if isinstance(node, SourceEvent):
            events.append(node)
        elif isinstance(node, Jump):
            ended = node.kind
        elif isinstance(node, Branch):
            (guard,) = node.then_guards
            inner, ended = walk(node.then if answers[guard.text] == guard.holds else node.orelse, answers)
            events += inner
        else:
            inner, ended = walk(node.block, answers)
            events += inner
            ended = None if ended in (("continue", "break") if isinstance(node, Loop) else ("return",)) else ended
        if ended is not None:
            return events, ended
    return events, None


@given(blocks, st.fixed_dictionaries({name: st.booleans() for name in "abcd"}))
def test_every_run_is_one_of_the_ways_and_agrees_with_what_was_decided(block, answers):
    events, ended = walk(block, answers)
    if ended == "raise":
        return
    found = paths_through(block)
    assert found is not None
    same = [path for path in found if list(map(id, path.events)) == list(map(id, events))]
    assert any(all(answers[name] == held for name, held in path.decided.items()) for path in same)


@given(blocks)
def test_a_sample_is_some_of_the_ways_and_has_every_event_of_them(block):
    every = {(path.ended, *map(id, path.events)) for path in paths_through(block)}
    some = {(path.ended, *map(id, path.events)) for path in sampled_paths(block)}
    assert some <= every
    assert {one for path in some for one in path[1:]} == {one for path in every for one in path[1:]}


@given(blocks)
def test_no_two_ways_give_the_same_answers(block):
    found = paths_through(block) or []
    decided = [frozenset(path.decided.items()) for path in found]
    for number, first in enumerate(decided):
        for second in decided[number + 1 :]:
            assert any((name, not held) in second for name, held in first), "two ways that one run could take"


@pytest.mark.parametrize("kind", ["continue", "break"])
def test_a_jump_out_of_a_loop_goes_on_after_it(kind):
    first, last = event(), event()
    (path,) = paths_through(EventBlock([Loop(None, None, EventBlock([first, Jump(kind), event()])), last]))
    assert path.events == [first, last]
    assert path.ended is None
