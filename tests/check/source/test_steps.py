"""Training steps: where one begins and ends, and how things stand at each event on each way through it."""

import pytest

from .reading import code_of, kinds

PLAIN = """
    def main(model, opt, scaler, loader, n):
        for epoch in range(3):
            for x in loader:
                {step}
        scaler.state_dict()
    """


def regions_of(text):
    return code_of(text).regions


def region_of(text):
    (region,) = regions_of(text)
    return region


def loop_of(*lines):
    return PLAIN.format(step="\n                ".join(lines))


STEP = ("opt.zero_grad()", "scaler.scale(model(x)).backward()", "scaler.step(opt)", "scaler.update()")


def test_the_innermost_loop_with_a_backward_and_a_step_is_the_region():
    region = region_of(loop_of(*STEP))
    assert region.loop.node.target.id == "x"
    assert kinds(region.events) == ["zero grad", "forward", "scaled backward", "scaler step", "update"]


def test_micro_batches_in_a_loop_of_their_own_belong_to_the_step_around():
    region = region_of(
        """
        def main(model, opt, scaler, loader, n):
            for batch in loader:
                opt.zero_grad()
                for x in batch.chunk(n):
                    scaler.scale(model(x) / n).backward()
                scaler.step(opt)
                scaler.update()
        """
    )
    assert region.loop.node.target.id == "batch"
    assert {len(event.context.loops) for event in region.events} == {1, 2}


def test_without_a_loop_the_function_is_the_region():
    region = region_of("def main(loss, opt, scaler):\n    scaler.scale(loss).backward()\n    scaler.step(opt)\n")
    assert region.loop is None


def test_a_step_in_functions_that_a_loop_calls_is_seen_together():
    region = region_of(
        """
        def main(model, opt, scaler, loader):
            for x in loader:
                backward(model, scaler, x)
                apply(opt, scaler)

        def backward(model, scaler, x):
            scaler.scale(model(x)).backward()

        def apply(opt, scaler):
            scaler.step(opt)
            scaler.update()
        """
    )
    assert kinds(region.events) == ["forward", "scaled backward", "scaler step", "update"]


def test_two_trainings_are_two_regions():
    text = """
        def main(model, opt, scaler, loader, other):
            for x in loader:
                scaler.scale(model(x)).backward()
                scaler.step(opt)
            for x in other:
                model(x).backward()
                opt.step()
        """
    assert [kinds(region.events)[-1] for region in regions_of(text)] == ["scaler step", "optimizer step"]


def moments(region, kind):
    return [moment for _, found in region.visits(kind) for moment in found]


def test_gradients_are_scaled_from_the_backward_to_the_update():
    region = region_of(loop_of(*STEP, "torch.nn.utils.clip_grad_norm_(model.parameters(), 1)"))
    (step,), (update,), (clip,) = (moments(region, kind) for kind in ("scaler step", "update", "clip"))
    assert step.scaled
    assert update.scaled
    assert update.stepped
    assert not clip.scaled


def test_zero_grad_forgets_the_gradients():
    region = region_of(loop_of("scaler.scale(model(x)).backward()", "opt.zero_grad()", "scaler.step(opt)"))
    (step,) = moments(region, "scaler step")
    assert not step.scaled


def test_unscaled_is_remembered_until_the_update():
    region = region_of(loop_of(*STEP[:2], "scaler.unscale_(opt)", *STEP[2:], "scaler.unscale_(opt)"))
    (step,) = moments(region, "scaler step")
    first, last = moments(region, "unscale")
    assert len(step.unscaled) == 1
    assert not step.surely_scaled
    assert not first.unscaled
    assert not last.unscaled


def test_what_is_stepped_is_remembered_until_the_next_backward():
    region = region_of(loop_of(*STEP, "opt.step()", *STEP))
    (again,) = moments(region, "optimizer step")
    first, last = moments(region, "scaler step")
    assert list(again.stepped.values()) == [first.event]
    assert not last.stepped


def test_a_function_out_of_sight_with_the_scaler_makes_all_uncertain():
    region = region_of(loop_of(*STEP[:2], "elsewhere(scaler)", *STEP[2:]))
    (step,) = moments(region, "scaler step")
    assert step.opaque
    assert step.scaled
    assert not step.surely_scaled
    assert not region.hidden


@pytest.mark.parametrize(
    "line", ["accelerator.backward(model(x))", "opt.step(scaler=scaler)", "engine.backward(model(x))"]
)
def test_a_framework_hides_the_step(line):
    assert all(region.hidden for region in regions_of(loop_of(line, "scaler.step(opt)")))


def test_a_framework_in_one_branch_hides_only_that_branch():
    own = [f"    {line}" for line in STEP]
    (region,) = code_of(loop_of("if n:", "    engine.backward(model(x))", "else:", *own)).visible_regions
    assert not region.hidden
    assert [kinds(path.events) for path in region.paths] == [kinds(region_of(loop_of(*STEP)).events)]


def test_a_visit_has_one_moment_for_each_way():
    region = region_of(loop_of("if n:", "    scaler.scale(model(x)).backward()", "scaler.step(opt)", "scaler.update()"))
    ((step, found),) = region.visits("scaler step")
    assert {bool(moment.scaled) for moment in found} == {True, False}
    assert all(moment.event is step for moment in found)


def test_earlier_and_later_keep_their_order():
    region = region_of(loop_of(*STEP, *STEP))
    (first, second) = moments(region, "scaler step")
    assert kinds(first.later("scaler step", "update")) == ["update", "scaler step", "update"]
    assert next(second.earlier("scaler step")) is first.event


@pytest.mark.parametrize("test", ["(i + 1) % n == 0", "not (i + 1) % n", "(i + 1) % n == 0 or i == last"])
def test_the_boundary_of_an_accumulation(test):
    region = region_of(
        f"""
        def main(model, opt, scaler, loader, n, last, flag):
            if flag:
                for i, x in enumerate(loader):
                    scaler.scale(model(x) / n).backward()
                    if {test}:
                        scaler.step(opt)
                        scaler.update()
        """
    )
    backward = next(event for event in region.events if event.kind == "scaled backward")
    step = next(event for event in region.events if event.kind == "scaler step")
    assert region.own_guards(backward) == ()
    assert [guard.boundary for guard in region.own_guards(step)] == ["n"]


def test_of_too_many_ways_a_sample_is_judged():
    lines = [line for i in range(12) for line in (f"if x.flag{i}:", "    scaler.update()")]
    region = region_of(loop_of(*STEP, *lines))
    assert 0 < len(region.paths) < 200
    assert region.is_sampled
    assert len({event for path in region.paths for event in path.events if event.kind == "update"}) == 13
    assert len(region.visits("scaler step")) == 1


def test_what_scaled_the_loss_is_there_in_the_rest_of_the_step():
    region = region_of(loop_of(*STEP[:2], "if scaler is not None:", "    scaler.unscale_(opt)", *STEP[2:]))
    assert [kinds(path.events) for path in region.paths] == [
        ["zero grad", "forward", "scaled backward", "unscale", "scaler step", "update"]
    ]
