"""What is read from torch: from stand-ins for the devices we have not, from the real one for its switches."""

from __future__ import annotations

import contextlib
import json
import warnings
from types import SimpleNamespace

import pytest

from ampwise.hardware.torch_info import read_device, read_devices, read_fp32_switches


class FakeCuda:
    """As much of torch.cuda as is asked: devices by (name, major, minor), and the current one."""

    def __init__(self, *devices, arch=""):
        self.devices, self.arch, self.current = devices, arch, 0

    def is_available(self):
        return bool(self.devices)

    def device_count(self):
        return len(self.devices)

    def get_device_properties(self, index):
        name, major, minor = self.devices[index]
        return SimpleNamespace(name=name, major=major, minor=minor, total_memory=index + 1, gcnArchName=self.arch)

    @contextlib.contextmanager
    def device(self, index):
        before, self.current = self.current, index
        yield
        self.current = before

    def is_bf16_supported(self, including_emulation=True):
        return including_emulation or self.devices[self.current][1] >= 8


def fake_torch(cuda, hip=None):
    return SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=hip))


def test_each_device_is_asked_for_itself():
    cuda = FakeCuda(("Tesla V100-SXM2-16GB", 7, 0), ("NVIDIA H200", 9, 0), ("NVIDIA H200 NVL", 9, 0))
    (v100, h200, nvl), problem = read_devices(fake_torch(cuda))
    assert problem is None
    assert (v100.bf16_claimed, v100.bf16_native, v100.capability) == (True, False, "7.0")
    assert (h200.bf16_claimed, h200.bf16_native, h200.capability) == (True, True, "9.0")
    assert (v100.gpu.id, h200.gpu.id, nvl.gpu) == ("v100-sxm2-16", "h200", None)
    assert [device.memory_bytes for device in (v100, h200, nvl)] == [1, 2, 3]
    assert cuda.current == 0, "the current device is left as it was"
    assert read_device(fake_torch(cuda), 1) == h200


def test_on_rocm_the_architecture_is_the_capability():
    """torch's (9, 0) would make an MI250X a Hopper."""
    cuda = FakeCuda(("AMD Instinct MI250X", 9, 0), arch="gfx90a:sramecc+:xnack-")
    (device,), _ = read_devices(fake_torch(cuda, hip="6.3"))
    assert device.capability == "gfx90a"
    assert device.compute_capability is None
    assert device.has_tensor_cores("fp8") is False


def test_a_warning_says_why_there_is_no_device():
    class OldDriver(FakeCuda):
        def is_available(self):
            warnings.warn("CUDA initialization: the driver is too old\nmore", UserWarning, stacklevel=1)
            return False

    assert read_devices(fake_torch(OldDriver())) == ((), "CUDA initialization: the driver is too old")


def test_an_error_says_why_there_is_no_device():
    class Broken(FakeCuda):
        def get_device_properties(self, index):
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")

    assert read_devices(fake_torch(Broken(("NVIDIA H200", 9, 0)))) == ((), "CUDA error: out of memory")


def test_a_warning_beside_a_device_is_no_problem():
    class Chatty(FakeCuda):
        def is_available(self):
            warnings.warn("something else", UserWarning, stacklevel=1)
            return True

    devices, problem = read_devices(fake_torch(Chatty(("NVIDIA H200", 9, 0))))
    assert len(devices) == 1
    assert problem is None


def test_switches_of_a_torch_before_the_new_names():
    old = SimpleNamespace(
        backends=SimpleNamespace(
            cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=True)),
            cudnn=SimpleNamespace(allow_tf32=False),
        ),
        get_float32_matmul_precision=lambda: "high",
    )
    switches = read_fp32_switches(old)
    assert switches.as_dict() == {
        "matmul_tf32": True,
        "convolution_tf32": False,
        "matmul_precision": "high",
    }


# The switches are global and, once mixed, raise when read: each setting gets a process of its own.
SET_THEN_READ = """
import json, sys, warnings
import torch
from ampwise.hardware.torch_info import read_fp32_switches
exec(sys.argv[1])
warnings.simplefilter("error")
print(json.dumps(read_fp32_switches(torch).as_dict()))
"""


@pytest.mark.parametrize(
    ("setting", "matmul", "convolution"),
    [
        ("", False, True),
        ("torch.set_float32_matmul_precision('high'); torch.backends.cudnn.allow_tf32 = False", True, False),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", True, True),
        (
            "torch.set_float32_matmul_precision('high')\n"
            "torch.backends.cuda.matmul.fp32_precision = 'ieee'\n"
            "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
            False,
            False,
        ),
    ],
    ids=["defaults", "old names", "new names", "both, contradicting"],
)
def test_switches_are_read_however_they_were_set(setting, matmul, convolution, warm, tmp_path):
    torch = pytest.importorskip("torch")
    if "fp32_precision" in setting and not hasattr(torch.backends.cudnn, "conv"):
        pytest.skip("this torch has only the old names")
    done = warm.run("-c", SET_THEN_READ, setting, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert (read["matmul_tf32"], read["convolution_tf32"]) == (matmul, convolution)
