"""The one place that knows what kind of device it is: which there are, waiting for them, their memory, their errors.

Everything goes through ``torch.accelerator``, PyTorch's device-neutral interface (CUDA, MPS, XPU), so that the code
that no CPU-only machine can test stays thin.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from tuner.errors import DeviceError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""

KEPT_BYTES = 1 << 30

PRECISIONS = ("float32", "tf32", "bf16")
"""``tf32`` lets an NVIDIA GPU round the factors of matrix products and convolutions to 10 bits; ``bf16`` computes them
in bfloat16 by autocast, with the weights kept in float32."""


@dataclass(frozen=True)
class Choice:
    """A device, and why it was taken; both are said on the first lines of a run."""

    device: torch.device
    why: str


def choose(name: str = "auto", *, touch: bool = True) -> Choice:
    """The device called `name` (``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``mps``, ``xpu``).

    ``auto`` takes the accelerator that works, else the CPU. With `touch` it is tried by one small sum; a process that
    leaves the training to others does not touch it, since that takes memory there. Raises `DeviceError` if a named
    device is not there.
    """
    if name == "auto":
        return _choose_automatically(touch)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps", "xpu"):
        raise DeviceError(f"--device {name}: wanted auto, cpu, cuda, cuda:N, mps or xpu")
    if device.type == "cpu":
        if device.index:
            raise DeviceError(f"--device {name}: there is only one cpu; say --device cpu")
        return Choice(torch.device("cpu"), "asked for")
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != device.type:
        raise DeviceError(
            f"--device {name}: PyTorch {torch.__version__} finds {found.type if found else 'no accelerator'} here"
            "; use --device auto, or --device cpu"
        )
    count = torch.accelerator.device_count()
    if device.index is not None and device.index >= count:
        last = f"{device.type}:{count - 1}"
        raise DeviceError(f"--device {name}: the last one here is {last}; name one up to {last}")
    device = torch.device(device.type, device.index if device.index is not None else 0)
    trouble = _trouble(device) if touch else ""
    if trouble:
        raise DeviceError(f"--device {name} is there but does not work: {trouble}; use --device cpu meanwhile")
    return Choice(device, "asked for")


def _choose_automatically(touch: bool) -> Choice:
    cpu = torch.device("cpu")
    if not torch.accelerator.is_available():
        return Choice(cpu, "no accelerator that this PyTorch can use")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    device = torch.device(accelerator.type, 0)
    trouble = _trouble(device) if touch else ""
    if trouble:
        return Choice(cpu, f"{device} is there but does not work: {trouble}")
    return Choice(device, "the accelerator that works")


def _trouble(device: torch.device) -> str:
    try:
        if torch.ones(2, device=device).sum().item() == 2:
            return ""
        return "1 + 1 is not 2 there"
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__


def describe(device: torch.device) -> str:
    """The device as a person would call it: ``cuda:0 NVIDIA H200``, ``cpu x86_64``."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu {_processor()}"
    return str(device)


def _processor() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.machine()


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_precision(precision: str) -> None:
    """Allow or forbid TF32 in this process. PyTorch allows it for convolutions alone; here it is all or nothing."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """A forward pass and its loss are computed in this context. bfloat16 has float32's range: no scaling is needed."""
    if precision != "bf16":
        return nullcontext()
    # Without the cache: what it keeps would be a part of one recorded call and not of the next.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def keep_host_memory() -> None:
    """Let the C library keep freed memory for the next tensors, where it can be told so (glibc).

    By default a block above some size goes back to the kernel when it is freed, and each page of the next one is a page
    fault: for stacks on a CPU that took longer than the arithmetic. Measured: docs/measurements.md.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was told; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def widest(device: torch.device) -> torch.dtype:
    """The widest floating-point type that the device has: sums over an epoch are kept in it."""
    return torch.float32 if device.type == "mps" else torch.float64


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on an accelerator, the allocator's cache included; None where nobody knows."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return None


def total_bytes(device: torch.device) -> int | None:
    """Bytes of memory of an accelerator (of MPS: what it advises to use at most); None where nobody knows."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).total_memory)
    return int(torch.mps.recommended_max_memory()) if device.type == "mps" else None


def reset_peak(device: torch.device) -> None:
    """Start measuring `peak_megabytes` anew."""
    if device.type in ("cuda", "xpu"):
        torch.accelerator.reset_peak_memory_stats(device)


def peak_megabytes(device: torch.device) -> float:
    """The most memory in use on the device since `reset_peak`, in MB; on a CPU the most that this process ever held."""
    if device.type in ("cuda", "xpu"):
        return torch.accelerator.max_memory_allocated(device) / 1e6
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / 1e3 if sys.platform != "darwin" else kilobytes / 1e6


def release(device: torch.device) -> None:
    """Give cached memory back to the device. Call it outside an ``except`` block: a traceback keeps tensors alive."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch ran out of memory, on an accelerator or on the CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and ("not enough memory" in str(error) or "can't allocate memory" in str(error))
    )


def is_lost(error: BaseException) -> bool:
    """Whether the device will answer every further call in this process with the same error (a device-side assert)."""
    kind = getattr(torch, "AcceleratorError", None)
    if kind is not None and isinstance(error, kind):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("device-side assert" in text or "illegal memory access" in text)
