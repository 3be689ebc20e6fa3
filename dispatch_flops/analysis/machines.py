"""Machines: dense peak FLOP/s per dtype and memory bandwidth, each with its source.

All peaks are dense: vendors' figures "with sparsity" are twice what a dense matmul can reach. They
are of the tensor cores (AMD: matrix cores) wherever libraries use these for the dtype. NVIDIA's
``float32`` and the V100's ``float64`` are of the vector units. TF32 has a peak of its own; see
``Machine.with_tf32``. The peaks of a machine that is not listed are unknown, and MFU is then
None.

Links are in one direction: vendors' figures of NVLink count both. Memory is the vendor's capacity
in decimal bytes; a driver reports a little more or less, and takes a part for itself. Read sources:

- links of a node: https://github.com/stas00/ml-engineering/blob/master/network/README.md, tables
  "All-to-all bandwidth" and "PCIe", of the vendors' figures;
- network of an H100 or H200 machine, 400 Gb/s for each device:
  https://github.com/pytorch/torchtitan/tree/main/benchmarks (llama3_h100_202412_torchtitan.md);
- network of an A100 machine, 1600 Gb/s for 8 devices:
  https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking;
- peaks of the A10, H100 NVL, H200 NVL and RTX 3090: NVIDIA's tables, of which others' copies were
  read. Those of the A10 and the RTX 3090 agree with their SMs, rates per clock and boost clock;
- memory: https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md; of an
  H200 and an MI300X also https://github.com/mlcommons/inference_results_v4.1, closed, systems; of a
  B200 the 1,440 GB of a DGX over 8 devices; of an L4 and an L40
  https://www.topcpu.net/en/gpu-c/l40-vs-l4; of an RTX 3090
  https://huggingface.co/spaces/lambdabrendan/Lambda-LLM-Calculator, data/gpu_specs.csv; of a T4
  https://huggingface.co/RajBhope/gpu-runtime-predictor, gpu_catalog.json;
- TPU: https://docs.cloud.google.com/tpu/docs/v3, /v4, /v5e, /v5p.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, TypeGuard, get_args

from dispatch_flops.analysis.kernel_families import KernelFamily
from dispatch_flops.errors import ConfigError

T = 1e12
G = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link of a device to others.

    bytes_per_s: in one direction, of a device to all others together.
    latency_s: the least time of a collective; None where it is not known: the times of collectives
        are then lower bounds.
    name: such as "NVLink 4".

    Raises ConfigError for a value that is not a number, and for a rate that is not above 0.
    """

    bytes_per_s: float
    latency_s: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        _check_positive("bytes_per_s", self.bytes_per_s)
        if self.latency_s is not None and (not is_finite(self.latency_s) or self.latency_s < 0):
            raise ConfigError(
                f"latency_s is {self.latency_s!r:.60}; expected seconds, 0 or more, or None"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Limits of one device, and its links.

    name: exactly as the driver reports it; aliases: its other names.
    flops_per_s: ``{dtype: dense peak}``; dtypes as torch names them, "float8" or "tf32".
    bytes_per_s: memory bandwidth; None if unknown.
    kernel_flops_per_s: ``{family: {dtype: peak}}`` where it was measured for "product",
        "convolution", "attention" or "recurrent" kernels; other kernels have ``flops_per_s``.
    memory_bytes: capacity of the device's memory; None if unknown.
    devices_per_node: devices that ``node_link`` connects; network_link connects the nodes.
    source: the document or measurement that the figures are from.

    Raises ConfigError for a value of the wrong type, and for a rate or a capacity that is not
    above 0.

    Example::

        Machine(name="my board", flops_per_s={"float16": 125e12}, bytes_per_s=900e9)
    """

    name: str
    aliases: tuple[str, ...] = ()
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    bytes_per_s: float | None = None
    kernel_flops_per_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    memory_bytes: float | None = None
    devices_per_node: int = 1
    node_link: Link | None = None
    network_link: Link | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ConfigError(f"name is {self.name!r:.60}; expected the machine's name")
        if not isinstance(self.aliases, tuple) or not all(type(one) is str for one in self.aliases):
            raise ConfigError(f"aliases is {self.aliases!r:.60}; expected a tuple of names")
        _check_rates("flops_per_s", self.flops_per_s)
        if not isinstance(self.kernel_flops_per_s, Mapping):
            raise ConfigError(
                f"kernel_flops_per_s is {self.kernel_flops_per_s!r:.60}; expected a dict of tables"
            )
        for family, rates in self.kernel_flops_per_s.items():
            if family not in get_args(KernelFamily):
                raise ConfigError(
                    f"kernel_flops_per_s has a table for {family!r:.60}; the families of kernels "
                    f"are {', '.join(get_args(KernelFamily))}"
                )
            _check_rates(f"kernel_flops_per_s.{family}", rates)
        for name in ("bytes_per_s", "memory_bytes"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if type(self.devices_per_node) is not int or self.devices_per_node < 1:
            raise ConfigError(
                f"devices_per_node is {self.devices_per_node!r:.60}; expected an int above 0"
            )
        for name in ("node_link", "network_link"):
            if not isinstance(getattr(self, name), Link | None):
                raise ConfigError(f"{name} is {getattr(self, name)!r:.60}; expected a Link or None")

    def peak(self, dtype: str | None, family: KernelFamily | None = None) -> float | None:
        """Return the dense peak FLOP/s for a dtype; None if unknown.

        family: of the kernel; its own peak where that was measured.

        Raises ConfigError for a dtype that is not given by its name.
        """
        if dtype is None:
            return None
        if not isinstance(dtype, str):
            raise ConfigError(f'dtype={dtype!r:.60}: pass its name, such as "bfloat16", or None')
        computed = name_of_peak(dtype)
        measured = self.kernel_flops_per_s.get(family, {}).get(computed) if family else None
        return measured or self.flops_per_s.get(computed)

    def with_tf32(self) -> Machine:
        """Return the machine with the TF32 peak for float32; itself where it has none.

        On NVIDIA's GPUs torch runs convolutions and recurrent layers in TF32 by default
        (``torch.backends.cudnn.allow_tf32``), and matrix products only on request
        (``torch.set_float32_matmul_precision``). The utilisation of a program that does both
        lies between those of the two machines. Families of kernels whose TF32 peak was not
        measured have that of the machine.
        """
        if self.flops_per_s.get("tf32") in (None, self.flops_per_s.get("float32")):
            return self
        return replace(
            self,
            flops_per_s=_in_tf32(self.flops_per_s),
            kernel_flops_per_s={
                family: _in_tf32(peaks) for family, peaks in self.kernel_flops_per_s.items()
            },
            source=f"{self.source}; float32 work in TF32",
        )


def _in_tf32(peaks: Mapping[str, float]) -> dict[str, float]:
    """Return the peaks with that of TF32 for float32, or with none for it."""
    others = {dtype: peak for dtype, peak in peaks.items() if dtype != "float32"}
    return {**others, "float32": peaks["tf32"]} if "tf32" in peaks else others


def _check_rates(name: str, rates: Any) -> None:
    if not isinstance(rates, Mapping) or not all(type(dtype) is str for dtype in rates):
        raise ConfigError(
            f"{name} is {rates!r:.60}; expected numbers by the names of dtypes, such as "
            '{"bfloat16": 125e12}'
        )
    for dtype, rate in rates.items():
        known = name_of_peak(dtype)
        if dtype != known:
            raise ConfigError(
                f"{name} has a peak for {dtype!r}; write {known!r}, which it is looked up as"
            )
        _check_positive(f"{name}.{dtype}", rate)


def _check_positive(name: str, value: Any) -> None:
    if not is_finite(value) or value <= 0:
        raise ConfigError(f"{name} is {value!r:.60}; expected a number above 0")


def is_finite(value: Any) -> TypeGuard[float]:
    """Return whether ``value`` is a number other than NaN and the infinities."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


_SHORT_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8": "float8",
    "half": "float16",
    "float": "float32",
    "double": "float64",
}

# A complex contraction is counted in real MACs, so its peak is that of the real dtype.
_COMPUTES_AS = {
    "complex32": "float16",
    "complex64": "float32",
    "complex128": "float64",
    "uint8": "int8",
    "qint8": "int8",
    "quint8": "int8",
}


def name_of_peak(dtype: str) -> str:
    """Return the dtype whose peak work in ``dtype`` is compared with: "int8" for "uint8".

    Short names are known: "bfloat16" is returned for "bf16".
    """
    plain = dtype.removeprefix("torch.").lower()
    full = _SHORT_DTYPES.get(plain, plain)
    return "float8" if full.startswith("float8") else _COMPUTES_AS.get(full, full)


def _gpu(
    name: str,
    source: str,
    *,
    bandwidth: float,
    memory: float | None = None,
    aliases: tuple[str, ...] = (),
    links: _Links | None = None,
    **peaks: float,
) -> Machine:
    node, network, devices = links or (None, None, 1)
    return Machine(
        name=name,
        aliases=aliases,
        flops_per_s=peaks,
        bytes_per_s=bandwidth,
        memory_bytes=memory,
        node_link=node,
        network_link=network,
        devices_per_node=devices,
        source=source,
    )


_Links = tuple[Link | None, Link | None, int]
_B200 = (Link(name="NVLink 5", bytes_per_s=900 * G), None, 8)
_HOPPER = (
    Link(name="NVLink 4", bytes_per_s=450 * G),
    Link(name="400 Gb/s for each device", bytes_per_s=50 * G),
    8,
)
_AMPERE = (
    Link(name="NVLink 3", bytes_per_s=300 * G),
    Link(name="1600 Gb/s for 8 devices", bytes_per_s=25 * G),
    8,
)
_MI300X = (Link(name="XGMI", bytes_per_s=448 * G), None, 8)
_V100 = (Link(name="NVLink 2", bytes_per_s=150 * G), None, 8)
# A node of such cards has no fixed number of devices; all are reached over PCIe.
_PCIE_5 = (Link(name="PCIe 5 x16", bytes_per_s=63 * G), None, 8)
_PCIE_4 = (Link(name="PCIe 4 x16", bytes_per_s=31 * G), None, 8)


MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _gpu(
            "NVIDIA B200",
            "NVIDIA Blackwell datasheet, individual GPU of HGX B200; half of the figures with "
            "sparsity",
            bandwidth=7.7 * T, memory=180 * G, links=_B200,
            float16=2250 * T, bfloat16=2250 * T,
            float8=4500 * T, int8=4500 * T, tf32=1100 * T, float32=75 * T, float64=37 * T,
        ),
        _gpu(
            "NVIDIA H200",
            "NVIDIA H200 Tensor Core GPU datasheet (SXM); half of the figures with sparsity",
            bandwidth=4.8 * T, memory=141 * G, links=_HOPPER,
            float16=989.4 * T, bfloat16=989.4 * T,
            float8=1978.9 * T, int8=1978.9 * T, tf32=494.7 * T, float32=66.9 * T, float64=66.9 * T,
        ),
        _gpu(
            "NVIDIA H100 80GB HBM3",
            "NVIDIA H100 Tensor Core GPU architecture whitepaper, table 2 (SXM5), dense",
            aliases=("H100",),
            bandwidth=3.35 * T, memory=80 * G, links=_HOPPER,
            float16=989.4 * T, bfloat16=989.4 * T,
            float8=1978.9 * T, int8=1978.9 * T, tf32=494.7 * T, float32=66.9 * T, float64=66.9 * T,
        ),
        _gpu(
            "NVIDIA H100 PCIe",
            "NVIDIA H100 Tensor Core GPU architecture whitepaper, table 2 (PCIe), dense",
            bandwidth=2.0 * T, memory=80 * G, links=_PCIE_5,
            float16=756 * T, bfloat16=756 * T,
            float8=1513 * T, int8=1513 * T, tf32=378 * T, float32=51.2 * T, float64=51.2 * T,
        ),
        _gpu(
            "NVIDIA H200 NVL",
            "https://www.nvidia.com/en-us/data-center/h200 (H200 NVL), read in a copy; half of the "
            "figures with sparsity",
            bandwidth=4.8 * T, memory=141 * G, links=_PCIE_5,
            float16=835.5 * T, bfloat16=835.5 * T,
            float8=1670.5 * T, int8=1670.5 * T, tf32=417.5 * T, float32=60 * T, float64=60 * T,
        ),
        _gpu(
            "NVIDIA H100 NVL",
            "https://www.nvidia.com/en-us/data-center/h100 (H100 NVL), read in a copy; half of the "
            "figures with sparsity",
            bandwidth=3.9 * T, memory=94 * G, links=_PCIE_5,
            float16=835.5 * T, bfloat16=835.5 * T,
            float8=1670.5 * T, int8=1670.5 * T, tf32=417.5 * T, float32=60 * T, float64=60 * T,
        ),
        _gpu(
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A100 80GB datasheet (SXM), dense",
            bandwidth=2039 * G, memory=80 * G, links=_AMPERE,
            float16=312 * T, bfloat16=312 * T,
            int8=624 * T, tf32=156 * T, float32=19.5 * T, float64=19.5 * T,
        ),
        _gpu(
            "NVIDIA A100-SXM4-40GB",
            "NVIDIA A100 Tensor Core GPU architecture whitepaper, table 1, dense",
            bandwidth=1555 * G, memory=40 * G, links=_AMPERE,
            float16=312 * T, bfloat16=312 * T,
            int8=624 * T, tf32=156 * T, float32=19.5 * T, float64=19.5 * T,
        ),
        _gpu(
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA A100 Tensor Core GPU architecture whitepaper, table 1, dense",
            bandwidth=1555 * G, memory=40 * G, links=_PCIE_4,
            float16=312 * T, bfloat16=312 * T,
            int8=624 * T, tf32=156 * T, float32=19.5 * T, float64=19.5 * T,
        ),
        _gpu(
            "NVIDIA A100 80GB PCIe",
            "NVIDIA A100 80GB datasheet (PCIe), dense",
            bandwidth=1935 * G, memory=80 * G, links=_PCIE_4,
            float16=312 * T, bfloat16=312 * T,
            int8=624 * T, tf32=156 * T, float32=19.5 * T, float64=19.5 * T,
        ),
        _gpu(
            "NVIDIA A10",
            "https://www.nvidia.com/en-us/data-center/products/a10-gpu, read in a copy, dense",
            bandwidth=600 * G, memory=24 * G, links=_PCIE_4,
            float16=125 * T, bfloat16=125 * T,
            int8=250 * T, tf32=62.5 * T, float32=31.2 * T,
        ),
        _gpu(
            "NVIDIA L40S",
            "NVIDIA L40S datasheet, dense",
            bandwidth=864 * G, memory=48 * G, links=_PCIE_4,
            float16=362.05 * T, bfloat16=362.05 * T,
            float8=733 * T, int8=733 * T, tf32=183 * T, float32=91.6 * T,
        ),
        _gpu(
            "NVIDIA L40",
            "NVIDIA L40 datasheet, dense",
            bandwidth=864 * G, memory=48 * G, links=_PCIE_4,
            float16=181.05 * T, bfloat16=181.05 * T,
            float8=362 * T, int8=362 * T, tf32=90.5 * T, float32=90.5 * T,
        ),
        _gpu(
            "NVIDIA L4",
            "NVIDIA L4 datasheet; half of the figures with sparsity",
            bandwidth=300 * G, memory=24 * G, links=_PCIE_4,
            float16=121 * T, bfloat16=121 * T,
            float8=242.5 * T, int8=242.5 * T, tf32=60 * T, float32=30.3 * T,
        ),
        _gpu(
            "NVIDIA GeForce RTX 4090",
            "NVIDIA Ada GPU architecture whitepaper, appendix A, fp32 accumulate, dense",
            bandwidth=1008 * G,
            float16=165.2 * T, bfloat16=165.2 * T,
            float8=330.3 * T, int8=660.6 * T, tf32=82.6 * T, float32=82.6 * T,
        ),
        _gpu(
            "NVIDIA GeForce RTX 3090",
            "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A, read in copies, fp32 "
            "accumulate, dense",
            bandwidth=936 * G, memory=24 * G, links=_PCIE_4,
            float16=71 * T, bfloat16=71 * T,
            int8=284 * T, tf32=35.6 * T, float32=35.6 * T,
        ),
        _gpu(
            "Tesla V100-SXM2",
            "NVIDIA Tesla V100 GPU architecture whitepaper, table 1; float32 and float64: 80 SMs "
            "with 64 and 32 cores at 1.53 GHz, "
            "https://cvw.cac.cornell.edu/gpu-architecture/gpu-example-tesla-v100/tesla",
            aliases=("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"),
            bandwidth=900 * G, links=_V100,
            float16=125 * T, float32=15.7 * T, float64=7.8 * T,
        ),
        _gpu(
            "Tesla T4",
            "NVIDIA T4 Tensor Core GPU datasheet",
            bandwidth=320 * G, memory=16 * G,
            float16=65 * T, int8=130 * T, float32=8.1 * T,
        ),
        _gpu(
            "AMD Instinct MI300X",
            "AMD Instinct MI300X datasheet, matrix, dense",
            bandwidth=5.3 * T, memory=192 * G, links=_MI300X,
            float16=1307.4 * T, bfloat16=1307.4 * T,
            float8=2614.9 * T, int8=2614.9 * T,
            tf32=653.7 * T, float32=163.4 * T, float64=163.4 * T,
        ),
        _gpu(
            "AMD Instinct MI250X",
            "AMD CDNA 2 architecture whitepaper, matrix; half of the module's figures, "
            "for each of its two dies is a separate device",
            bandwidth=1638.4 * G, memory=64 * G,
            float16=191.5 * T, bfloat16=191.5 * T,
            int8=191.5 * T, float32=47.9 * T, float64=47.9 * T,
        ),
        _gpu(
            "TPU v3", "https://docs.cloud.google.com/tpu/docs/v3, of a chip",
            bandwidth=900 * G, memory=32 * 2**30, bfloat16=123 * T,
        ),
        _gpu(
            "TPU v4", "https://docs.cloud.google.com/tpu/docs/v4, of a chip",
            bandwidth=1200 * G, memory=32 * 2**30, bfloat16=275 * T, int8=275 * T,
        ),
        _gpu(
            "TPU v5e",
            "https://docs.cloud.google.com/tpu/docs/v5e, of a chip; half of its bidirectional ICI",
            bandwidth=819 * G, memory=16 * G, bfloat16=197 * T, int8=393 * T,
            links=(Link(name="ICI", bytes_per_s=200 * G), None, 256),
        ),
        _gpu(
            "TPU v5p", "https://docs.cloud.google.com/tpu/docs/v5p, of a chip",
            bandwidth=2765 * G, memory=95 * G, bfloat16=459 * T,
        ),
    )
}  # fmt: skip
"""Machines whose peaks are known, by the name that the driver reports.

Example::

    MACHINES["NVIDIA H200"].flops_per_s["bfloat16"]
"""


def check_machine(machine: Any) -> None:
    """Raise ConfigError if ``machine`` is neither a Machine nor None."""
    if not isinstance(machine, Machine | None):
        raise ConfigError(
            f"machine={machine!r:.60}: pass a Machine, such as one of analysis.MACHINES, or None"
        )


def find(device_name: str | None) -> Machine | None:
    """Return the machine that a driver reports as ``device_name``; None if it is not known.

    Names must match exactly: an A10G is not an A10, and a laptop's chip is not the desktop's.
    """
    for machine in MACHINES.values():
        if device_name == machine.name or device_name in machine.aliases:
            return machine
    return None
