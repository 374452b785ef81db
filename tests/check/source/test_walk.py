"""A function followed from its first statement to its last: contexts, calls that are followed, calls that are not."""

import ast

import pytest

from .reading import asked, code_of, kinds


def contexts_of(text, **others):
    return [context for context, _ in asked(code_of(text, **others))]


def function(*lines, head="def main(loss, opt, scaler, model, flag, xs):"):
    return "import torch\n" + "\n    ".join((head, *lines, "scaler.step(opt)")) + "\n"


@pytest.mark.parametrize(
    ("lines", "on"),
    [
        (("ask(1)",), False),
        (("with torch.autocast('cuda'):", "    ask(1)"), True),
        (("with torch.no_grad(), torch.autocast('cuda'):", "    ask(1)"), True),
        (("with torch.autocast('cuda'):", "    pass", "ask(1)"), False),
        (("with torch.autocast('cuda'):", "    with torch.autocast('cuda', enabled=False):", "        ask(1)"), False),
        (("with torch.autocast('cuda', enabled=False):", "    with torch.autocast('cuda'):", "        ask(1)"), True),
        (("with torch.autocast('cuda', enabled=flag):", "    ask(1)"), True),
    ],
)
def test_the_innermost_autocast_decides(lines, on):
    (context,) = contexts_of(function(*lines))
    assert context.in_autocast is on


@pytest.mark.parametrize(
    ("decorator", "autocast", "no_grad"),
    [
        ("@torch.autocast('cuda')", True, False),
        ("@torch.no_grad()", False, True),
        ("@torch.inference_mode()", False, True),
        ("@functools.cache", False, False),
    ],
)
def test_decorators_are_contexts(decorator, autocast, no_grad):
    (context,) = contexts_of(function("ask(1)", head=f"{decorator}\ndef main(opt, scaler):"))
    assert (context.in_autocast, context.no_grad) == (autocast, no_grad)


def test_a_decorator_holds_for_a_function_that_is_called():
    text = """
        import torch

        def main(model, opt, scaler, x):
            forward(model, x)
            scaler.step(opt)

        @torch.autocast("cuda")
        def forward(model, x):
            ask(1)
            return model(x).backward()
        """
    (context,) = contexts_of(text)
    assert context.in_autocast


def test_the_context_of_the_caller_holds_in_what_it_calls():
    text = """
        import torch

        def main(model, opt, scaler, xs, flag):
            for x in xs:
                with torch.autocast("cuda"):
                    if flag:
                        loss = compute(model, x)
                scaler.scale(loss).backward()
                scaler.step(opt)

        def compute(model, x):
            ask(1)
            return model(x).backward()
        """
    (context,) = contexts_of(text)
    assert context.in_autocast
    assert len(context.loops) == 1
    assert len(context.guards) == 1
    assert context.frame.caller.function.name == "main"


def test_a_helper_called_twice_is_seen_twice():
    text = """
        import torch

        def main(opt, scaler, a, b):
            with torch.autocast("cuda"):
                step(opt, scaler, a)
            step(opt, scaler, b)

        def step(opt, scaler, x):
            ask(x)
            scaler.step(opt)
        """
    assert [context.in_autocast for context in contexts_of(text)] == [True, False]


def test_after_an_early_continue_its_opposite_is_known():
    text = function("for x in xs:", "    if not flag:", "        continue", "    ask(1)")
    (context,) = contexts_of(text)
    ((text, holds),) = ((guard.text, guard.holds) for guard in context.guards)
    assert text.endswith("flag)")
    assert holds


def test_set_grad_enabled_with_false_stops_gradients():
    (context,) = contexts_of(function("with torch.set_grad_enabled(False):", "    ask(1)"))
    assert context.no_grad
    (context,) = contexts_of(function("with torch.set_grad_enabled(flag):", "    ask(1)"))
    assert not context.no_grad


EVENTS = [
    ("loss.backward()", "backward"),
    ("torch.autograd.backward(loss)", "backward"),
    ("scaler.scale(loss).backward()", "scaled backward"),
    ("scaler.scale(loss / 2).backward(retain_graph=True)", "scaled backward"),
    ("scaler.unscale_(opt)", "unscale"),
    ("scaler.update()", "update"),
    ("opt.step()", "optimizer step"),
    ("self.optimizers['g'].step()", "optimizer step"),
    ("lr_scheduler.step()", "scheduler step"),
    ("opt.zero_grad()", "zero grad"),
    ("model.zero_grad(set_to_none=True)", "zero grad"),
    ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1)", "clip"),
    ("model.weight.grad.clamp_(-1, 1)", "clip"),
    ("model.weight.grad.norm()", "grad read"),
    ("model(xs)", "forward"),
    ("elsewhere(scaler)", "opaque"),
    ("elsewhere(optimizer=opt)", "opaque"),
    ("accelerator.backward(loss)", "opaque"),
]


@pytest.mark.parametrize(("line", "kind"), EVENTS)
def test_a_call_is_an_event(line, kind):
    code = code_of(function(line))
    assert kinds(code.events) == [kind, "scaler step"]


@pytest.mark.parametrize(
    "line",
    [
        "print(scaler)",
        "isinstance(opt, list)",
        "torch.save(opt.state_dict(), 'f')",
        "self.timer.step()",
        "meter.update(loss)",
        "model.eval()",
        "loss.item()",
        "sched = StepLR(opt, 1)",
        "elsewhere(loss)",
        "lambda: loss.backward()",
    ],
)
def test_a_call_is_no_event(line):
    assert kinds(code_of(function(line)).events) == ["scaler step"]


def test_a_scaled_loss_is_remembered_by_its_name():
    code = code_of(function("loss = scaler.scale(loss)", "loss = loss / 2", "loss.backward()"))
    assert kinds(code.events) == ["scaled backward", "scaler step"]


def test_a_name_that_is_assigned_anew_forgets_its_scale():
    code = code_of(function("loss = scaler.scale(loss)", "loss = model(xs)", "loss.backward()"))
    assert kinds(code.events) == ["forward", "backward", "scaler step"]


def test_events_name_their_objects():
    code = code_of(function("scaler.scale(loss).backward()", "scaler.unscale_(opt)"))
    backward, unscale, step = code.events
    assert backward.key == unscale.key == step.key
    assert unscale.other == step.other
    assert ast.unparse(backward.value) == "loss"
    assert [event.line for event in code.events] == [3, 4, 5]


def test_a_wrapper_that_is_called_is_followed():
    code = code_of(
        """
        import torch

        class NativeScaler:
            def __init__(self):
                self._scaler = torch.amp.GradScaler("cuda")

            def __call__(self, loss, optimizer):
                self._scaler.scale(loss).backward()
                self._scaler.step(optimizer)
                self._scaler.update()

        def main(model, opt, xs):
            loss_scaler = NativeScaler()
            for x in xs:
                loss_scaler(model(x), opt)
        """
    )
    (region,) = code.regions
    assert kinds(region.events) == ["forward", "scaled backward", "scaler step", "update"]


def test_a_closure_given_to_the_step_is_followed():
    code = code_of(
        """
        def main(model, opt, scaler, x):
            def closure():
                opt.zero_grad()
                loss = model(x)
                loss.backward()
                return loss
            opt.step(closure)
        """
    )
    assert "backward" in kinds(code.regions[0].events)


def test_recursion_is_not_followed_for_ever():
    code = code_of(
        """
        def main(loss, opt, scaler):
            scaler.step(opt)
            other(loss, opt, scaler)

        def other(loss, opt, scaler):
            scaler.update()
            main(loss, opt, scaler)
        """
    )
    assert set(kinds(code.events)) == {"scaler step", "update"}


def test_a_function_that_another_calls_is_no_start_of_its_own():
    code = code_of(
        """
        def main(opt, scaler):
            step(opt, scaler)

        def step(opt, scaler):
            scaler.step(opt)
        """
    )
    assert [trace.frame.function.name for trace in code.traces if list(trace.events())] == ["main"]
    assert len(code.events) == 1


def test_a_step_in_another_given_file_is_followed():
    main = """
        from torch.amp import GradScaler
        from engine import apply

        def main(model, opt, xs):
            scaler = GradScaler("cuda")
            for x in xs:
                scaler.scale(model(x)).backward()
                apply(opt, scaler)
        """
    engine = "def apply(optimizer, scaler):\n    scaler.step(optimizer)\n    scaler.update()\n"
    code = code_of(main, engine=engine)
    (region,) = code.regions
    assert kinds(region.events) == ["forward", "scaled backward", "scaler step", "update"]
    assert {event.place.file for event in region.events} == {"script.py", "engine.py"}
    # And from the other side: the helper is seen as it is called.
    other = code.project.code("engine.py")
    assert kinds(other.regions[0].events) == ["forward", "scaled backward", "scaler step", "update"]


def test_a_helper_out_of_sight_is_not():
    main = (
        "from engine import apply\ndef main(x, opt, scaler):\n    scaler.scale(x).backward()\n    apply(opt, scaler)\n"
    )
    assert kinds(code_of(main).events) == ["scaled backward", "opaque"]
