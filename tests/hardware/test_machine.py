"""The machine, with and without torch."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from ampwise.hardware import CudaDevice, describe_machine, find_gpu
from ampwise.hardware.device import group_devices

BLOCK_TORCH = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise {error}

sys.meta_path.insert(0, Blocker())
"""
ABSENT = BLOCK_TORCH.format(error="ModuleNotFoundError('No module named torch', name='torch')")
BROKEN = BLOCK_TORCH.format(error="OSError('libcudart.so.12: cannot open shared object file')")
DESCRIBE = """
import json
from ampwise.hardware import describe_machine
print(json.dumps(describe_machine().as_dict()))
"""

H200 = CudaDevice(
    index=0,
    name="NVIDIA H200",
    capability="9.0",
    memory_bytes=150 * 10**9,
    bf16_claimed=True,
    bf16_native=True,
    gpu=find_gpu("NVIDIA H200"),
)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_a_machine_without_torch():
    machine = json.loads(run(ABSENT + DESCRIBE).stdout)
    assert machine["torch"] is None
    assert machine["torch_problem"] is None
    assert machine["python"]


def test_a_torch_that_does_not_load_says_why():
    machine = json.loads(run(BROKEN + DESCRIBE).stdout)
    assert machine["torch"] is None
    assert machine["torch_problem"] == "OSError: libcudart.so.12: cannot open shared object file"


def test_the_records_and_rules_do_not_import_torch():
    run(
        "import sys, ampwise.hardware\n"
        "from ampwise.finding.registry import rule_modules\n"
        "assert rule_modules()\n"
        "assert 'torch' not in sys.modules"
    )


def test_this_machine():
    torch = pytest.importorskip("torch")
    machine = describe_machine()
    assert machine.torch.version == torch.__version__
    assert len(machine.devices) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert json.loads(json.dumps(machine.as_dict()))["torch"]["version"] == torch.__version__


def test_a_machine_can_be_pickled_copied_and_hashed():
    machine = describe_machine()
    with_a_gpu = None if machine.torch is None else replace(machine, torch=replace(machine.torch, devices=(H200,)))
    for one in (machine, with_a_gpu):
        assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
        assert hash(copy.deepcopy(one)) == hash(one)


def test_the_records_are_light():
    run("import sys, ampwise.hardware\nassert 'subprocess' not in sys.modules")


@pytest.mark.gpu
def test_a_device_reports_what_the_catalog_says():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for device in describe_machine().devices:
        assert device.name == torch.cuda.get_device_name(device.index)
        if device.gpu is not None:
            assert device.capability == device.gpu.capability
            if device.gpu.memory_bytes is not None:
                # The driver, and ECC on GDDR cards, keep some of it.
                assert 0.9 < device.memory_bytes / device.gpu.memory_bytes <= 1


def test_alike_devices_are_one_kind():
    l4 = replace(H200, index=1, name="NVIDIA L4", capability="8.9", gpu=find_gpu("NVIDIA L4"))
    kinds = group_devices([H200, l4, replace(H200, index=2)])
    assert [(kind.title, kind.torch_names) for kind in kinds] == [
        ("2 × NVIDIA H200", "cuda:0,2"),
        ("NVIDIA L4", "cuda:1"),
    ]


def test_a_device_outside_the_catalog_is_known_by_its_capability():
    rtx4060 = replace(H200, name="NVIDIA GeForce RTX 4060", capability="8.9", gpu=None)
    assert rtx4060.has_tensor_cores("fp8") is True
    assert rtx4060.has_tensor_cores("nvfp4") is False
    assert rtx4060.as_dict()["catalog_id"] is None
    assert rtx4060.as_dict()["tensor_cores"] == {
        "fp32": None, "tf32": True, "fp16": True, "bf16": True,
        "fp8": True, "mxfp8": False, "mxfp4": False, "nvfp4": False,
    }  # fmt: skip


def test_an_unknown_amd_device_is_unknown():
    radeon = replace(H200, name="AMD Radeon Graphics", capability="gfx1100", gpu=None)
    assert radeon.has_tensor_cores("bf16") is None
