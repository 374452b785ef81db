"""The examples to begin with: each run small, and held to what it claims."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
BEGINNERS = [name for name in SCRIPTS if "LESSON = " in (EXAMPLES / name).read_text(encoding="utf-8")]


@pytest.fixture(autouse=True)
def alone():
    """On one thread, since the tests around it use the others; and what a script draws is nobody else's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def load(monkeypatch):
    """Load a script as a module that is known by its name, which dataclasses ask for."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"example_{Path(name).stem}", EXAMPLES / name)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def run(load, capfd):
    """Run a script in this process: what it prints, and what it says besides."""

    def run(name, *arguments):
        script = load(name)
        assert not script.main([str(argument) for argument in arguments])
        said = capfd.readouterr()
        assert said.out.endswith(f"{script.LESSON}\n")
        return said

    return run


def numbers(text, pattern):
    """Those that a pattern catches, of the one line that it is on."""
    found = re.findall(pattern, text, re.MULTILINE)
    assert len(found) == 1, (pattern, text)
    return [float(each) for each in (found[0] if isinstance(found[0], tuple) else found)]


def test_a_classifier_learns_in_spite_of_a_broken_image(run):
    said = run("classifier.py", "--steps", 100, "--precision", "fp32")
    (right,) = numbers(said.out, r"fp32 on \w+: ([\d.]+)% of 512")
    applied, skipped = numbers(said.out, r"applied: (\d+), skipped: (\d+)\.")
    assert right > 90
    assert applied + skipped == 100
    assert skipped > 0
    assert "bad-batch: `images` was inf before the model: `tensors[0]` holds it already" in said.err


def test_what_a_skipped_step_of_the_classifier_leaves_alone(load):
    script = load("classifier.py")
    torch.manual_seed(0)
    model = script.Net().to("cpu")
    engine = script.train(model, "fp32", 60, torch.device("cpu"))
    assert engine.skipped_steps > 0
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    (schedule,) = engine.state_dict()["schedulers"]
    assert schedule["last_epoch"] == engine.applied_steps


def test_a_gpt_learns(run):
    said = run("gpt.py", "--steps", 24, "--width", 32, "--precision", "fp32")
    held_out = [float(line.split()[2]) for line in said.out.splitlines() if re.match(r" +\d+ ", line)]
    assert held_out[-1] < 2.9 < held_out[0]  # letters by their frequency alone: 2.96
    assert "logits float32, weights float32, Adam's moments float32" in said.out


def test_a_gpt_that_goes_on_from_its_checkpoint_is_the_unbroken_one(load, capfd, tmp_path):
    script, words = load("gpt.py"), "abcdefgh" * 100
    unbroken, first, second = (script.Training(words, 8, "fp32", steps=4) for _ in range(3))
    first.model.load_state_dict(unbroken.model.state_dict())
    start = torch.get_rng_state()
    unbroken.train(4)
    torch.set_rng_state(start)
    first.train(2)
    first.save(tmp_path / "gpt.pt")
    torch.manual_seed(7)  # which the checkpoint knows better
    second.load(tmp_path / "gpt.pt")
    second.train(4)
    assert "after 2 steps" in capfd.readouterr().out
    for one, other in zip(unbroken.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_accumulation_by_tokens_is_the_large_batch(run):
    said = run("seq2seq.py", "--steps", 25, "--precision", "fp32")
    (by_batches,) = numbers(said.out, r"over micro-batches +(\S+) away")
    (by_tokens,) = numbers(said.out, r"over tokens +(\S+) away")
    assert by_tokens < 1e-5 < 0.1 < by_batches
    (right,) = numbers(said.out, r"([\d.]+)% of the words")
    assert right > 70  # by chance: 8


@pytest.mark.nightly
def test_a_generator_finds_its_scale_while_the_discriminator_keeps_its_own(run):
    said = run("gan.py", "--steps", 120)
    before, after = numbers(said.out, r"points were ([\d.]+) off the ring, and are ([\d.]+) off it now")
    assert after < 0.6 * before
    discriminator, generator = numbers(said.out, r"skipped: (\d+) of the discriminator, (\d+) of the generator")
    assert generator >= 6 > discriminator  # from 2^24 to where FP16 can hold it
    assert "gives" not in said.err  # an overflow of scaled gradients is nothing to tell of


@pytest.mark.nightly
def test_a_contrastive_loss_fails_in_fp16_and_not_in_fp32(run):
    said = run("contrastive.py", "--steps", 60)
    skipped, found = numbers(said.out, r"^wrong +(\d+) +([\d.]+)% +inf$")
    assert skipped > 10
    none, all_found, off = numbers(said.out, r"^right +(\d+) +([\d.]+)% +(\S+)$")
    assert (none, off < 1e-5) == (0, True)
    assert all_found > 90 > found
    assert re.search(
        r"The first bad step of the wrong way: (half-overflow|unstable-loss) at \S+contrastive.py:\d+ at step \d+",
        said.out,
    )


def test_both_contrastive_losses_are_one_in_fp32(run):
    said = run("contrastive.py", "--steps", 10, "--precision", "fp32")
    wrong, right = (re.search(rf"^{way} +(\d+) +(\S+)", said.out, re.MULTILINE).groups() for way in ("wrong", "right"))
    assert wrong == right == ("0", right[1])


def test_a_custom_function_stops_loses_or_is_right(run):
    said = run("custom_function.py", "--steps", 60)
    assert re.search(r"^bare +stops in step 1: .*dtype", said.out, re.MULTILINE)
    (half_off, half), (right_off, right) = (
        numbers(said.out, rf"^{way} +distances off by up to ([\d.]+), ([\d.]+)%") for way in ("half", "right")
    )
    assert right_off < 0.1 < 1 < half_off
    assert right > 85
    assert right > half + 5


@pytest.mark.nightly
def test_two_heads_that_cancel_are_kept_in_fp32(run):
    said = run("relevance.py", "--steps", 40)
    wide, narrow, kept = (
        numbers(said.out, rf"^{way} +([\d.]+) +([\d.]+)% +([\d.]+)$")
        for way in ("all in fp32", "all in fp16", "fp16, heads in fp32")
    )
    assert wide[1] > 85
    assert narrow[0] > 1.2 * wide[0]
    assert kept[0] == pytest.approx(wide[0], rel=0.05)
    assert kept[2] < 0.1 < 1 < narrow[2]


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="about a device without FP8")
def test_fp8_is_emulated_where_there_is_none_and_learns_all_the_same(run):
    said = run("fp8.py", "--steps", 20)
    assert "has no FP8 tensor cores" in said.out
    assert "So it is emulated: emulate:e4m3." in said.out
    assert re.search(r"^stem .* fp32 +kept by 'stem'$", said.out, re.MULTILINE)
    rows = re.findall(r"^ +\d+ to +\d+ loss +([\d.]+) +([\d.]+)$", said.out, re.MULTILINE)
    losses = [[float(each) for each in row] for row in rows]
    assert losses[-1][1] < losses[0][1] - 0.3
    assert all(wide == pytest.approx(narrow, rel=0.05) for wide, narrow in losses)
    assert any(wide != narrow for wide, narrow in losses)


# Not the demo, which is written as most people write scripts.
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "broken_gpt.py"])
def test_help_says_how_to_run_it(load, capfd, monkeypatch, name):
    monkeypatch.syspath_prepend(EXAMPLES)  # as for a script that is run
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    script = load(name)
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 0
    said = capfd.readouterr().out
    assert script.__doc__.strip() in said
    assert re.search(rf"^    (python|ampwise \w+) examples/{name}", said, re.MULTILINE)
    assert ("--epochs" if name.startswith("guarded") else "--steps") in said
    assert name not in BEGINNERS or "--precision" in said


def test_every_script_is_in_the_readme_once():
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[(\w+\.py)\]\(\1\)[^|]* \|", readme, re.MULTILINE)) == SCRIPTS
    for folder in (path.parent.name for path in EXAMPLES.glob("*/README.md")):
        assert f"({folder}/README.md)" in readme
