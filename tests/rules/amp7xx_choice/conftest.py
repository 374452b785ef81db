"""Machines to plant faults in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ampwise.hardware import Cpu, CudaDevice, Fp32Switches, Machine, TorchInfo, find_gpu


@pytest.fixture
def make_device() -> Callable[..., CudaDevice]:
    """A device by its torch name and capability; like torch, it claims BF16 whatever it has."""

    def make(name: str, capability: str, index: int = 0) -> CudaDevice:
        return CudaDevice(
            index=index,
            name=name,
            capability=capability,
            memory_bytes=16 * 2**30,
            bf16_claimed=True,
            bf16_native=not capability.startswith(("6.", "7.")),
            gpu=find_gpu(name),
        )

    return make


@pytest.fixture
def make_machine() -> Callable[..., Machine]:
    """A machine with these devices; keywords are fields of its torch."""

    def make(*devices: CudaDevice, driver: str | None = "570.86.15", **torch: object) -> Machine:
        tf32 = Fp32Switches(matmul_tf32=True, convolution_tf32=True, matmul_precision="high")
        usual = {
            "version": "2.13.0",
            "cuda": "12.8",
            "hip": None,
            "mps": False,
            "fp32": tf32,
            "problem": None,
        }
        return Machine(
            python="3.12.1",
            platform="Linux",
            cpu=Cpu(model="a CPU", features=()),
            driver=driver,
            torch=TorchInfo(devices=devices, **{**usual, **torch}),  # type: ignore[arg-type]
        )

    return make
