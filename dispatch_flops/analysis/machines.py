"""Machines: dense peak FLOP/s per dtype and memory bandwidth, each with its source.

All peaks are dense: vendors' figures "with sparsity" are twice what a dense matmul can reach. They
are of the tensor cores (AMD: matrix cores) wherever libraries use these for the dtype. NVIDIA's
``float32`` and the V100's ``float64`` are of the vector units. TF32 has a peak of its own; see
``Machine.with_tf32``. The peaks of a machine that is not listed are unknown, and MFU is then
None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

T = 1e12
G = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Limits of one device.

    name: exactly as the driver reports it; aliases: its other names.
    flops_per_s: ``{dtype: dense peak}``. bytes_per_s: memory bandwidth; None if unknown.
    source: the document or measurement that the figures are from.

    Example::

        Machine(name="my board", flops_per_s={"float16": 125e12}, bytes_per_s=900e9)
    """

    name: str
    aliases: tuple[str, ...] = ()
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    bytes_per_s: float | None = None
    source: str = ""

    def peak(self, dtype: str | None) -> float | None:
        """Return the dense peak FLOP/s for a dtype; None if unknown."""
        if dtype is None:
            return None
        if dtype.startswith("float8"):
            dtype = "float8"
        return self.flops_per_s.get(_COMPUTES_AS.get(dtype, dtype))

    def with_tf32(self) -> Machine:
        """Return the machine with the TF32 peak for float32; itself where it has none.

        On NVIDIA's GPUs torch runs convolutions and recurrent layers in TF32 by default
        (``torch.backends.cudnn.allow_tf32``), and matrix products only on request
        (``torch.set_float32_matmul_precision``). The utilisation of a program that does both
        lies between those of the two machines.
        """
        if self.flops_per_s.get("tf32") in (None, self.flops_per_s.get("float32")):
            return self
        return replace(
            self,
            flops_per_s={**self.flops_per_s, "float32": self.flops_per_s["tf32"]},
            source=f"{self.source}; float32 work in TF32",
        )


# A complex contraction is counted in real MACs, so its peak is that of the real dtype.
_COMPUTES_AS = {
    "complex64": "float32",
    "complex128": "float64",
    "uint8": "int8",
    "qint8": "int8",
    "quint8": "int8",
}


def _gpu(
    name: str, source: str, *, bandwidth: float, aliases: tuple[str, ...] = (), **peaks: float
) -> Machine:
    return Machine(
        name=name, aliases=aliases, flops_per_s=peaks, bytes_per_s=bandwidth, source=source
    )


MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _gpu(
            "NVIDIA B200",
            "NVIDIA Blackwell datasheet, individual GPU of HGX B200; half of the figures with "
            "sparsity",
            bandwidth=7.7 * T, float16=2250 * T, bfloat16=2250 * T,
            float8=4500 * T, int8=4500 * T, tf32=1100 * T, float32=75 * T, float64=37 * T,
        ),
        _gpu(
            "NVIDIA H200",
            "NVIDIA H200 Tensor Core GPU datasheet (SXM); half of the figures with sparsity",
            bandwidth=4.8 * T, float16=989.4 * T, bfloat16=989.4 * T,
            float8=1978.9 * T, int8=1978.9 * T, tf32=494.7 * T, float32=66.9 * T, float64=66.9 * T,
        ),
        _gpu(
            "NVIDIA H100 80GB HBM3",
            "NVIDIA H100 Tensor Core GPU architecture whitepaper, table 2 (SXM5), dense",
            bandwidth=3.35 * T, float16=989.4 * T, bfloat16=989.4 * T,
            float8=1978.9 * T, int8=1978.9 * T, tf32=494.7 * T, float32=66.9 * T, float64=66.9 * T,
        ),
        _gpu(
            "NVIDIA H100 PCIe",
            "NVIDIA H100 Tensor Core GPU architecture whitepaper, table 2 (PCIe), dense",
            bandwidth=2.0 * T, float16=756 * T, bfloat16=756 * T,
            float8=1513 * T, int8=1513 * T, tf32=378 * T, float32=51.2 * T, float64=51.2 * T,
        ),
        _gpu(
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A100 80GB datasheet (SXM), dense",
            bandwidth=2039 * G, float16=312 * T, bfloat16=312 * T,
            int8=624 * T, tf32=156 * T, float32=19.5 * T, float64=19.5 * T,
        ),
        _gpu(
            "NVIDIA A100-SXM4-40GB",
            "NVIDIA A100 Tensor Core GPU architecture whitepaper, table 1, dense",
            aliases=("NVIDIA A100-PCIE-40GB",),
            bandwidth=1555 * G, float16=312 * T, bfloat16=312 * T,
            int8=624 * T, tf32=156 * T, float32=19.5 * T, float64=19.5 * T,
        ),
        _gpu(
            "NVIDIA A100 80GB PCIe",
            "NVIDIA A100 80GB datasheet (PCIe), dense",
            bandwidth=1935 * G, float16=312 * T, bfloat16=312 * T,
            int8=624 * T, tf32=156 * T, float32=19.5 * T, float64=19.5 * T,
        ),
        _gpu(
            "NVIDIA A10",
            "72 SMs at 1.695 GHz, each with the rates per clock of the NVIDIA Ampere GA102 GPU "
            "architecture whitepaper, appendix A, at full rate with fp32 accumulate, dense",
            bandwidth=600 * G, float16=125 * T, bfloat16=125 * T,
            int8=250 * T, tf32=62.5 * T, float32=31.2 * T,
        ),
        _gpu(
            "NVIDIA L40S",
            "NVIDIA L40S datasheet, dense",
            bandwidth=864 * G, float16=362.05 * T, bfloat16=362.05 * T,
            float8=733 * T, int8=733 * T, tf32=183 * T, float32=91.6 * T,
        ),
        _gpu(
            "NVIDIA L40",
            "NVIDIA L40 datasheet, dense",
            bandwidth=864 * G, float16=181.05 * T, bfloat16=181.05 * T,
            float8=362 * T, int8=362 * T, tf32=90.5 * T, float32=90.5 * T,
        ),
        _gpu(
            "NVIDIA L4",
            "NVIDIA L4 datasheet; half of the figures with sparsity",
            bandwidth=300 * G, float16=121 * T, bfloat16=121 * T,
            float8=242.5 * T, int8=242.5 * T, tf32=60 * T, float32=30.3 * T,
        ),
        _gpu(
            "NVIDIA GeForce RTX 4090",
            "NVIDIA Ada GPU architecture whitepaper, appendix A, fp32 accumulate, dense",
            bandwidth=1008 * G, float16=165.2 * T, bfloat16=165.2 * T,
            float8=330.3 * T, int8=660.6 * T, tf32=82.6 * T, float32=82.6 * T,
        ),
        _gpu(
            "NVIDIA GeForce RTX 3090",
            "82 SMs at 1.695 GHz, each with the rates per clock of the NVIDIA Ampere GA102 GPU "
            "architecture whitepaper, appendix A, fp32 accumulate (half rate), dense",
            bandwidth=936 * G, float16=71 * T, bfloat16=71 * T,
            int8=284 * T, tf32=35.6 * T, float32=35.6 * T,
        ),
        _gpu(
            "Tesla V100-SXM2",
            "NVIDIA Tesla V100 GPU architecture whitepaper, table 1; float32 and float64: 80 SMs "
            "with 64 and 32 cores at 1.53 GHz, "
            "https://cvw.cac.cornell.edu/gpu-architecture/gpu-example-tesla-v100/tesla",
            aliases=("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"),
            bandwidth=900 * G, float16=125 * T, float32=15.7 * T, float64=7.8 * T,
        ),
        _gpu(
            "Tesla T4",
            "NVIDIA T4 Tensor Core GPU datasheet",
            bandwidth=320 * G, float16=65 * T, int8=130 * T, float32=8.1 * T,
        ),
        _gpu(
            "AMD Instinct MI300X",
            "AMD Instinct MI300X datasheet, matrix, dense",
            bandwidth=5.3 * T, float16=1307.4 * T, bfloat16=1307.4 * T,
            float8=2614.9 * T, int8=2614.9 * T,
            tf32=653.7 * T, float32=163.4 * T, float64=163.4 * T,
        ),
        _gpu(
            "AMD Instinct MI250X",
            "AMD CDNA 2 architecture whitepaper, matrix; half of the module's figures, "
            "for each of its two dies is a separate device",
            bandwidth=1638.4 * G, float16=191.5 * T, bfloat16=191.5 * T,
            int8=191.5 * T, float32=47.9 * T, float64=47.9 * T,
        ),
    )
}  # fmt: skip


def find(device_name: str | None) -> Machine | None:
    """Return the machine that a driver reports as ``device_name``; None if it is not known.

    Names must match exactly: an A10G is not an A10, and a laptop's chip is not the desktop's.
    """
    for machine in MACHINES.values():
        if device_name == machine.name or device_name in machine.aliases:
            return machine
    return None
