"""Formulas of operators, one file per family; importing this package fills the registry.

Where a new formula goes, by what the operator does:

- products: ``matmul`` (dense, sparse), ``linear`` (whole layers), ``conv``, ``scaled_matmul``
  (scaled, grouped and weight-quantised operands), ``quantized_layers`` (integers in and out,
  dynamic), ``distance`` (bilinear forms too), ``linear_cross_entropy``, ``sparse``, ``linalg``,
  ``fft``
- attention: ``attention`` (the SDPA kernels), ``attention_packed`` (those below them),
  ``flex_attention``, ``transformer`` (encoder layers and their pieces)
- other libraries, by name: ``flash_libraries`` and ``flash_attn_3`` (attention),
  ``quantized_libraries`` (products), ``optimizer_libraries``, ``vision_libraries``,
  ``layer_libraries`` (other layers)
- recurrence: ``rnn`` (layers), ``rnn_cells``, ``quantized_recurrent``
- per element: ``pointwise`` (a table), ``activation``, ``loss``, ``fused_optimizers``
- over elements: ``reduction``, ``softmax``, ``norm``, ``batch_norm``, ``pooling``, ``resample``,
  ``padding``, ``sorting``, ``histogram``
- moving and picking: ``scatter`` (embeddings too), ``quantized_embeddings``, ``sequence``
- what is read in part, bytes alone: ``partial_access``, ``window_access``, ``resample_access``,
  ``triangle_access``
- reals to integers and back: ``fake_quantize``
- random numbers and dropout: ``sampling``
- memory that kernels allocate for themselves: ``kernel_workspaces``, ``product_workspaces``,
  ``copying_workspaces``, ``casting_workspaces`` (reductions), ``composite_workspaces``,
  ``cuda_workspaces``
- no arithmetic: ``free``, each group with its reason; ``collectives``; ``runtime`` (operators of
  torch's own machinery)

A formula's docstring states the cost in the letters of its file, "MACs: ... FLOPs: ..."; kernels of
attention are given it as a note, from ``_attention``. It ends with "Source: ..." unless the source
is the operator's schema. ``dispatch-flops ops`` shows both.
Files whose name begins with an underscore are shared by several families.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")
