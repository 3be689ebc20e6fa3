"""Machines: names, sources and peaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dispatch_flops.analysis.kernel_families import family_of
from dispatch_flops.analysis.machines import MACHINES, Link, Machine, find
from dispatch_flops.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("NVIDIA L4", "NVIDIA L4"),
        ("NVIDIA A100-PCIE-40GB", "NVIDIA A100-PCIE-40GB"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA L40", "NVIDIA L40"),
        ("NVIDIA H100 NVL", "NVIDIA H100 NVL"),
        ("NVIDIA H200 NVL", "NVIDIA H200 NVL"),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce GTX 970", None),
        ("", None),
        (None, None),
    ],
)
def test_find_takes_the_drivers_exact_name(name: str | None, expected: str | None) -> None:
    machine = find(name)
    assert (machine.name if machine else None) == expected


def test_machine_of_the_table_has_a_source_and_sane_figures() -> None:
    for machine in MACHINES.values():
        assert machine.source
        assert machine.bytes_per_s and machine.bytes_per_s > 1e11
        assert all(find(name) is machine for name in (machine.name, *machine.aliases))
        half = machine.flops_per_s.get("float16", machine.flops_per_s.get("bfloat16"))
        assert half >= machine.flops_per_s.get("float32", half) > 1e12
        assert machine.peak("float8_e4m3fn") == machine.flops_per_s.get("float8")


def test_machine_figures_are_of_one_document() -> None:
    """An HGX B200 has 75 and 37 TFLOP/s at 7.7 TB/s; a GB200 has 80 and 40 at 8 TB/s."""
    b200 = MACHINES["NVIDIA B200"]
    peaks = (b200.flops_per_s["float32"], b200.flops_per_s["float64"], b200.bytes_per_s)
    assert peaks == (75e12, 37e12, 7.7e12)


@pytest.mark.parametrize(
    ("name", "dtype", "units", "per_clock", "clock_hz", "digits"),
    [  # SMs or CUs, what the matrix cores of each do in a clock, decimals that the source prints
        ("NVIDIA A100-SXM4-80GB", "float16", 108, 2048, 1.41e9, 0),
        ("NVIDIA A100-SXM4-80GB", "float64", 108, 128, 1.41e9, 1),
        ("NVIDIA A100-SXM4-40GB", "float64", 108, 128, 1.41e9, 1),
        ("NVIDIA A100 80GB PCIe", "float64", 108, 128, 1.41e9, 1),
        ("NVIDIA H100 80GB HBM3", "float64", 132, 256, 1.98e9, 1),
        ("NVIDIA H200", "float64", 132, 256, 1.98e9, 1),
        ("NVIDIA H100 PCIe", "float64", 114, 256, 1.755e9, 1),
        ("NVIDIA H100 NVL", "float64", 132, 256, 1.785e9, 0),
        ("NVIDIA H100 NVL", "float32", 132, 256, 1.785e9, 0),  # of the vector units
        ("NVIDIA H200 NVL", "float64", 132, 256, 1.785e9, 0),
        ("NVIDIA A10", "float16", 72, 1024, 1.695e9, 0),
        ("NVIDIA A10", "tf32", 72, 512, 1.695e9, 1),
        ("NVIDIA A10", "int8", 72, 2048, 1.695e9, 0),
        ("NVIDIA A10", "float32", 72, 256, 1.695e9, 1),  # of the vector units
        ("NVIDIA GeForce RTX 3090", "float16", 82, 512, 1.695e9, 0),
        ("NVIDIA GeForce RTX 3090", "tf32", 82, 256, 1.695e9, 1),
        ("NVIDIA GeForce RTX 3090", "float32", 82, 256, 1.695e9, 1),
        ("Tesla V100-SXM2", "float64", 80, 64, 1.53e9, 1),
        ("Tesla V100-SXM2", "float32", 80, 128, 1.53e9, 1),
        ("Tesla V100-SXM2", "float16", 80, 1024, 1.53e9, 0),
        ("AMD Instinct MI300X", "float16", 304, 2048, 2.1e9, 1),
        ("AMD Instinct MI300X", "float64", 304, 256, 2.1e9, 1),
        ("AMD Instinct MI250X", "float16", 110, 1024, 1.7e9, 1),  # one die's
        ("AMD Instinct MI250X", "float32", 110, 256, 1.7e9, 1),
        ("AMD Instinct MI250X", "float64", 110, 256, 1.7e9, 1),
    ],
)
def test_machine_peak_is_what_the_matrix_cores_of_one_device_do(
    name: str, dtype: str, units: int, per_clock: int, clock_hz: float, digits: int
) -> None:
    tera = units * per_clock * clock_hz / 1e12
    assert MACHINES[name].flops_per_s[dtype] / 1e12 == pytest.approx(round(tera, digits), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "bytes_per_s"), [("NVIDIA H100 NVL", 3.9e12), ("NVIDIA H200 NVL", 4.8e12)]
)
def test_machine_peaks_of_nvl_cards_are_half_of_those_with_sparsity(
    name: str, bytes_per_s: float
) -> None:
    """NVIDIA prints 1,671 TFLOP/s of 16 bits, 3,341 of 8 and 835 of TF32, each with sparsity."""
    machine = MACHINES[name]
    assert machine.bytes_per_s == bytes_per_s
    with_sparsity = {dtype: 2 * peak / 1e12 for dtype, peak in machine.flops_per_s.items()}
    assert with_sparsity["float16"] == with_sparsity["bfloat16"] == 1671
    assert with_sparsity["float8"] == with_sparsity["int8"] == 3341
    assert with_sparsity["tf32"] == 835


def test_machine_peak_of_the_rtx_3090_in_int8_is_printed_as_4_times_its_rounded_float16() -> None:
    """82 SMs at 1.695 GHz with 2048 a clock are 284.65 TFLOP/s; 4 x 71 are 284."""
    peaks = MACHINES["NVIDIA GeForce RTX 3090"].flops_per_s
    assert peaks["int8"] == 4 * peaks["float16"] == 284e12
    assert 284e12 < 82 * 2048 * 1.695e9 < 285e12


def test_links_of_an_h100_are_half_of_nvlinks_both_directions_and_one_adapter() -> None:
    h100 = MACHINES["NVIDIA H100 80GB HBM3"]
    assert h100.node_link is not None and h100.node_link.bytes_per_s == 900e9 / 2
    assert h100.network_link is not None and h100.network_link.bytes_per_s == 400e9 / 8


def test_peak_of_a_dtype_that_is_not_a_name_says_to_pass_the_name() -> None:
    machine = Machine(name="board", flops_per_s={"bfloat16": 3e12})
    with pytest.raises(ConfigError, match='dtype=2: pass its name, such as "bfloat16"'):
        machine.peak(2)  # type: ignore[arg-type]


def test_peak_of_a_dtype_by_a_short_name_is_that_of_its_full_name() -> None:
    machine = Machine(name="board", flops_per_s={"bfloat16": 3e12, "tf32": 2e12})
    assert machine.peak("bf16") == machine.peak("torch.bfloat16") == 3e12
    assert machine.peak("tf32") == 2e12


def test_peak_of_a_kernel_family_is_its_own_where_measured() -> None:
    machine = Machine(
        name="test",
        flops_per_s={"float32": 2.0, "float16": 5.0},
        kernel_flops_per_s={"attention": {"float32": 3.0}},
    )
    assert machine.peak("float32", "attention") == 3.0
    assert machine.peak("float32", "convolution") == 2.0
    assert machine.peak("float32") == 2.0
    assert machine.peak("float16", "attention") == 5.0


@pytest.mark.parametrize(
    ("op", "family"),
    [
        ("aten.addmm.default", "product"),
        ("product", "product"),
        ("recurrent", "recurrent"),
        ("aten.linear.default", "product"),
        ("aten.convolution_backward.default", "convolution"),
        ("aten._scaled_dot_product_flash_attention.default", "attention"),
        ("torch_attn._varlen_attn_backward.default", "attention"),
        ("flash_attn_3.fwd.default", "attention"),
        ("module.LlamaAttention", "attention"),
        ("module.Linear", "product"),
        ("module.Conv2d", "convolution"),
        ("module.LSTM", "recurrent"),
        ("module.GELU", None),
        ("aten.mkldnn_rnn_layer.default", "recurrent"),
        ("aten.lstm.input", "recurrent"),
        ("aten.add.Tensor", None),
        ("aten.norm.Scalar", None),
        ("aten._weight_int4pack_mm_for_cpu.default", "product"),
        ("quantized.conv2d_relu.default", "convolution"),
        ("aten.quantized_gru_cell.default", "recurrent"),
        ("aten._euclidean_dist.default", "product"),
        ("aten.linalg_matrix_exp.default", "product"),
        ("aten.affine_grid_generator.default", "product"),
        ("aten._transformer_encoder_layer_fwd.default", "product"),
        ("torchao.mx_fp8_bf16.default", "product"),
        ("aten.upsample_bilinear2d.vec", None),
        ("aten.lgamma.default", None),
        ("aten.mvlgamma.default", None),
        ("aten.cummax.default", None),
        ("attention_library.rotate.default", None),
        ("prims.convert_element_type.default", None),
    ],
)
def test_family_of_an_operator(op: str, family: str | None) -> None:
    assert family_of(op) == family


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"flops_per_s": 7e12}, r"flops_per_s is 7000000000000.0; expected numbers by the names"),
        ({"flops_per_s": {torch.bfloat16: 7e12}}, r"flops_per_s is .torch.bfloat16: .*bfloat16"),
        ({"flops_per_s": {"int8": "7e12"}}, "flops_per_s.int8 is '7e12'; expected a number above"),
        ({"name": ""}, "name is ''; expected the machine's name"),
        ({"name": None}, "name is None"),
        ({"aliases": "H100"}, "aliases is 'H100'; expected a tuple of names"),
        ({"aliases": (100,)}, r"aliases is \(100,\); expected a tuple of names"),
        ({"devices_per_node": True}, "devices_per_node is True"),
        (
            {"kernel_flops_per_s": {"matmul": {"float32": 7e12}}},
            "a table for 'matmul'; the families of kernels are product, convolution, attention",
        ),
        ({"flops_per_s": {"BF16": 7e12}}, "a peak for 'BF16'; write 'bfloat16'"),
        ({"flops_per_s": {"torch.half": 7e12}}, "a peak for 'torch.half'; write 'float16'"),
        ({"flops_per_s": {"float8_e4m3fn": 7e12}}, "a peak for 'float8_e4m3fn'; write 'float8'"),
        ({"flops_per_s": {"complex64": 7e12}}, "a peak for 'complex64'; write 'float32'"),
        ({"flops_per_s": {"complex32": 7e12}}, "a peak for 'complex32'; write 'float16'"),
        ({"flops_per_s": {"bf16": 7e12}}, "flops_per_s has a peak for 'bf16'; write 'bfloat16'"),
        ({"kernel_flops_per_s": 7e12}, "kernel_flops_per_s is 7.*; expected a dict of tables"),
        ({"kernel_flops_per_s": {"product": {"int8": 0}}}, "kernel_flops_per_s.product.int8 is 0"),
        ({"bytes_per_s": float("inf")}, "bytes_per_s is inf; expected a number above 0"),
        ({"memory_bytes": True}, "memory_bytes is True; expected a number above 0"),
        ({"devices_per_node": 2.5}, "devices_per_node is 2.5; expected an int above 0"),
        ({"node_link": 3e9}, "node_link is 3000000000.0; expected a Link or None"),
    ],
)
def test_machine_of_wrong_figures_names_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Machine(**{"name": "mine", **fields})


def test_link_of_wrong_figures_names_the_field() -> None:
    with pytest.raises(ConfigError, match="bytes_per_s is -3; expected a number above 0"):
        Link(bytes_per_s=-3)
    for latency in (-1e-6, float("inf"), "fast"):
        with pytest.raises(ConfigError, match=rf"latency_s is {latency!r}; expected seconds, 0 or"):
            Link(bytes_per_s=3e9, latency_s=latency)  # type: ignore[arg-type]
