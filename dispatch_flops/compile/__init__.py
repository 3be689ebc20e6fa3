"""FLOPs of compiled programs, as the compiler left them, without any dispatch mode.

    backend = counting_backend("inductor", model)
    compiled = torch.compile(model, backend=backend)
    for batch in batches:
        compiled(batch).sum().backward()
        step = backend.step()
        print(step.total.flops, step.mfu(peak_flops_per_s=989e12))

Costs are computed once per compiled graph, from the forward and backward graphs that AOTAutograd
hands to the compiler; afterwards a call of a graph adds one to a number. What a program runs
outside its compiled graphs (the optimizer, code between graph breaks) is not seen here:
``FlopCounterMode`` counts all of it, at the price of running eagerly.
"""

from __future__ import annotations

from dispatch_flops.compile.backend import CountingBackend, Step, counting_backend

__all__ = ["CountingBackend", "Step", "counting_backend"]
