"""On a CUDA device: latency against torch.profiler's kernel times, and MFU of a large matmul.

    python benchmarks/gpu.py

Expect a bfloat16 matmul of 8192 to reach 65-75 % of the datasheet's peak: random numbers draw more
power than that peak's clock allows. Latency should be the kernels' time or slightly more, both in a
separate pass and in one that counts. It is n/a where CUPTI may not see kernels.
"""

from __future__ import annotations

import torch
from tabulate import tabulate
from torch import nn
from torch.profiler import ProfilerActivity, profile

from dispatch_flops import FlopCounterMode, analysis, measure_machine, profile_model
from dispatch_flops.analysis import latency_of
from dispatch_flops.units import fraction_text, number_text, ratio, seconds_text


def kernel_s(model: nn.Module, x: torch.Tensor) -> float:
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        model(x)
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in prof.key_averages()) / 1e6)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device found")
        return 2
    measured = measure_machine("cuda", [torch.float32, torch.bfloat16])
    print(f"{measured.name}, torch {torch.__version__}")
    print(f"measured: {measured.flops_per_s}, {measured.bytes_per_s:.3e} bytes/s")
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for edge, layers in ((1024, 16), (4096, 8), (8192, 2)):
            model = nn.Sequential(
                *(nn.Linear(edge, edge, bias=False, dtype=dtype) for _ in range(layers))
            ).cuda()
            x = torch.randn(edge, edge, device="cuda", dtype=dtype)
            found = profile_model(model, args=[x], warm_up=5, repeats=9)
            sheet = analysis.machine_of(found)
            whole, kernels = latency_of(found.root) or 0.0, kernel_s(model, x)
            with FlopCounterMode(model, display=False, latency=True) as counter:
                model(x)
            one_pass = latency_of(counter.profile.root) or 0.0
            parts = sum(child.latency_s or 0.0 for child in found.root.children)
            rows.append(
                [
                    f"{layers} x {edge} {str(dtype).removeprefix('torch.')}",
                    seconds_text(whole),
                    *map(number_text, (ratio(whole, kernels), ratio(one_pass, kernels))),
                    number_text(ratio(parts, whole)),
                    *(fraction_text(analysis.mfu(found, m, whole)) for m in (measured, sheet)),
                ]
            )
    print(
        tabulate(
            rows,
            [
                "linears",
                "latency",
                "/ kernels",
                "one pass / kernels",
                "children / whole",
                "MFU measured",
                "MFU sheet",
            ],
            disable_numparse=True,
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
