"""Matrix products in every form.

a[3,5] @ b[5,7] unless stated otherwise; 11 is a batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.functional import linear as linear_bound_early

from tests.probes.probe import layer, of, op

LAST_SIZE = "a vector's only size, 5, is contracted: the peer multiplies by it once more"
BATCH_LOST = "4 items share the left matrix: 4 products, the peer's formula has the left's batch"

PROBES = (
    op("torch.mm", lambda a, b: torch.mm(a, b), of((3, 5), (5, 7)), (3, 5, 7)),
    op("torch.ops.aten.mm", lambda a, b: torch.ops.aten.mm(a, b), of((3, 5), (5, 7)), (3, 5, 7)),
    op(
        "torch.mm(out=)",
        lambda a, b: torch.mm(a, b, out=torch.empty(3, 7)),
        of((3, 5), (5, 7)),
        (3, 5, 7),
    ),
    op("a @ b", lambda a, b: a @ b, of((3, 5), (5, 7)), (3, 5, 7)),
    op("Tensor.matmul", lambda a, b: a.matmul(b), of((3, 5), (5, 7)), (3, 5, 7)),
    op(
        "torch.matmul 1-d, 1-d",
        lambda a, b: torch.matmul(a, b),
        of((5,), (5,)),
        (5,),
        note=LAST_SIZE,
    ),
    op(
        "torch.matmul 2-d, 1-d",
        lambda a, b: torch.matmul(a, b),
        of((3, 5), (5,)),
        (3, 5),
        note=LAST_SIZE,
    ),
    op("torch.matmul 1-d, 2-d", lambda a, b: torch.matmul(a, b), of((5,), (5, 7)), (5, 7)),
    op(
        "torch.matmul 3-d, 1-d",
        lambda a, b: torch.matmul(a, b),
        of((11, 3, 5), (5,)),
        (11, 3, 5),
        note=LAST_SIZE,
    ),
    op(
        "torch.matmul [3,5] @ [4,5,7]",
        lambda a, b: torch.matmul(a, b),
        of((3, 5), (4, 5, 7)),
        (4, 3, 5, 7),
        note=BATCH_LOST,
    ),
    op(
        "torch.matmul [11,1,3,5] @ [4,5,7]",
        lambda a, b: torch.matmul(a, b),
        of((11, 1, 3, 5), (4, 5, 7)),
        (11, 4, 3, 5, 7),
        note=BATCH_LOST,
    ),
    op("torch.bmm", lambda a, b: torch.bmm(a, b), of((11, 3, 5), (11, 5, 7)), (11, 3, 5, 7)),
    op(
        "torch.addmm",
        lambda c, a, b: torch.addmm(c, a, b),
        of((7,), (3, 5), (5, 7)),
        (3, 5, 7),
        note="the bias is not a MAC: 3·7 additions, counted as FLOPs",
    ),
    op(
        "Tensor.addmm_",
        lambda a, b: torch.zeros(3, 7).addmm_(a, b),
        of((3, 5), (5, 7)),
        (3, 5, 7),
    ),
    op(
        "torch._addmm_activation",
        lambda c, a, b: torch._addmm_activation(c, a, b, use_gelu=True),
        of((7,), (3, 5), (5, 7)),
        (3, 5, 7),
    ),
    op(
        "torch.baddbmm",
        lambda c, a, b: torch.baddbmm(c, a, b),
        of((11, 3, 7), (11, 3, 5), (11, 5, 7)),
        (11, 3, 5, 7),
    ),
    op(
        "torch.baddbmm(batch1=, batch2=)",
        lambda c, a, b: torch.baddbmm(c, batch1=a, batch2=b),
        of((11, 3, 7), (11, 3, 5), (11, 5, 7)),
        (11, 3, 5, 7),
    ),
    op(
        "Tensor.baddbmm",
        lambda c, a, b: c.baddbmm(a, b),
        of((11, 3, 7), (11, 3, 5), (11, 5, 7)),
        (11, 3, 5, 7),
    ),
    op(
        "torch.addbmm",
        lambda c, a, b: torch.addbmm(c, a, b),
        of((3, 7), (11, 3, 5), (11, 5, 7)),
        (11, 3, 5, 7),
    ),
    op("torch.mv", lambda a, x: torch.mv(a, x), of((3, 5), (5,)), (3, 5)),
    op("torch.addmv", lambda y, a, x: torch.addmv(y, a, x), of((3,), (3, 5), (5,)), (3, 5)),
    op("torch.dot", lambda a, b: torch.dot(a, b), of((5,), (5,)), (5,)),
    op("torch.vdot", lambda a, b: torch.vdot(a, b), of((5,), (5,)), (5,)),
    op("torch.inner", lambda a, b: torch.inner(a, b), of((3, 5), (7, 5)), (3, 5, 7)),
    op("torch.outer", lambda a, b: torch.outer(a, b), of((3,), (7,))),
    op("torch.addr", lambda c, a, b: torch.addr(c, a, b), of((3, 7), (3,), (7,))),
    op(
        "torch.tensordot",
        lambda a, b: torch.tensordot(a, b, dims=([1, 2], [0, 1])),
        of((3, 5, 11), (5, 11, 7)),
        (3, 5, 11, 7),
    ),
    op(
        "torch.linalg.multi_dot",
        lambda a, b, c: torch.linalg.multi_dot([a, b, c]),
        of((2, 3), (3, 5), (5, 7)),
        (2, 3, 5),
        (2, 5, 7),
    ),
    op("torch.matrix_power(a, 3)", lambda a: torch.matrix_power(a, 3), of((5, 5)), (2, 5, 5, 5)),
    op(
        "torch.einsum",
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        of((11, 3, 5), (11, 5, 7)),
        (11, 3, 5, 7),
    ),
    op(
        "torch.einsum(equation, [a, b])",
        lambda a, b: torch.einsum("ij,jk->ik", [a, b]),
        of((3, 5), (5, 7)),
        (3, 5, 7),
    ),
    op(
        "torch.einsum, sublists",
        lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [0, 2]),
        of((3, 5), (5, 7)),
        (3, 5, 7),
    ),
    layer(
        "nn.Linear",
        lambda: torch.nn.Linear(5, 7),
        of((3, 5)),
        (3, 5, 7),
        note="the bias is not a MAC: 3·7 additions, counted as FLOPs",
    ),
    op("F.linear", lambda x, w: F.linear(x, w), of((11, 3, 5), (7, 5)), (11, 3, 5, 7)),
    op("from F import linear", linear_bound_early, of((3, 5), (7, 5)), (3, 5, 7)),
    op(
        "F.linear(input=, weight=)",
        lambda x, w: F.linear(input=x, weight=w),
        of((3, 5), (7, 5)),
        (3, 5, 7),
    ),
    op(
        "F.linear, 1-d weight",
        lambda x, w: F.linear(x, w),
        of((3, 5), (5,)),
        (3, 5),
        note="one output a row: the peer multiplies x's elements by the weight's first size",
    ),
    op(
        "torch.vmap(F.linear)",
        lambda x, w: torch.vmap(lambda row, weight: F.linear(row, weight))(x, w),
        of((11, 3, 5), (11, 7, 5)),
        (11, 3, 5, 7),
        note="11 products run: the peer sees one item of the mapped batch",
    ),
    op(
        "torch.func.jvp of a @ b",
        lambda a, b: torch.func.jvp(torch.matmul, (a, b), (a, b)),
        of((3, 5), (5, 7)),
        (3, 3, 5, 7),
        note="three products run: a·b, da·b and a·db",
    ),
)
