"""Payload of a communication operator's call, and the bytes that it reads and writes.

The operators are those of ``c10d``, which collectives and point-to-point calls of
``torch.distributed`` run, and the functional ones of DTensor and compiled programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.operators.access import named_arguments
from dispatch_flops.operators.memory import nbytes, stored_parts
from dispatch_flops.operators.tensors import name_of_dtype, tensors_in
from dispatch_flops.profile import CommGroup
from dispatch_flops.profile.communication import CommKind
from dispatch_flops.profile.cost import OpCost

_MESH = "mesh_"  # what init_device_mesh calls the group of a dimension, with the dimension's name


@dataclass(frozen=True, slots=True)
class Form:
    """Names of the arguments of a communication operator.

    source: what this rank gives. target: what receives; None for the operator's result.
    """

    kind: CommKind
    source: str
    target: str | None = None


@dataclass(frozen=True, slots=True)
class CommCall:
    """One communication call; the fields are those of ``CommTotal``."""

    kind: CommKind
    op: str
    dtype: str | None
    group: CommGroup
    payload_bytes: int
    sent_bytes: tuple[int, ...] | None = None
    received_bytes: tuple[int, ...] | None = None


def _table(rows: str) -> dict[str, Form]:
    forms = {}
    for row in rows.split("\n"):
        if words := row.split():
            name, kind, source, *target = words
            forms[name] = Form(kind, source, target[0] if target else None)  # type: ignore[arg-type]
    return forms


FORMS: dict[str, Form] = _table("""
    c10d::_allgather_base_                      all_gather      input_tensor    output_tensor
    c10d::allgather_                            all_gather      input_tensors   output_tensors
    c10d::allgather_coalesced_                  all_gather      input_list      output_lists
    c10d::allgather_into_tensor_coalesced_      all_gather      inputs          outputs
    c10d::_reduce_scatter_base_                 reduce_scatter  input_tensor    output_tensor
    c10d::reduce_scatter_                       reduce_scatter  input_tensors   output_tensors
    c10d::reduce_scatter_tensor_coalesced_      reduce_scatter  inputs          outputs
    c10d::allreduce_                            all_reduce      tensors         tensors
    c10d::allreduce_coalesced_                  all_reduce      tensors         tensors
    c10d::alltoall_                             all_to_all      input_tensors   output_tensors
    c10d::alltoall_base_                        all_to_all      input           output
    c10d::broadcast_                            broadcast       tensors         tensors
    c10d::reduce_                               reduce          tensors         tensors
    c10d::gather_                               gather          input_tensors   output_tensors
    c10d::scatter_                              scatter         input_tensors   output_tensors
    c10d::send                                  send            tensors
    c10d::recv_                                 recv            tensors         tensors
    c10d::recv_any_source_                      recv            tensors         tensors
    c10d::barrier                               barrier         tensor          tensor
    c10d::monitored_barrier_                    barrier         tensor          tensor
    _c10d_functional::all_gather_into_tensor              all_gather      input
    _c10d_functional::all_gather_into_tensor_out          all_gather      input
    _c10d_functional::all_gather_into_tensor_coalesced    all_gather      inputs
    _c10d_functional::reduce_scatter_tensor               reduce_scatter  input
    _c10d_functional::reduce_scatter_tensor_out           reduce_scatter  input
    _c10d_functional::reduce_scatter_tensor_coalesced     reduce_scatter  inputs
    _c10d_functional::all_reduce                          all_reduce      input
    _c10d_functional::all_reduce_                         all_reduce      input
    _c10d_functional::all_reduce_coalesced                all_reduce      inputs
    _c10d_functional::all_reduce_coalesced_               all_reduce      inputs
    _c10d_functional::all_to_all_single                   all_to_all      input
    _c10d_functional::broadcast                           broadcast       input
    _c10d_functional::broadcast_                          broadcast       input
    _c10d_functional::isend                               send            tensor
    _c10d_functional::irecv                               recv            tensor  tensor
    _c10d_functional_autograd::all_gather_into_tensor     all_gather      input
    _c10d_functional_autograd::reduce_scatter_tensor      reduce_scatter  input
    _c10d_functional_autograd::all_to_all_single          all_to_all      input
    _dtensor::shard_dim_alltoall                          all_to_all      input
""")
_SEVERAL = "_c10d_functional::batch_p2p_ops"
LIBRARIES = frozenset(name.partition("::")[0] for name in FORMS)


def is_communication(op: Any) -> bool:
    """Return True for an operator that sends or receives."""
    return (
        isinstance(op, OpOverload)
        and op.namespace in LIBRARIES
        and (op.name() in FORMS or op.name() == _SEVERAL)
    )


def communication_of(
    op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
) -> list[CommCall]:
    """Return what a call of ``op`` that returned ``out`` sends and receives, one entry a kind.

    ``batch_p2p_ops`` alone has several entries.
    """
    arguments = named_arguments(op, args, kwargs)
    group = _process_group(arguments)
    if op.name() == _SEVERAL:
        return list(_of_batch(str(op), arguments, group))
    form = FORMS[op.name()]
    source = arguments[form.source]
    target = arguments[form.target] if form.target else out
    sent = received = None
    if form.kind == "all_to_all":
        sent, received = _shares(source, target, arguments, group)
    elif form.kind == "send":
        sent = _to_peer(arguments.get("dst"), _size(source), group)
    elif form.kind == "recv":
        received = _to_peer(arguments.get("src"), _size(source), group)
    return [
        CommCall(
            kind=form.kind,
            op=str(op),
            dtype=None if form.kind == "barrier" else _dtype(source, target),
            group=describe_group(group),
            payload_bytes=_payload(form.kind, source, target, group.size()),
            sent_bytes=sent,
            received_bytes=received,
        )
    ]


def moved_bytes(name: str, *, out: Any, **arguments: Any) -> OpCost:
    """Return the bytes that this rank reads and writes in a call of the operator ``name``.

    A broadcast reads on the rank that sends and writes on all others; only the root of a reduce
    writes.
    """
    form = FORMS[name]
    read = nbytes(arguments[form.source])
    written = nbytes(arguments[form.target] if form.target else out)
    if form.kind == "recv":
        read = 0
    elif form.kind == "send":
        written = 0
    elif "root_rank" in arguments and form.kind in ("broadcast", "reduce"):
        is_root = _process_group(arguments).rank() == arguments["root_rank"]
        if form.kind == "reduce":
            written = written if is_root else 0
        elif is_root:
            written = 0
        else:
            read = 0
    return OpCost(bytes_read=read, bytes_written=written)


def describe_group(group: Any) -> CommGroup:
    """Return the name, ranks and mesh dimension of a process group."""
    name = str(group.group_desc)
    if name in ("", "undefined"):
        name = str(group.group_name)
    mesh_dim = name.removeprefix(_MESH) if name.startswith(_MESH) else None
    ranks = _torch.ranks_of_group(group)
    return CommGroup(name=name, size=group.size(), ranks=ranks, mesh_dim=mesh_dim)


def _process_group(arguments: Mapping[str, Any]) -> Any:
    key = "process_group" if "process_group" in arguments else "group_name"
    return _torch.process_group(arguments[key])


def _payload(kind: CommKind, source: Any, target: Any, n: int) -> int:
    """Return nccl-tests' size of a collective, which every rank of the group agrees on.

    In a gather or scatter, every rank holds one share of n; the root alone holds all.
    """
    if kind == "barrier":
        return 0
    if kind == "all_gather":
        return _size(target)
    if kind == "gather":
        return n * _size(source)
    if kind == "scatter":
        return n * _size(target)
    return _size(source)


def _size(value: Any) -> int:
    """Return the bytes of all tensors, each as often as it occurs.

    All elements travel, also those that share memory, as in the gradient of a sum.
    """
    parts = (part for tensor in tensors_in(value) for part in stored_parts(tensor))
    return sum(int(part.numel()) * part.element_size() for part in parts)


def _dtype(*values: Any) -> str | None:
    dtypes = (tensor.dtype for tensor in tensors_in(values))
    found = next(dtypes, None)
    return None if found is None else name_of_dtype(found)


def _shares(
    source: Any, target: Any, arguments: Mapping[str, Any], group: Any
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the bytes of an all_to_all to and from each rank; None where they are not known."""
    return (
        _split(source, arguments.get("input_split_sizes"), group),
        _split(target, arguments.get("output_split_sizes"), group),
    )


def _split(value: Any, sizes: Sequence[int] | None, group: Any) -> tuple[int, ...] | None:
    n = group.size()
    if isinstance(value, (list, tuple)):  # a tensor for each rank
        shares = [_size(tensor) for tensor in value]
    elif isinstance(value, torch.Tensor) and sizes is not None and value.dim():
        rows = list(sizes) or [value.shape[0] // n] * n
        row = value.element_size() * value.shape[1:].numel()
        shares = [row * count for count in rows]
    else:
        return None
    if len(shares) != n:
        return None
    shares[group.rank()] = 0
    return tuple(shares)


def _to_peer(peer: int | None, size: int, group: Any) -> tuple[int, ...] | None:
    if peer is None:
        return None
    return tuple(size if rank == peer else 0 for rank in range(group.size()))


def _of_batch(op: str, arguments: Mapping[str, Any], group: Any) -> Iterator[CommCall]:
    """Yield the parts of ``batch_p2p_ops``."""
    described = describe_group(group)
    for name, peer, tensor in zip(
        arguments["op_list"], arguments["peer_list"], arguments["tensors"], strict=True
    ):
        is_send = name == "isend"
        shares = _to_peer(peer, _size(tensor), group)
        yield CommCall(
            kind="send" if is_send else "recv",
            op=op,
            dtype=_dtype(tensor),
            group=described,
            payload_bytes=_size(tensor),
            sent_bytes=shares if is_send else None,
            received_bytes=None if is_send else shares,
        )
