"""``ampwise replay``: a saved step is run again, and only by code of the user's own."""

import collections
import hashlib
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import ampwise
from ampwise.cli import main
from ampwise.errors import BadInput
from ampwise.trace.capsule import CapsuleContents, write
from ampwise.train.precision.policy import Policy
from ampwise.train.random_state import plain_random_state

CPU = torch.device("cpu")

SCRIPT = """
import torch
from os import system
from torch.nn import functional as F

print("a script that prints")

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = torch.nn.Linear(width, width, bias=False)
        self.norm = torch.nn.BatchNorm1d(width)
        self.drop = torch.nn.Dropout(0.5)

def make(width=4, times=1.0):
    model = Net(width)
    def loss_fn(x, y):
        output = model.body(x)
        return F.mse_loss(model.drop(model.norm(output)) * times, y)
    return model, loss_fn

def make_none(): return None
def make_five(): return 1, 2, 3, 4, 5
def make_text(): return "model", print
def make_half(): return torch.nn.Linear(1, 1), (1, 2), "loss"
def make_wide(width): return make(width + 1)
def make_other(width): return torch.nn.Linear(width, width), print
def make_double(width):
    model, loss_fn = make(width)
    return model.double(), loss_fn
def make_lazy(width):
    model, loss_fn = make(width)
    model.body = torch.nn.LazyLinear(width, bias=False)
    return model, loss_fn
def make_failing(width): raise RuntimeError("no data\\x1b[2J here.")
def make_exiting(width): raise SystemExit(3)
def make_broken(width):
    model, _ = make(width)
    return model, lambda x, y: model.nothing(x)
def make_each(width):
    model, loss_fn = make(width)
    return model, lambda x, y: model.body(x)
def make_alone(width):
    model, loss_fn = make(width)
    model.forward = lambda x, y: model.body(x)
    return model
def make_autocasting(width):
    model, loss_fn = make(width)
    def autocasting(x, y):
        with torch.autocast("cpu", torch.float16):
            return loss_fn(x, y)
    return model, autocasting
def make_plain(width):
    model, loss_fn = make(width)
    return model, lambda x, y: loss_fn(x, y).item()
"""


def line_of(text):
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if text in line)


GUILTY = line_of("model.body(x)")


class Net(torch.nn.Module):
    """As in SCRIPT."""

    def __init__(self, width=4):
        super().__init__()
        self.body = torch.nn.Linear(width, width, bias=False)
        self.norm = torch.nn.BatchNorm1d(width)
        self.drop = torch.nn.Dropout(0.5)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a script, and Python as it was afterwards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def saved(x, model=None, *, weights=True, **changes):
    """A capsule in capsules/."""
    model = model or Net()
    facts = {
        "args": (x, torch.zeros(len(x), 4)),
        "random": plain_random_state(CPU),
        "weights": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
        "precision": "fp16",
        "scale": 1024.0,
        "step": 12,
        "loss": float("nan"),
        "build": "train:make",
        "build_args": {"width": 4},
    }
    return str(write("capsules", CapsuleContents(**{**facts, **changes}), weights))


def overflowing():
    model = Net()
    torch.nn.init.constant_(model.body.weight, 300.0)
    return torch.full((3, 4), 300.0), model  # 4 · 300 · 300 is more than FP16 holds


MAKE = "train:make"


def replay(capsys, path, *words, make=MAKE):
    code = main(["replay", path, *([] if make is None else [make]), *words])
    out = capsys.readouterr()
    return code, out.out, out.err


def refused(capsys, path, *words, make=MAKE):
    """The one line of an error."""
    code, out, err = replay(capsys, path, *words, make=make)
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("ampwise: error: ")
    assert last.isprintable()
    return last


# What it finds


def test_the_finding_is_that_of_the_step(here, capsys):
    code, out, err = replay(capsys, saved(*overflowing()))
    assert code == 1
    assert "half-overflow" in out
    assert f"train.py:{GUILTY} body at step 12" in out
    assert "a script that prints" not in out
    assert "ampwise: step 12 in fp16 on cpu, loss nan" in err
    assert "ampwise: calling make(width=4) from train, with the capsule's arguments\n" in err


def test_in_another_precision_it_is_finite(here, capsys):
    code, out, _ = replay(capsys, saved(*overflowing()), "--precision", "fp32")
    assert code == 0
    assert out.startswith("finite in fp32 on cpu: the loss is ")
    assert out.endswith(", and all 3 gradients are finite.\n")


def test_as_json(here, capsys):
    path = saved(*overflowing())
    code, out, _ = replay(capsys, path, "--json")
    (finding,) = json.loads(out)
    assert (code, finding["name"], finding["location"]["row"]) == (1, "half-overflow", GUILTY)
    code, out, err = replay(capsys, path, "--json", "--precision", "bf16")
    assert (code, json.loads(out)) == (0, [])
    assert "finite in bf16 on cpu" in err


def test_weights_buffers_and_random_numbers_are_the_steps_own(here, capsys):
    torch.manual_seed(5)
    x, model = torch.randn(6, 4), Net()
    model.norm.running_mean.fill_(7.0)
    state = plain_random_state(CPU)
    loss = F.mse_loss(model.drop(model.norm(model.body(x))) * 0.5, torch.zeros(6, 4)).item()
    model.norm.running_mean.fill_(7.0)
    path = saved(x, model, random=state, precision="fp32", scale=1.0, build_args={"width": 4, "times": 0.5})
    torch.manual_seed(99)
    code, out, _ = replay(capsys, path)
    assert code == 0
    assert f"the loss is {loss:.6g}, " in out
    assert "The saved step was not: it depends on something that a capsule does not hold." in out


def test_modules_that_evaluated_evaluate_again(here, capsys):
    x, model = torch.randn(6, 4), Net()
    model.norm.running_mean.fill_(7.0)
    loss = F.mse_loss(F.batch_norm(model.body(x), torch.full((4,), 7.0), torch.ones(4)), torch.zeros(6, 4)).item()
    code, out, _ = replay(capsys, saved(x, model, precision="fp32", evaluating=["norm", "drop"]))
    assert code == 0
    assert f"the loss is {loss:.6g}, " in out


def test_only_the_loss_scale_was_too_high(here, capsys):
    code, out, _ = replay(capsys, saved(torch.randn(6, 4), scale=2.0**40, loss=1.0))
    assert code == 0
    assert "Multiplied by the loss scale of 1.09951e+12, 3 of them overflow; a scaler then lowers" in out


def test_the_policy_holds(here, capsys):
    x, model = overflowing()
    path = saved(x, model, policy=Policy("fp16").keep("fp32", "body").as_dict())
    code, out, _ = replay(capsys, path)
    assert (code, out.partition(":")[0]) == (0, "finite in fp16 on cpu")
    assert "unknown module 'gone'" in refused(
        capsys, saved(x, model, policy=Policy("fp16").keep("fp32", "gone").as_dict())
    )


def test_without_weights_those_of_the_model_are_used(here, capsys):
    x, _ = overflowing()
    code, out, err = replay(capsys, saved(x.fill_(float("nan")), weights=False))
    assert code == 1
    assert "bad-batch" in out
    assert "without weights" in err
    assert "The capsule has no weights: the replay uses those that make() made." in out
    code, out, _ = replay(capsys, saved(torch.ones(3, 4), weights=False))
    assert (code, out.startswith("finite in fp16 on cpu: the loss is ")) == (0, True)
    assert out.endswith(" gradients are finite. The capsule has no weights: the replay uses those that make() made.\n")


def test_the_model_alone_will_do(here, capsys):
    code, out, _ = replay(capsys, saved(*overflowing()), make="train:make_alone")
    assert code == 1
    assert "half-overflow" in out
    assert "There is no loss function: the backward pass starts at the sum of the model's outputs." in out


def test_of_the_model_alone_the_sum_of_the_outputs_is_reported(here, capsys):
    path = saved(*overflowing())
    _, out, _ = replay(capsys, path, "--precision", "fp32", make="train:make_alone")
    assert out.startswith("finite in fp32 on cpu: the sum of the outputs is 4.32e+06, and all 1 gradients are finite.")
    assert "loss" not in out


def test_another_precision_holds_for_autocast_in_the_model_too(here, capsys):
    path = saved(*overflowing(), precision="", scale=1.0)  # there was no autocast around the model
    make = "train:make_autocasting"
    code, out, err = replay(capsys, path, make=make)
    assert (code, "half-overflow" in out, "ampwise: step 12 on cpu" in err) == (1, True, True)
    for precision in ("bf16", "fp32"):
        code, out, _ = replay(capsys, path, "--precision", precision, make=make)
        assert (code, out.partition(":")[0]) == (0, f"finite in {precision} on cpu")
        assert "it depends on something" not in out


def test_as_a_command(here, warm):
    path = saved(*overflowing())
    done = warm.run("-m", "ampwise", "replay", path, MAKE, "--output-format", "concise", cwd=here)
    assert done.returncode == 1
    assert "AMP" in done.stdout


def test_the_make_function_of_the_other_commands_will_do(here, capsys):
    """It returns a batch, too; a capsule with another number of arguments holds those of the model."""
    code = "\ndef make_case(width=4):\n    model, loss_fn = make(width)\n    return model, (None, None), loss_fn\n"
    (here / "train.py").write_text(f"{SCRIPT}{code}")
    assert replay(capsys, saved(*overflowing()), make="train.py:make_case")[0] == 1
    code = "\ndef make_case(width=4): return make_alone(width), (1, 2, 3), print\n"
    (here / "train.py").write_text(f"{SCRIPT}{code}")
    assert "half-overflow" in replay(capsys, saved(*overflowing()), make="train.py:make_case")[1]


# Whose code is run


def test_nothing_is_called_only_because_a_capsule_names_it(here, trap, capsys):
    (here / "their's.py").write_text((trap / "trap.py").read_text())
    path = saved(*overflowing(), build="their's.py:make", build_args={"width": 4, "times": 1.0})
    said = refused(capsys, path, "--precision", "fp32", make=None)
    assert said == (
        "ampwise: error: the capsule suggests calling make(width=4, times=1.0) from their's.py, which needs your "
        "consent. To call it, run: ampwise replay capsules/step-000012 "
        """'their'"'"'s.py:make' --precision fp32"""
    )


def test_what_is_said_to_type_works(here, capsys):
    said = refused(capsys, saved(*overflowing()), make=None)
    words = shlex.split(said.partition("run: ")[2])
    assert words == ["ampwise", "replay", "capsules/step-000012", "train:make"]
    assert main(words[1:]) == 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("answer", "code"), [("y\n", 1), ("YES\n", 1), ("\n", 2), ("", 2), ("n\n", 2), ("yellow\n", 2)]
)
def test_in_a_terminal_one_is_asked(here, capsys, monkeypatch, answer, code):
    path = saved(*overflowing(), build_args={"width": 4})
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert main(["replay", path]) == code
    err = sys.stderr.getvalue()
    assert "ampwise: the capsule suggests calling make(width=4) from train.py. Call it? [y/N]\n" in err
    assert ("ampwise: calling make(width=4) from train.py" in err) == (code == 1)
    assert ("train" in sys.modules) == (code == 1)


def test_without_a_terminal_to_read_the_question_an_answer_counts_for_nothing(here, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))  # and standard error is a file
    assert "which needs your consent" in refused(capsys, saved(*overflowing()), make=None)


def test_the_question_shows_all_arguments_and_no_control_characters(here, capsys, monkeypatch):
    hidden = {"width": 4, "padding": "\x1b[2K\r" + "x" * 5000, "times": 1e9}
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    monkeypatch.setattr(sys, "stderr", Terminal())
    main(["replay", saved(*overflowing(), build_args=hidden)])
    err = sys.stderr.getvalue()
    assert "times=1000000000.0) from train.py. Call it?" in err
    assert "\x1b" not in err
    assert "\r" not in err


def test_functions_of_packages_and_files_in_the_folder_are_suggested(here, capsys):
    (here / "own" / "deep").mkdir(parents=True)
    for folder in (here / "own", here / "own" / "deep"):
        (folder / "__init__.py").write_text("")
    (here / "own" / "deep" / "net.py").write_text(SCRIPT)
    for build in ("own.deep.net:make", "own/deep/net.py:make"):
        path = saved(*overflowing(), build=build)
        said = refused(capsys, path, make=None)
        assert "make(width=4) from own/deep/net.py, " in said
        assert said.endswith((f"step-000012 {build}", f"step-000012-2 {build}"))
        assert replay(capsys, path, make=build)[0] == 1


def test_the_users_choice_goes_first_and_may_be_anywhere(here, capsys, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "their_script.py"
    elsewhere.write_text(SCRIPT)
    path = saved(*overflowing(), build=None)
    assert replay(capsys, path, make=f"{elsewhere}:make")[0] == 1
    code, _, err = replay(capsys, path, make="train:make")
    assert code == 1
    assert "ampwise: calling make(width=4) from train, with the capsule's arguments\n" in err


def test_nothing_in_the_capsules_folder_is_imported(here, trap, capsys, monkeypatch):
    """Whoever names it: the capsule, the user, the user's own file, or the folder that one is in."""
    evil = (trap / "trap.py").read_text()
    path = Path(saved(*overflowing(), build="capsules/step-000012/evil.py:make"))
    for name in ("evil.py", "__init__.py", "helper.py"):
        (path / name).write_text(evil)
    inside = "the file is inside the capsule's folder, and no code from there is run"
    assert inside in refused(capsys, str(path), make=None)
    assert inside in refused(capsys, str(path), make=f"{path}/evil.py:make")
    (here / "linked.py").symlink_to(path / "evil.py")
    assert inside in refused(capsys, str(path), make="linked.py:make")

    package = path.rename(here / "their_yaml")  # as a package that the user's file wants
    (here / "wants.py").write_text(f"import their_yaml\n{SCRIPT}")
    nothing = "nothing is imported from there"
    assert nothing in refused(capsys, str(package), make="wants:make")
    assert nothing in refused(capsys, str(package), make="their_yaml.evil:make")
    (here / "wants.py").write_text(f"import helper\n{SCRIPT}")
    monkeypatch.chdir(package)  # where Python would find modules first
    for module in ("evil", "helper"):
        assert nothing in refused(capsys, ".", make=f"{module}:make")
    monkeypatch.syspath_prepend(package)
    assert nothing in refused(capsys, ".", make=f"{here}/wants.py:make")
    assert replay(capsys, ".", make=f"{here}/train.py:make")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"width": torch.ones(2)}, "build_args['width'] is a Tensor. build_args must be numbers, strings, booleans"),
        ({"sizes": [1, {"a": torch.finfo}]}, "build_args['sizes'][1]['a'] is a type."),
        ({"config": collections.OrderedDict(a=1)}, "build_args['config'] is a OrderedDict."),
        ({"a b": 1}, "build_args has 'a b', which is not a valid argument name."),
        ({"name": "x" * 10_001}, "build_args take 10,0"),
    ],
)
def test_build_args_are_plain_data_that_one_can_read(here, capsys, arguments, said):
    with pytest.raises(BadInput, match=re.escape(said)):
        saved(*overflowing(), build_args=arguments)
    with pytest.raises(BadInput, match=re.escape(said)):
        ampwise.Capsules("capsules", make="train:make", arguments=arguments)


def test_build_args_of_a_forged_capsule(here, capsys):
    path = Path(saved(*overflowing(), build_args={"width": 4}))
    for forged, said in (
        ({"width": {"ref": {"name": "argument 1"}}}, "build_args['width'] is a Tensor."),
        ({"width": {"object": ["dict", {"a": 1}]}}, "build_args['width'] is a AttributeDict."),
        ({"width": {"named": {"a": 1}}}, "build_args['width'] is a Named."),
        ({"width": "x" * 20_000}, "build_args take 20,0"),
    ):
        facts = json.loads((path / "capsule.json").read_text()) | {"build_args": forged}
        (path / "capsule.json").write_text(json.dumps(facts))
        digest = hashlib.sha256((path / "capsule.json").read_bytes()).hexdigest()
        (path / "capsule.sha256").write_text(f"{digest}  capsule.json\n")
        assert f"capsule.json is damaged: {said}" in refused(capsys, str(path))
    assert "train" not in sys.modules


@pytest.fixture
def trap(here, tmp_path_factory):
    """A script elsewhere that leaves a mark when it is run."""
    folder = tmp_path_factory.mktemp("elsewhere")
    mark = folder / "was_run"
    text = f"open({str(mark)!r}, 'w').close()\n{SCRIPT}"
    (folder / "trap.py").write_text(text)
    yield folder
    assert not mark.exists()


def test_nothing_outside_of_the_folder_is_run(here, trap, capsys, monkeypatch):
    monkeypatch.syspath_prepend(trap)
    (here / "linked.py").symlink_to(trap / "trap.py")
    (here / "folder").symlink_to(trap)
    installed = here / ".venv" / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "trap.py").write_text((trap / "trap.py").read_text())
    (here / "apart").mkdir()  # no package: Python might find another of that name
    (here / "apart" / "trap.py").write_text((trap / "trap.py").read_text())
    for build in (
        "trap:make",
        "linked:make",
        "linked.py:make",
        "folder.trap:make",
        "folder/trap.py:make",
        f"{trap}/trap.py:make",
        f"{os.path.relpath(trap, here)}/trap.py:make",
        ".venv/lib/site-packages/trap.py:make",
        "apart.trap:make",
        "os:system",
        "subprocess:run",
        "torch.hub:load",
    ):
        said = refused(
            capsys, saved(*overflowing(), build=build, build_args={"command": "true", "args": ["true"]}), make=None
        )
        assert (
            f"the capsule names the function {build!r}, which is not in a file of yours in {here}, so it is not run"
            in said
        )


def test_a_folder_of_what_is_installed_is_not_the_users(here, capsys, monkeypatch):
    path = Path(saved(*overflowing(), build="timeit:main")).resolve()
    monkeypatch.chdir(Path(os.__file__).parent)
    assert "which is not in a file of yours" in refused(capsys, str(path), make=None)


def test_only_functions_that_the_file_itself_defines(here, capsys):
    path = saved(*overflowing(), build="train:system", build_args={"command": "echo hacked > hacked"})
    assert "train.py does not define it" in refused(capsys, path, make=None)
    assert not (here / "hacked").exists()
    assert "train" not in sys.modules


def test_a_module_of_another_place_is_not_taken_for_it(here, capsys, monkeypatch):
    (here / "json.py").write_text(SCRIPT)  # Python has loaded another
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", Terminal())
        assert main(["replay", saved(*overflowing(), build="json:make")]) == 2
        said = sys.stderr.getvalue()
    assert (
        "json is another module, not the file in the current folder, so it is not used. Name the file: json.py:make"
        in said
    )
    assert replay(capsys, saved(*overflowing()), make="json.py:make")[0] == 1


def test_who_builds_has_to_be_said(here, capsys):
    said = refused(capsys, saved(*overflowing(), build=None), make=None)
    assert said.endswith(
        "the capsule does not say which function makes its model. Add MAKE: train.py:make or train:make, a function of "
        "yours; `ampwise init train.py` writes one."
    )
    for wrong in ("train", "train.py", "train:make()", "tr-ain:make"):
        assert f"{wrong!r}: expected train.py:make or train:make" in refused(
            capsys, saved(torch.ones(2, 4)), make=wrong
        )


def test_python_is_left_as_it_was(here, capsys):
    before = list(sys.path)
    replay(capsys, saved(*overflowing()))
    assert sys.path == before


# What goes wrong


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("gone", "train.py has no function 'gone'."),
        ("make_none", "make_none() returned None; expected `return model, batch, loss_fn`, `return model, loss_fn` or"),
        ("make_five", "make_five() returned a tuple of 5; expected `return model, batch, loss_fn`"),
        ("make_text", "the model that make_text() returned is a str; expected `return"),
        ("make_half", "the loss_fn that make_half() returned is a str; expected `return"),
        (
            "make_failing",
            rf"make_failing(width=4) failed: RuntimeError: no data\x1b[2J here (train.py:{line_of('no data')}).",
        ),
        ("make_exiting", f"make_exiting(width=4) failed: SystemExit: 3 (train.py:{line_of('SystemExit')})."),
        ("make_broken", "the step cannot be run again: AttributeError: 'Net' object has no attribute 'nothing'"),
        (
            "make_plain",
            "the loss function returned float; expected the loss, a scalar tensor that requires gradients.",
        ),
        ("make_each", "the loss function returned a tensor of shape (3, 4); expected the loss, a scalar tensor"),
        (
            "make_wide",
            "the weight 'body.weight' is float32 (5, 5) in the model and float32 (4, 4) in the capsule. Build",
        ),
        (
            "make_double",
            "the weight 'body.weight' is float64 (4, 4) in the model and float32 (4, 4) in the capsule. Build",
        ),
        ("make_lazy", "the weight 'body.weight' is not initialized in the model that was built"),
        (
            "make_other",
            "the capsule's weights do not match the model: the model has no 'body.weight', 'norm.weight', "
            "'norm.bias'; the capsule has no 'weight', 'bias'. Build the same model.",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_the_builder_does_wrong_is_reported_in_a_line(here, capsys, function, said):
    needs_no_width = function in ("make_none", "make_five", "make_text", "make_half")
    path = saved(*overflowing(), build_args={} if needs_no_width else {"width": 4})
    assert said in refused(capsys, path, make=f"train.py:{function}")


def test_scripts_that_cannot_be_loaded(here, capsys):
    path = saved(*overflowing())
    (here / "broken.py").write_text("def make(:\n")
    (here / "needy.py").write_text("import a_module_that_is_not_there\ndef make(): ...\n")
    assert "broken cannot be loaded: SyntaxError" in refused(capsys, path, make="broken:make")
    assert "needy cannot be loaded: ModuleNotFoundError: No module named 'a_module_that_is_not_there' (needy.py:1)" in (
        refused(capsys, path, make="needy:make")
    )
    assert "there is no module 'gone'" in refused(capsys, path, make="gone:make")
    assert "there is no file gone.py" in refused(capsys, path, make="gone.py:make")


def test_precisions_and_devices_that_there_are_not(here, capsys):
    path = saved(*overflowing())
    said = refused(capsys, path, "--precision", "fp61")
    assert "unknown precision 'fp61'. Did you mean fp16" in said
    assert "--precision takes fp32, tf32, fp16, bf16, emulate:mxfp8." in said
    said = refused(capsys, path, "--precision", "fp8")
    assert "--precision fp8: it needs special layers or weights. A replay runs in fp32, tf32" in said
    assert "unknown format 'e4m4'" in refused(capsys, path, "--precision", "emulate:e4m4")
    assert "--precision tf32: " in refused(capsys, path, "--precision", "tf32")
    assert "Give --precision: fp32 or fp16 or bf16" in refused(capsys, saved(*overflowing(), precision="tf32"))
    assert r"unknown precision 'fp\x1b[2J'" in refused(capsys, saved(*overflowing(), precision="fp\x1b[2J"))
    assert "unknown device 'nowhere'" in refused(capsys, path, "--device", "nowhere")
    if not torch.cuda.is_available():
        assert "--device cuda: not available here" in refused(capsys, path, "--device", "cuda")
        code, _, err = replay(capsys, saved(*overflowing(), device="cuda"))
        assert (code, "fp16 on cuda" in err) == (1, True)


def test_a_capsule_that_was_changed_is_not_run(here, capsys):
    path = saved(*overflowing())
    file = Path(path) / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "weights.safetensors has the wrong checksum:" in refused(capsys, path)
    assert "train" not in sys.modules
    assert "there is no such folder" in refused(capsys, "gone")


def test_a_state_of_random_numbers_that_is_none(here, capsys):
    path = saved(*overflowing(), random={"torch": torch.zeros(3)})
    assert "the step cannot be run again: " in refused(capsys, path)


def test_the_help_shows_how_to_write_a_builder(capsys):
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    out = capsys.readouterr().out
    assert "return model, loss_fn" in out
    assert "ampwise init train.py" in out
