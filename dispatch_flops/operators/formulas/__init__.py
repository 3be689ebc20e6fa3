"""What operators cost: one file per family; importing this package fills the registry.

Where a new formula goes, by what the operator does:

- products: ``matmul`` (dense, sparse), ``linear`` (whole layers), ``scaled_matmul`` (scaled,
  grouped and weight-quantised operands), ``quantized`` (integers in and out, dynamic), ``conv``,
  ``distance`` (bilinear forms too), ``linear_cross_entropy``, ``sparse``, ``linalg``, ``fft``
- attention: ``attention`` (the SDPA kernels), ``attention_packed`` (those below them),
  ``flex_attention``, ``transformer`` (encoder layers and their pieces)
- recurrence: ``rnn`` (layers), ``rnn_cells``
- per element: ``pointwise`` (a table), ``activation``, ``loss``, ``optim``
- over elements: ``reduction``, ``softmax``, ``norm``, ``batch_norm``, ``pooling``, ``resample``,
  ``padding``, ``sorting``, ``histogram``
- moving and picking: ``scatter`` (embeddings too), ``sequence``; turning reals into integers and
  back: ``quantize``; random numbers and dropout: ``sampling``
- no arithmetic: ``free``, each group with its reason; ``comm``; ``runtime`` (torch's machinery)

A formula's docstring says what it costs, in the letters of its file: "MACs: ... FLOPs: ...", and
at its end "Source: ...", where it is not the operator's schema; ``dispatch-flops ops`` shows both.
Files that begin with an underscore are what several of them share.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")
