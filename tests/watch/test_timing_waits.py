"""Waits for the GPU: told by torch as warnings, which nobody but us may see."""

import ctypes
import warnings

import pytest
import torch

from ampwise.watch.patches import Patches
from ampwise.watch.timing import RunTiming, SyncCounter

TEXT = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:150.)"


class Device:
    """Torch's debug mode, which warns as torch does: from C."""

    def __init__(self):
        self.mode, self.told_of_prototype = 0, False

    def set(self, mode):
        self.mode = mode
        if mode and not self.told_of_prototype:
            self.told_of_prototype = True
            warn("Synchronization debug mode is a prototype feature and does not yet detect all of them")

    def item(self):
        if self.mode:
            warn(TEXT)


def warn(text):
    if ctypes.pythonapi.PyErr_WarnEx(ctypes.py_object(UserWarning), text.encode(), ctypes.c_ssize_t(1)) < 0:
        raise RuntimeError("the warning became an error")


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def waits(device):
    made = SyncCounter(set_mode=device.set, get_mode=lambda: device.mode)
    yield made
    made.stop()


def test_the_test_can_fail(device):
    device.mode = 1
    with pytest.raises(UserWarning, match="synchronizing"):
        device.item()


def test_waits_are_counted_by_line(waits):
    # In a file that is nobody's, as torch's C++ is, so that the line is the one that calls it.
    torch_itself = {"warn": ctypes.pythonapi.PyErr_WarnEx, "category": ctypes.py_object(UserWarning)}
    exec(compile(f"def item(): warn(category, {TEXT.encode()!r}, 1)", "<torch>", "exec"), torch_itself)
    item = torch_itself["item"]
    assert waits.listen()
    for _ in range(3):
        item()
    item()
    counts = waits.stop()
    assert list(counts.values()) == [3, 1]
    one, other = counts
    assert other.line == one.line + 1
    assert {site.file for site in counts} == {__file__}
    assert {site.function for site in counts} == {"test_waits_are_counted_by_line"}


def test_listening_has_an_end(device, waits):
    device.item()
    waits.listen()
    device.item()
    assert sum(waits.stop().values()) == 1
    device.item()
    assert waits.stop() == {}
    assert device.mode == 0


def test_the_scripts_own_warnings_and_filters_are_its_own(device, waits):
    before = list(warnings.filters)
    waits.listen()
    with pytest.raises(UserWarning, match="of the script"):
        warnings.warn("of the script", stacklevel=1)
    with warnings.catch_warnings(record=True) as caught:
        assert warnings.filters == before
        warnings.simplefilter("always")
        warnings.warn("of the script", stacklevel=1)
        device.item()
    assert [str(one.message) for one in caught] == ["of the script"]
    waits.stop()
    assert warnings.filters == before


def test_a_filter_of_the_scripts_does_not_turn_waits_into_errors(device, waits):
    with warnings.catch_warnings():
        waits.listen()
        warnings.simplefilter("error")
        device.item()
        warnings.resetwarnings()
        device.item()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            device.item()
        device.item()
        assert sum(waits.stop().values()) == 3, "not the one while the script catches warnings"
        assert warnings.filters == []


def test_what_the_script_warns_of_once_is_not_warned_of_again(device, waits):
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda *args, **kwargs: said.append(str(args[0]))
        for listening in (False, True, False):
            if listening:
                waits.listen()
            device.item()
            warnings.warn("said once", stacklevel=1)
            waits.stop()
    assert said == ["said once"]


def test_a_script_that_uses_the_mode_itself_keeps_it(device, waits):
    device.told_of_prototype = True
    device.set(1)
    assert not waits.listen()
    assert device.mode == 1
    device.set(0)
    waits.listen()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch._C, "_cuda_set_sync_debug_mode", device.set, raising=False)
        patched.setattr(torch.cuda, "_lazy_init", lambda: None)
        torch.cuda.set_sync_debug_mode("warn")
    assert not waits.listening
    assert device.mode == 1


def test_our_own_work_is_not_listened_to(device, waits):
    waits.listen()
    with waits.paused():
        device.item()
    device.item()
    assert sum(waits.stop().values()) == 1


def test_everything_is_put_back(device, waits):
    names = ("_showwarnmsg", "filterwarnings", "simplefilter", "resetwarnings", "filters")
    before = [getattr(warnings, name) for name in names], dict(vars(warnings.catch_warnings))
    setter = torch.cuda.set_sync_debug_mode
    waits.listen()
    waits.stop()
    assert ([getattr(warnings, name) for name in names], dict(vars(warnings.catch_warnings))) == before
    assert torch.cuda.set_sync_debug_mode is setter


def test_steps_are_sampled(device, waits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    patches = Patches()
    timing = RunTiming(patches, profile_at=(), sync_every=5, waits=waits)
    listened = []
    for number in range(1, 13):
        if waits.listening:
            listened.append(number)
        device.item()
        device.item()
        with timing.paused():
            device.item()
        timing.step_ended(number)
    use = timing.use()
    patches.undo()
    assert listened == [4, 9]
    assert (use.sync_steps, use.syncs_per_step) == (2, 2)
    assert not any("host-device syncs" in sentence for sentence in use.not_measured)


@pytest.mark.gpu
def test_on_a_gpu_each_wait_is_heard_at_its_line(capfd):
    x = torch.ones(4, device="cuda")
    waits = SyncCounter()
    assert waits.listen()
    for _ in range(3):
        x.sum().item()
    x.sum().mul_(2)
    counts = waits.stop()
    x.sum().item()
    assert list(counts.values()) == [3]
    (site,) = counts
    assert site.file == __file__
    assert torch.cuda.get_sync_debug_mode() == 0
    assert capfd.readouterr().err == ""


@pytest.mark.gpu
def test_on_a_gpu_time_is_that_of_its_kernels(capfd):
    patches = Patches()
    timing = RunTiming(patches, profile_at=(6,))
    model = torch.nn.Sequential(torch.nn.Linear(512, 1001), torch.nn.LayerNorm(1001), torch.nn.Linear(1001, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(1024, 512, device="cuda")
    for number in range(1, 9):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        timing.step_ended(number)
    use = timing.use("bf16")
    patches.undo()
    assert use.device == "cuda"
    assert use.flops_by_precision == {"bf16": 5 * 2 * 1024 * 512 * 1001}
    assert any(product.aligned is False for product in use.matmuls)  # all of them, where strides are told
    assert 0 < use.cast_share < 1
    assert {"matrix", "casts", "normalisation", "optimizer"} <= set(use.time_by_kind)
    assert use.syncs_per_step == 1
    assert capfd.readouterr() == ("", "")
