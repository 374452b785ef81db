"""The end of a training step: unscale, check, clip, AdamW, next scale. Ampwise, torch and others.

Each contender gets the same gradients of a scaled loss and must leave the same weights. Times are of the whole
tail, the host's part hidden behind work that is queued before it (as the backward pass is in training), and
alone, where the host's part shows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import ampwise
from benchmarks.harness import Result
from benchmarks.models import GPT2_124M, GPT_1_3B, GPT_20M, gradients_like

SCALE = 65536.0
MAX_NORM = 1.0
QUEUED_CYCLES = 40_000_000  # about 20 ms of an H200: longer than any host needs for a tail

Tail = Callable[[], object]


class Setting:
    """Parameters with gradients of a scaled loss, and an optimizer that has taken a step."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], *, fused: bool, device: str = "cuda") -> None:
        self.device = device
        gradients = gradients_like(shapes, device)
        self.parameters = [torch.nn.Parameter(torch.randn_like(values)) for values in gradients.values()]
        self.scaled = [values * SCALE for values in gradients.values()]
        self.optimizer = torch.optim.AdamW(self.parameters, fused=fused, foreach=not fused)
        for parameter, values in zip(self.parameters, gradients.values(), strict=True):
            parameter.grad = values
        self.optimizer.step()

    def restore(self) -> None:
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        torch._foreach_copy_(grads, self.scaled)


def by_hand(setting: Setting, scaler: torch.amp.GradScaler) -> None:
    """Every tutorial's way."""
    scaler.unscale_(setting.optimizer)
    clip_grad_norm_(setting.parameters, MAX_NORM)
    scaler.step(setting.optimizer)
    scaler.update()


def folded(setting: Setting, scaler: ampwise.GradScaler) -> None:
    scaler.clip_(setting.optimizer, MAX_NORM)
    scaler.step(setting.optimizer)
    scaler.update()


def unclipped(setting: Setting, scaler: torch.amp.GradScaler) -> None:
    scaler.step(setting.optimizer)
    scaler.update()


def optimizer_alone(setting: Setting) -> None:
    setting.optimizer.step()


def accelerates(setting: Setting) -> Tail:
    """Hugging Face Accelerate's way."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="fp16")
    optimizer = accelerator.prepare(setting.optimizer)
    accelerator.scaler.scale(torch.zeros((), device="cuda"))

    def tail() -> None:
        accelerator.clip_grad_norm_(setting.parameters, MAX_NORM)
        optimizer.step()

    return tail


def lightnings(setting: Setting) -> Tail:
    """Lightning Fabric's way, which refuses to clip for a fused optimizer."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cuda", devices=1, precision="16-mixed")
    module, optimizer = fabric.setup(torch.nn.ParameterList(setting.parameters), setting.optimizer)
    fabric._precision.scaler.scale(torch.zeros((), device="cuda"))

    def tail() -> None:
        fabric.clip_gradients(module, optimizer, max_norm=MAX_NORM)
        optimizer.step()

    return tail


def _peers(setting: Setting) -> dict[str, Tail]:
    """Those that are installed and do not refuse."""
    found = {}
    for name, way in (("accelerate", accelerates), ("lightning fabric", lightnings)):
        try:
            tail = way(setting)
            setting.restore()
            tail()
        except (ImportError, NotImplementedError, RuntimeError) as error:
            print(f"{name} left out: {type(error).__name__}: {error}")
        else:
            found[f"{name}: clip, step"] = tail
    return found


def _scaler(kind: type[torch.amp.GradScaler], device: str = "cuda") -> torch.amp.GradScaler:
    scaler = kind(device, init_scale=SCALE, growth_interval=10**6)
    scaler.scale(torch.zeros((), device=device))
    return scaler


def contenders(setting: Setting) -> dict[str, Tail]:
    def tail(way: Callable[..., None], kind: type[torch.amp.GradScaler]) -> Tail:
        return partial(way, setting, _scaler(kind, setting.device))

    return {
        "torch: unscale_, clip_grad_norm_, step, update": tail(by_hand, torch.amp.GradScaler),
        "ampwise: clip_, step, update (census every step)": tail(folded, ampwise.GradScaler),
        "ampwise, drop-in: unscale_, clip_grad_norm_, step, update": tail(by_hand, ampwise.GradScaler),
        "torch, no clipping: step, update": tail(unclipped, torch.amp.GradScaler),
        "ampwise, no clipping: step, update": tail(unclipped, ampwise.GradScaler),
        "AdamW alone": partial(optimizer_alone, setting),
        **(_peers(setting) if setting.device == "cuda" else {}),
    }


def queued_ms(setting: Setting, tail: Tail, repeats: int = 20) -> float:
    """Device time with the host ahead."""
    times = []
    for _ in range(repeats + 3):
        setting.restore()
        torch.cuda._sleep(QUEUED_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        tail()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times[3:]))


def alone_ms(setting: Setting, tail: Tail, repeats: int = 20) -> float:
    """Wall time from an idle device to an idle device."""
    times = []
    for _ in range(repeats + 3):
        setting.restore()
        torch.cuda.synchronize()
        start = time.perf_counter()
        tail()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[3:])


def extra_memory(setting: Setting) -> float:
    """What our tail allocates at its highest, as a share of the gradients' bytes."""
    scaler = _scaler(ampwise.GradScaler)
    assert isinstance(scaler, ampwise.GradScaler)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        setting.restore()
        folded(setting, scaler)
    peak = torch.cuda.max_memory_allocated() - before
    return peak / sum(values.numel() * values.element_size() for values in setting.scaled)


def without_waiting(setting: Setting) -> None:
    """Raises if anything in our tail waits for the device."""
    scaler = _scaler(ampwise.GradScaler)
    assert isinstance(scaler, ampwise.GradScaler)
    for step in range(6):
        if step == 3:
            torch.cuda.set_sync_debug_mode("error")
        setting.restore()
        folded(setting, scaler)
    torch.cuda.set_sync_debug_mode("default")


def largest_difference(shapes: dict[str, tuple[int, ...]]) -> float:
    """Of weights after five steps, between torch's tail and ours, in units of the learning rate."""
    weights: list[list[Tensor]] = []
    for contender in (0, 1):
        torch.manual_seed(0)
        setting = Setting(shapes, fused=True)
        tail = list(contenders(setting).values())[contender]
        for _ in range(5):
            setting.restore()
            tail()
        weights.append([parameter.detach().cpu() for parameter in setting.parameters])
    return max(float((one - other).abs().max()) for one, other in zip(*weights, strict=True)) / 1e-3


def on_gpu() -> Result:
    result = Result(
        name="tail_gpu",
        title="The end of a step on a GPU",
        claim="Unscale, check, clip, AdamW, next scale; ours with norm, finiteness, extremes, zeros and the full "
        "histogram of every gradient, every step. Ratio to torch's own way in the same run.",
        columns=["model", "AdamW", "tail", "ms, host hidden", "ratio", "ms, alone", "ratio"],
    )
    for label, shapes in (("GPT-2 124M", GPT2_124M), ("GPT 1.3B", GPT_1_3B)):
        for fused in (True, False):
            setting = Setting(shapes, fused=fused)
            times = {name: (queued_ms(setting, t), alone_ms(setting, t)) for name, t in contenders(setting).items()}
            queued, alone = next(iter(times.values()))
            for name, (hidden, wall) in times.items():
                kind = "fused" if fused else "foreach"
                result.rows.append([label, kind, name, hidden, hidden / queued, wall, wall / alone])
            if fused:
                without_waiting(setting)
                result.notes.append(f"{label}: extra memory {extra_memory(setting):.3%} of the gradients' bytes.")
            del setting
    result.notes += [
        "Medians of 20. Host hidden: the tail is queued behind other work, as it is behind the backward pass.",
        "Three of our tails with set_sync_debug_mode('error'): nothing waits (fused).",
        f"Largest difference of weights after 5 steps, torch's way to ours: {largest_difference(GPT2_124M):.1e} of the "
        "learning rate.",
    ]
    return result


def cpu_ms(setting: Setting, tail: Tail, repeats: int = 30) -> float:
    """Median time on the processor, of one thread: what other processes do does not show."""
    times = []
    for _ in range(repeats + 3):
        setting.restore()
        start = time.process_time()
        tail()
        times.append((time.process_time() - start) * 1e3)
    return statistics.median(times[3:])


def on_cpu() -> Result:
    torch.set_num_threads(1)
    result = Result(
        name="tail_cpu",
        title="The end of a step on a CPU",
        claim="Unscale, check, clip, AdamW, next scale; ours with a full census of every gradient, every step. "
        "Ratio to torch's own way in the same run.",
        columns=["model", "AdamW", "tail", "ms of CPU time", "ratio"],
    )
    for fused in (True, False):
        setting = Setting(GPT_20M, fused=fused, device="cpu")
        times = {name: cpu_ms(setting, tail) for name, tail in contenders(setting).items()}
        first = next(iter(times.values()))
        for name, ms in times.items():
            result.rows.append(["GPT 20M", "fused" if fused else "foreach", name, ms, ms / first])
    result.notes.append("Medians of 30, one thread. Forward and backward, which take much longer, are not in it.")
    return result


def main() -> None:
    (on_gpu() if torch.cuda.is_available() else on_cpu()).publish()


if __name__ == "__main__":
    main()
