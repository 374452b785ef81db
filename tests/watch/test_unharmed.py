"""What must be the same with and without a watch, where it was once not."""

import contextlib
import copy
import io
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwise.watch.watch import Watch

SOURCE = Path(__file__).parents[2] / "src"


def bits(*tensors):
    return [tensor.detach().double().sum().item().hex() for tensor in tensors]


def both(script):
    """What a function gives, alone and watched."""
    torch.manual_seed(0)
    plain = script()
    torch.manual_seed(0)
    with Watch(every=1, timing=False, activations=False) as watch:
        watched = script()
    assert not watch.failures
    return plain, watched


def same(script):
    plain, watched = both(script)
    assert plain == watched
    return plain


def train(model, loss_of, steps=3, optimizer=torch.optim.SGD):
    optimizer = optimizer(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()
    return optimizer


def entry_points():
    """Everything of torch and Python that a watch replaces or adds to."""
    from torch.optim import lr_scheduler, optimizer
    from torch.utils.data import dataloader

    owners = [torch, torch.autograd, torch.cuda, torch.jit, torch.onnx, nn.utils, nn.utils.clip_grad, nn.Module]
    owners += [torch.optim.Optimizer, torch.amp.GradScaler, torch.autocast, lr_scheduler.LRScheduler]
    owners += [lr_scheduler.OneCycleLR, dataloader._BaseDataLoaderIter, torch.autograd.profiler.profile]
    hooks = [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
    return [dict(vars(owner)) for owner in owners] + [dict(each) for each in hooks]


@pytest.mark.parametrize("how", ["an end", "an exception", "a failure of ours"])
def test_everything_replaced_is_restored(how, monkeypatch):
    model = nn.Linear(2, 2)
    train(model, lambda: model(torch.ones(1, 2)).sum())  # whatever torch loads lazily is there
    before = entry_points()
    watch = Watch(every=1)
    if how == "a failure of ours":
        monkeypatch.setattr(watch.step_watch.gradients, "settle", lambda **options: 1 / 0)
    with contextlib.suppress(KeyError), watch:
        assert torch.autograd.backward._ampwise
        train(model, lambda: model(torch.ones(1, 2)).sum())
        if how == "an exception":
            raise KeyError
    assert bool(watch.failures) is (how == "a failure of ours")
    changed = [
        name for old, new in zip(before, entry_points(), strict=True) for name in old if old[name] is not new.get(name)
    ]
    assert not changed
    assert [len(old) for old in before] == [len(new) for new in entry_points()]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_sparse_gradients_stay_as_they_are():
    def script():
        rows = nn.Embedding(50, 8, sparse=True)
        train(rows, lambda: (rows(torch.randint(0, 5, (64,))) * torch.randn(64, 8)).sum())
        return rows.weight.grad.is_coalesced(), bits(rows.weight)

    assert same(script)[0] is False


def test_a_checkpointed_pass_runs_as_often():
    def script():
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

        def weighed(x):
            return model(x).mean() * torch.tensor(0.5)

        train(model, lambda: checkpoint(weighed, torch.randn(16, 4), use_reentrant=False))
        return int(model[1].num_batches_tracked), bits(model[1].running_mean)

    same(script)


def test_what_hooks_of_others_have_saved_is_not_asked_for():
    def script():
        kept, asked = {}, []

        def pack(tensor):
            kept[len(kept)] = tensor
            return len(kept) - 1

        def unpack(key):
            asked.append(key)
            return kept.pop(key)

        model = nn.Linear(4, 1)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = model(torch.ones(2, 4)).mean() * torch.tensor(3.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss.backward()
        optimizer.step()
        return sorted(asked)

    same(script)


def test_a_factor_by_hand_is_seen_and_leaves_the_gradient_alone():
    def script():
        model = nn.Linear(4, 1)
        loss = model(torch.ones(2, 4)).mean() * 1024
        loss.backward(retain_graph=True)
        loss.backward()
        return bits(model.weight.grad)

    same(script)


def test_a_model_without_parameters_to_ask_for_still_runs():
    class Shy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def parameters(self, recurse=True, *, only="all"):
            if only == "all":
                raise ValueError("say which")
            return nn.Module.parameters(self, recurse)

        def forward(self, x):
            return self.inner(x)

    def script():
        model = Shy()
        optimizer = torch.optim.SGD(model.parameters(only="head"), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return bits(model.inner.weight)

    same(script)


def test_fast_ways_of_torch_stay_open():
    def script():
        layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
        train(layer, lambda: layer(torch.randn(2, 5, 64)).square().mean(), optimizer=torch.optim.AdamW)
        layer.eval()
        with torch.no_grad():
            return bits(layer(torch.randn(2, 5, 64)))

    same(script)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_saved_models_have_nothing_of_ours():
    def script():
        model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
        train(model, lambda: model(torch.ones(2, 4)).sum())
        average = copy.deepcopy(model)
        file, other = io.BytesIO(), io.BytesIO()
        torch.save(model, file)
        torch.save({"ema": average}, other)
        torch.jit.script(average)
        train(model, lambda: model(torch.ones(2, 4)).sum())
        return len(file.getvalue()), len(other.getvalue()), b"ampwise" in file.getvalue()

    assert same(script)[2] is False


@pytest.mark.filterwarnings("ignore")
def test_saving_makes_no_compiled_model_compile_again():
    from torch._dynamo.testing import CompileCounter

    def script():
        torch._dynamo.reset()
        counter = CompileCounter()
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(12):
            optimizer.zero_grad()
            compiled(torch.ones(3, 4)).mean().backward()
            optimizer.step()
            torch.save({"model": model.state_dict(), "whole": model}, io.BytesIO())
        return counter.frame_count

    same(script)


@pytest.mark.half_by_day
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["clip", "step"])
def test_what_is_compiled_has_nothing_of_ours(what):
    from torch._dynamo.testing import CompileCounter

    def script():
        torch._dynamo.reset()
        counter = CompileCounter()
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def clip():
            return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        compiled = torch.compile(clip if what == "clip" else optimizer.step, backend=counter)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            compiled()
        return counter.frame_count, counter.op_count

    same(script)


def test_threads_that_train_at_the_same_time():
    def script():
        ends = {}

        def one(seed):
            generator = torch.Generator().manual_seed(seed)
            model = nn.Linear(8, 1)
            with torch.no_grad():
                model.weight.copy_(torch.randn(1, 8, generator=generator))
                model.bias.zero_()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for _ in range(60):
                optimizer.zero_grad()
                model(torch.randn(4, 8, generator=generator)).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            ends[seed] = bits(model.weight)

        threads = [threading.Thread(target=one, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(ends.items())

    same(script)


def run(tmp_path, *words):
    command = [sys.executable, *words]
    environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)


def test_a_link_has_the_neighbours_of_what_it_links_to(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "sibling.py").write_text("name = 'sibling'")
    (tmp_path / "real" / "script.py").write_text("import sibling\nprint(sibling.name, __file__)")
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "script.py")
    plain = run(tmp_path, "link.py")
    watched = run(tmp_path, "-m", "ampwise", "run", "-q", "-o", "run", "link.py")
    assert (watched.returncode, watched.stdout, watched.stderr) == (0, plain.stdout, plain.stderr)


def test_a_traceback_has_only_the_scripts_frames_and_torchs(warm, tmp_path):
    (tmp_path / "script.py").write_text(
        "import torch\noptimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)\n"
        "torch.amp.GradScaler('cpu').unscale_(optimizer)\n"
    )
    plain = warm.run("script.py", cwd=tmp_path)
    watched = warm.run("-m", "ampwise", "run", "-q", "-o", "run", "script.py", cwd=tmp_path)
    assert plain.stderr.startswith("Traceback (most recent call last):\n  File ")
    assert (watched.returncode, watched.stderr) == (plain.returncode, plain.stderr)


def test_threads_that_outlive_the_script_are_waited_for(tmp_path):
    (tmp_path / "script.py").write_text(
        "import threading, time\n\n\ndef late():\n    time.sleep(0.5)\n    print('late')\n\n\n"
        "threading.Thread(target=late).start()\n"
    )
    assert run(tmp_path, "-m", "ampwise", "run", "-q", "-o", "run", "script.py").stdout == "late\n"
