"""The device table: peak arithmetic, bandwidth, memory, and the source of each figure.

Figures are the vendor's peaks, dense (without structured sparsity), with 32-bit accumulation where
the vendor gives both. GB, TB and TFLOPS are decimal. `cpu` is this machine, measured.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from remat.torch_border.kernels import is_onednn_on

from .cache import DiskCache, cache_path
from .replay import without_traces
from .timing import Timing, timed_on_cpu

_T, _G = 1e12, 1e9

# Time of a small CUDA kernel on a busy stream, launch included: 3.8 us for a kernel of 2.9 us on
# V100, https://developer.nvidia.com/blog/cuda-graphs/ ("Getting Started with CUDA Graphs", A. Gray,
# 2019).
_CUDA_LAUNCH_S = 3.8e-6

# Workspaces of cuBLAS for the forward's thread and for the backward's: torch's default of 8,320 KiB
# each (CublasHandlePool.cpp); on Hopper and later, what an H100 showed (results/gpu_run.jsonl).
_CUBLAS_BYTES, _CUBLAS_HOPPER_BYTES = 2 * 8_320 << 10, 65 << 20

# NVIDIA's compute capabilities, by architecture; developer.nvidia.com/cuda-gpus has each card's
VOLTA, TURING, AMPERE, ADA, HOPPER, BLACKWELL = 7.0, 7.5, 8.0, 8.9, 9.0, 10.0

# A GPU draws one random number in the time of this many FLOP. Philox4x32-10 (Salmon et al., 2011)
# has ten rounds of about ten integer instructions, which run at half the rate of float32.
_DRAW_FLOP = 200


@dataclass(frozen=True, slots=True)
class Device:
    """One device.

    Attributes:
        name: its name in this table.
        fp32, tf32, bf16, fp16, fp8: FLOP/s of matrix multiplication by input type; 0.0 where the
            device has no unit for that type and uses a wider one. `fp32` is also the rate of
            everything that is not a matrix multiplication.
        bandwidth: memory bandwidth, bytes/s.
        memory_bytes: the vendor's memory size, in decimal units; a program can use about as much.
        source: the document of the figures.
        draws_per_s: random numbers per second.
        cuda_names: words that must all occur in the name that CUDA reports.
        capability: NVIDIA's compute capability, which decides what torch runs; 0.0 for a CPU.
        launch_s: least time of one operator, in seconds.
        type: torch's device type, `cpu` or `cuda`.
    """

    name: str
    fp32: float
    tf32: float
    bf16: float
    fp16: float
    fp8: float
    bandwidth: float
    memory_bytes: int
    source: str
    draws_per_s: float
    cuda_names: tuple[str, ...] = ()
    capability: float = 0.0
    launch_s: float = _CUDA_LAUNCH_S
    type: str = "cuda"

    @property
    def library_bytes(self) -> int:
        """Bytes that cuBLAS holds from its first product on."""
        if self.type == "cpu":
            return 0
        return _CUBLAS_HOPPER_BYTES if self.capability >= HOPPER else _CUBLAS_BYTES

    def flop_per_s(self, dtype: torch.dtype, *, allow_tf32: bool = False) -> float:
        """Returns the FLOP/s of a matrix multiplication with inputs of `dtype`."""
        narrow = {torch.bfloat16: self.bf16, torch.float16: self.fp16}.get(dtype, 0.0)
        if dtype.itemsize == 1 and dtype.is_floating_point:
            narrow = self.fp8 or self.bf16
        elif dtype is torch.float32 and allow_tf32:
            narrow = self.tf32
        elif dtype in (torch.float64, torch.complex64):
            narrow = self.fp32 / 2
        return narrow or self.fp32


def _gpu(
    name: str,
    capability: float,
    tflops: tuple[float, float, float, float, float],
    gb_per_s: float,
    gb: int,
    source: str,
    *cuda_names: str,
) -> Device:
    fp32, tf32, bf16, fp16, fp8 = (figure * _T for figure in tflops)
    return Device(
        name,
        fp32,
        tf32,
        bf16,
        fp16,
        fp8,
        gb_per_s * _G,
        gb * 10**9,
        source,
        fp32 / _DRAW_FLOP,
        cuda_names,
        capability,
    )


_V100 = (
    "NVIDIA V100 datasheet (SXM2), "
    "images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
)
_A100 = (
    "NVIDIA A100 datasheet (SXM), "
    "nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf"
)
_A100_40 = "NVIDIA A100 architecture whitepaper (SXM4-40GB), table 1"
_H100 = (
    "NVIDIA H100 datasheet, half the figures with sparsity, "
    "resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
)
_PCIE, _NVL, _SXM = (f"{_H100} ({form})" for form in ("PCIe", "NVL", "SXM"))
_H200 = (
    "NVIDIA H200 datasheet (SXM), half the figures with sparsity, nvidia.com/en-us/data-center/h200"
)
_B200 = (
    "NVIDIA Blackwell architecture technical brief (HGX B200, 1,000 W), half the figures with "
    "sparsity; memory: DGX B200 datasheet / 8"
)
_L4 = "NVIDIA L4 datasheet, half the figures with sparsity, nvidia.com/en-us/data-center/l4"
_L40S = "NVIDIA L40S datasheet, nvidia.com/en-us/data-center/l40s"
_A10 = "NVIDIA A10 datasheet, nvidia.com/en-us/data-center/products/a10-gpu"
_A10G = "NVIDIA A10G datasheet (AWS G5), half the figures with sparsity"
_T4 = "NVIDIA T4 datasheet, nvidia.com/en-us/data-center/tesla-t4"
_ADA = "NVIDIA Ada GPU architecture whitepaper, appendix A (RTX 4090)"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A (RTX 3090)"

# capability; fp32, tf32, bf16, fp16, fp8 in TFLOPS; GB/s; GB; source; words of CUDA's name. More
# specific names come first.
_TABLE = (
    _gpu("V100-32", VOLTA, (15.7, 0, 0, 125, 0), 900, 32, _V100, "V100", "32GB"),
    _gpu("V100", VOLTA, (15.7, 0, 0, 125, 0), 900, 16, _V100, "V100"),
    _gpu("A100-40", AMPERE, (19.5, 156, 312, 312, 0), 1555, 40, _A100_40, "A100", "40GB"),
    _gpu("A100-80", AMPERE, (19.5, 156, 312, 312, 0), 2039, 80, _A100, "A100"),
    _gpu("H100-PCIe", HOPPER, (51, 378, 756.5, 756.5, 1513), 2000, 80, _PCIE, "H100", "PCIe"),
    _gpu("H100-NVL", HOPPER, (60, 417.5, 835.5, 835.5, 1670.5), 3900, 94, _NVL, "H100", "NVL"),
    _gpu("H100", HOPPER, (67, 494.5, 989.5, 989.5, 1979), 3350, 80, _SXM, "H100"),
    _gpu("H200", HOPPER, (67, 494.5, 989.5, 989.5, 1979), 4800, 141, _H200, "H200"),
    _gpu("B200", BLACKWELL, (80, 1100, 2250, 2250, 4500), 8000, 180, _B200, "B200"),
    _gpu("L4", ADA, (30.3, 60, 121, 121, 242.5), 300, 24, _L4, "L4"),
    _gpu("L40S", ADA, (91.6, 183, 362, 362, 733), 864, 48, _L40S, "L40S"),
    _gpu("A10", 8.6, (31.2, 62.5, 125, 125, 0), 600, 24, _A10, "A10"),
    _gpu("A10G", 8.6, (31.5, 35, 70, 70, 0), 600, 24, _A10G, "A10G"),
    _gpu("T4", TURING, (8.1, 0, 0, 65, 0), 320, 16, _T4, "T4"),
    _gpu("RTX 4090", ADA, (82.6, 82.6, 165.2, 165.2, 330.3), 1008, 24, _ADA, "RTX", "4090"),
    _gpu("RTX 3090", 8.6, (35.6, 35.6, 71, 71, 0), 936, 24, _GA102, "RTX", "3090"),
)
_ALIASES = {
    "a100": "A100-80",
    "h100sxm": "H100",
    "h200sxm": "H200",
    "v100sxm2": "V100",
    "4090": "RTX 4090",
    "3090": "RTX 3090",
}


def device(name: str) -> Device:
    """Returns the device called `name`; case, spaces and dashes are ignored.

    Raises:
        ValueError: the table has no such device; the message lists the known ones.

    >>> device("h100").bandwidth
    3350000000000.0
    """
    wanted = _plain(_ALIASES.get(_plain(name), name))
    if wanted == "cpu":
        return _cpu()
    for candidate in _TABLE:
        if _plain(candidate.name) == wanted:
            return candidate
    raise ValueError(f"unknown device {name!r}; choose one of {', '.join(known_devices())}")


def known_devices() -> tuple[str, ...]:
    """Returns the names in the table, `cpu` first."""
    return ("cpu", *(entry.name for entry in _TABLE))


def device_of_cuda_name(cuda_name: str) -> Device:
    """Returns the device that CUDA calls `cuda_name`.

    Raises:
        ValueError: the table has no such device.

    >>> device_of_cuda_name("NVIDIA A100-SXM4-40GB").name
    'A100-40'
    """
    words = cuda_name.replace("-", " ").lower().split()
    for candidate in _TABLE:
        if all(part.lower() in words for part in candidate.cuda_names) and "laptop" not in words:
            return candidate
    raise ValueError(
        f"the GPU {cuda_name!r} is not in the table of devices ({', '.join(known_devices())}); "
        'name the most similar one (device="A100" in fits, max_batch and doctor, elsewhere '
        'costs="roofline:A100"), or measure it with costs="profile"'
    )


def local_device(device_type: str = "") -> Device:
    """Returns this machine's current GPU, or `cpu` if it has none or `device_type` is `cpu`."""
    if device_type != "cpu" and torch.cuda.is_available():
        known = device_of_cuda_name(torch.cuda.get_device_name())
        _, total_bytes = torch.cuda.mem_get_info()  # a MIG slice has less than the card
        return replace(known, memory_bytes=total_bytes)
    return _cpu()


def machine() -> str:
    """Returns what a CPU measurement depends on: the machine, torch's version and settings."""
    where = f"{platform.node()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{where} {os.cpu_count()} cores, {cpu_settings()}, torch {torch.__version__}"


def settings_of(device_type: str) -> str:
    """Returns what the cost of a call on a device of this type depends on, besides the call.

    Without a GPU nothing is measured on `cuda`, and no setting of it counts.
    """
    is_measured = device_type == "cuda" and torch.cuda.is_available()
    return cuda_settings() if is_measured else cpu_settings()


def cpu_settings() -> str:
    """Returns the settings of torch that choose kernels on a CPU and their memory."""
    onednn = "" if is_onednn_on() else ", no oneDNN"
    return f"{torch.get_num_threads()} threads{onednn}"


def cuda_settings() -> str:
    """Returns what a GPU measurement depends on: GPU, versions, settings that choose kernels."""
    backends: Any = torch.backends
    settings = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": backends.cudnn.version(),
        "matmul": backends.cuda.matmul.fp32_precision,
        "conv": backends.cudnn.conv.fp32_precision,
        "cudnn on": backends.cudnn.enabled,
        "benchmark": backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled()
        or backends.cudnn.deterministic,
    }

    described = ", ".join(f"{name} {value}" for name, value in settings.items())
    return f"{torch.cuda.get_device_name()}, {described}"


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


# possible figures of a CPU: FLOP/s in three precisions, bytes/s, seconds per operator, random
# numbers per second
_FIGURES = (*((1e3, 1e18) for _ in range(4)), (0.0, 1.0), (1e3, 1e18))


@cache
def _cpu() -> Device:
    store = DiskCache(cache_path("cpu"))
    key = machine()
    figures = store.get(key, *_FIGURES)
    if figures is None:
        with without_traces("cpu"):  # even in the middle of a capture
            timings, figures = _measure_cpu()
        store.put(key, figures, is_kept=not any(timing.is_disturbed for timing in timings))

    fp32, bf16, fp16, bandwidth, launch_s, draws_per_s = figures
    source = f"measured on {key}"

    return Device(
        "cpu",
        fp32,
        fp32,
        bf16,
        fp16,
        0.0,
        bandwidth,
        _physical_memory_bytes(),
        source,
        draws_per_s,
        launch_s=launch_s,
        type="cpu",
    )


def _measure_cpu() -> tuple[list[Timing], tuple[float, ...]]:
    """Returns how this CPU was timed, and its figures in the order of `_FIGURES`.

    FLOP/s of a square matmul in fp32, bf16 and fp16, bytes/s of a copy, seconds per operator, and
    random numbers per second of a dropout.
    """
    timings: list[Timing] = []

    def seconds(function: Callable[..., object], *args: torch.Tensor) -> float:
        function(*args)
        timings.append(timed_on_cpu(lambda: function(*args), 0.1))
        return timings[-1].seconds

    size = 512
    rates = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a = torch.ones(size, size, dtype=dtype, device="cpu")
        rates.append(2 * size**3 / seconds(torch.ops.aten.mm.default, a, a))

    source = torch.ones(1 << 25, dtype=torch.uint8, device="cpu")
    bandwidth = 2 * source.nbytes / seconds(torch.empty_like(source).copy_, source)

    one = torch.ones(1, device="cpu")
    launch_s = seconds(torch.ops.aten.add.Tensor, one, one)
    mask, generator = torch.ones(1 << 18, device="cpu"), torch.Generator(device="cpu")
    draws_per_s = mask.numel() / seconds(lambda: mask.bernoulli_(0.5, generator=generator))

    return timings, (*rates, bandwidth, launch_s, draws_per_s)


def _physical_memory_bytes() -> int:
    if sys.platform == "win32":
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
