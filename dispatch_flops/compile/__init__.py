"""Collector of the costs of graphs that torch.compile produced; it needs no dispatch mode.

    backend = counting_backend("inductor", model)
    compiled = torch.compile(model, backend=backend)
    for batch in batches:
        compiled(batch).sum().backward()
        step = backend.step()
        print(step.total.flops, step.mfu(peak_flops_per_s=989e12))

The cost of each graph is computed once, from the forward and backward graphs that AOTAutograd
passes to the compiler. Afterwards, each run of a graph only increments a counter. Code outside
the compiled graphs (an eager optimizer, code between graph breaks) is not counted.
``FlopCounterMode`` counts everything, but runs the program eagerly.
"""

from __future__ import annotations

from dispatch_flops.compile.backend import CountingBackend, counting_backend
from dispatch_flops.compile.step import Step

__all__ = ["CountingBackend", "Step", "counting_backend"]
