"""Questions of a new user of a profiler, and what is typed to answer them in four tools.

Every answer is the last line that the typed code prints. Truths are products of the sizes of NET.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

D, FF, VOCAB, LAYERS, B, S = 12, 28, 17, 3, 2, 5

NET = f'''
import torch
from torch import nn
from torch.nn import functional as F

D, FF, VOCAB, LAYERS, B, S = {D}, {FF}, {VOCAB}, {LAYERS}, {B}, {S}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, FF), nn.GELU(), nn.Linear(FF, D))

    def forward(self, x):
        x = self.norm(x + self.attention(x))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, layers=LAYERS):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))


@torch.library.custom_op("mylib::fused", mutates_args=())
def fused(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(D, FF))

    def forward(self, x):
        return fused(x, self.w)


class Routed(nn.Module):
    """Three experts, of which all tokens take one."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        return self.experts[1](x)


def make_wide():
    net = Net()
    net.blocks[1].mlp = nn.Sequential(nn.Linear(D, 2 * FF), nn.GELU(), nn.Linear(2 * FF, D))
    return net


def ids(seq):
    return torch.arange(B * seq).view(B, seq) % VOCAB


model, x, h = Net(), ids(S), torch.ones(B * S, D)
'''

BLOCK_LINEAR = B * S * (3 * D * D + D * D + 2 * D * FF)
PRODUCTS = 2 * B * S * S * D  # attention's two
BLOCK = BLOCK_LINEAR + PRODUCTS
HEAD = B * S * D * VOCAB
MACS = LAYERS * BLOCK + HEAD
BLOCK_PARAMS = (3 * D * D + 3 * D) + (D * D + D) + 2 * D + (D * FF + FF) + (FF * D + D)
PARAMS = VOCAB * D + LAYERS * BLOCK_PARAMS + D * VOCAB + VOCAB


def macs_of(seq: int) -> int:
    tokens = B * seq
    block = tokens * (4 * D * D + 2 * D * FF) + 2 * B * seq * seq * D
    return LAYERS * block + tokens * D * VOCAB


@dataclass(frozen=True, kw_only=True)
class Task:
    """A question, its answer, what is typed in this package, and in other tools that can answer.

    truths: texts of which the last printed line must be one; with ``reads``, which the printout
        must contain.
    """

    question: str
    truths: tuple[str, ...]
    ours: str
    others: Mapping[str, str] = field(default_factory=dict)
    reads: bool = False


def task(question: str, truth: object, ours: str, *, reads: bool = False, **others: str) -> Task:
    truths = truth if isinstance(truth, tuple) else (truth,)
    return Task(
        question=question, truths=tuple(map(str, truths)), ours=ours, others=others, reads=reads
    )


OURS = "from dispatch_flops import profile_model\np = profile_model(model, args=[x])\n"
INFO = "from torchinfo import summary\ns = summary(model, input_data=[x], depth=4, verbose=0)\n"
FVCORE = "from fvcore.nn import FlopCountAnalysis\nf = FlopCountAnalysis(model, x)\n"
SPEED = (
    "from deepspeed.profiling.flops_profiler import get_model_profile\n"
    "f, macs, params = get_model_profile(model, args=[x], print_profile=False, as_string=False)\n"
)
INSIDE = (
    "from deepspeed.profiling.flops_profiler.profiler import *\n"
    "f = FlopsProfiler(model)\nf.start_profile()\nmodel(x)\nf.stop_profile()\n"
)
LIMIT = MACS - 1  # a limit that the model is above

TASKS = (
    task(
        "How many parameters has the model?",
        PARAMS,
        OURS + "print(p.total_params)",
        torchinfo=INFO + "print(s.total_params)",
        fvcore="from fvcore.nn import parameter_count\nprint(parameter_count(model)[''])",
        deepspeed=SPEED + "print(params)",
    ),
    task(
        "How many parameters has one layer, blocks.1.mlp.0?",
        D * FF + FF,
        OURS + "print(p.node('blocks.1.mlp.0').total_params)",
        torchinfo=INFO + "print(s)",
        fvcore="from fvcore.nn import parameter_count\n"
        "print(parameter_count(model)['blocks.1.mlp.0'])",
        deepspeed=INSIDE + "print(model.blocks[1].mlp[0].__params__)",
        reads=True,
    ),
    task(
        "What shape does each layer return?",
        f"[{B}, {S}, {FF}]",
        OURS + "print(p.node('blocks.1'))",
        torchinfo=INFO + "print(s)",
        reads=True,
    ),
    task(
        "With which inputs was this profile taken?",
        f"[{B}, {S}]",
        OURS + "print(p)",
        torchinfo=INFO.replace("depth=4", "col_names=['input_size']") + "print(s)",
        reads=True,
    ),
    task(
        "How many MACs has a forward pass?",
        MACS,
        OURS + "print(p.total().macs)",
        torchinfo=INFO + "print(s.total_mult_adds)",
        fvcore=FVCORE + "print(f.total())",
        deepspeed=SPEED + "print(macs)",
    ),
    task(
        "How many MACs has one block?",
        BLOCK,
        OURS + "print(p.by_module()['blocks.1'].macs)",
        torchinfo="from torchinfo import summary\n"
        "s = summary(model.blocks[1], input_data=[torch.ones(B, S, D)], verbose=0)\n"
        "print(s.total_mult_adds)",
        fvcore=FVCORE + "print(f.by_module()['blocks.1'])",
        deepspeed=INSIDE + "print(get_module_macs(model.blocks[1]))",
    ),
    task(
        "Which operator is the most expensive?",
        ("aten.addmm.default", "linear"),
        OURS + "from dispatch_flops.analysis import operator_rows\nprint(operator_rows(p)[0].op)",
        fvcore=FVCORE + "print(f.by_operator().most_common(1)[0][0])",
    ),
    task(
        "What share of the MACs are attention's two products?",
        f"{LAYERS * PRODUCTS / MACS:.4f}",
        OURS + "products = [o for name, o in p.by_operator().items() if 'attention' in name]\n"
        "print(f'{sum(o.cost.macs for o in products) / p.total().macs:.4f}')",
        deepspeed=INSIDE + "products = sum(b.attention.__macs__ for b in model.blocks)\n"
        "print(f'{products / f.get_total_macs():.4f}')",
    ),
    task(
        "Backward / forward MACs, with the embedding frozen?",
        f"{(2 * MACS - B * S * 3 * D * D) / MACS:.4f}",
        "from dispatch_flops import profile_model\nmodel.embed.requires_grad_(False)\n"
        "p = profile_model(model, args=[x], backward=True)\n"
        "print(f\"{p.total('backward').macs / p.total('forward').macs:.4f}\")",
    ),
    task(
        "How many FLOPs has the optimizer's step (SGD)?",
        2 * PARAMS,
        "from dispatch_flops import FlopCounterMode\n"
        "sgd = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with FlopCounterMode(model, display=False) as c:\n"
        "    model(x).sum().backward()\n    sgd.step()\n"
        "print(c.profile.total('optimizer').flops)",
    ),
    task(
        "What does activation checkpointing compute again?",
        B * S * 2 * D * FF,
        "from dispatch_flops import FlopCounterMode\n"
        "from torch.utils.checkpoint import checkpoint\n"
        "mlp = model.blocks[0].mlp\n"
        "with FlopCounterMode(mlp, display=False) as c:\n"
        "    checkpoint(mlp, h.requires_grad_(), use_reentrant=True).sum().backward()\n"
        "print(c.profile.total('recompute').macs)",
    ),
    task(
        "How much memory does a layer's forward take at the peak?",
        4 * (D * FF + B * S * D + B * S * FF),
        "from dispatch_flops import profile_model\n"
        "layer = nn.Linear(D, FF, bias=False)\n"
        "print(profile_model(layer, args=[h], memory=True).memory.peak_bytes)",
        torchinfo="from torchinfo import summary\nlayer = nn.Linear(D, FF, bias=False)\n"
        "s = summary(layer, input_data=[h], verbose=0)\n"
        "print(s.total_input + s.total_output_bytes + s.total_param_bytes)",
    ),
    task(
        "Does a training step of 6.4 billion parameters fit on an H100 of 80 GB?",
        12 * 16384**2 * 2 * 16 < 80e9,  # parameter, gradient and AdamW's two, 4 bytes each
        "from dispatch_flops import plan\n"
        "def build(batch):\n"
        "    layer = nn.TransformerEncoderLayer(16384, 128, 65536, batch_first=True)\n"
        "    return nn.TransformerEncoder(layer, 2), [torch.ones(batch, 8, 16384)]\n"
        "p = plan(build, 'NVIDIA H100 80GB HBM3', sizes={'batch': 1}, search_batch=False)\n"
        "print(p.steps[0].fits)",
    ),
    task(
        "How many MACs does one layer less save?",
        BLOCK,
        OURS + "q = profile_model(Net(LAYERS - 1), args=[x])\n"
        "print(p.total().macs - q.total().macs)",
        torchinfo=INFO + "t = summary(Net(LAYERS - 1), input_data=[x], verbose=0)\n"
        "print(s.total_mult_adds - t.total_mult_adds)",
        fvcore=FVCORE + "print(f.total() - FlopCountAnalysis(Net(LAYERS - 1), x).total())",
        deepspeed=SPEED + "_, less, _ = get_model_profile(\n    Net(LAYERS - 1), args=[x], "
        "print_profile=False, as_string=False\n)\nprint(macs - less)",
    ),
    task(
        "Which modules have other MACs than before a change?",
        "blocks blocks.1 blocks.1.mlp blocks.1.mlp.0 blocks.1.mlp.2",
        OURS + "from dispatch_flops import diff\n"
        "changes = diff(p, profile_model(make_wide(), args=[x])).changed_modules()\n"
        "print(*[c.name for c in changes if c.name and c.before.cost.macs != c.after.cost.macs])",
        fvcore=FVCORE + "a, b = f.by_module(), FlopCountAnalysis(make_wide(), x).by_module()\n"
        "print(*[name for name in a if name and a[name] != b[name]])",
    ),
    task(
        "Fail a build in which the model has grown.",
        "status 1",
        "dispatch-flops profile net.py:Net --input-shape 2,5:int64 --output old.json\n"
        "dispatch-flops profile net.py:make_wide --input-shape 2,5:int64 --output new.json\n"
        "dispatch-flops check new.json --baseline old.json",
        torchinfo=INFO + "assert s.total_mult_adds <= 4000",
        fvcore=FVCORE + f"assert f.total() <= {LIMIT - LAYERS * PRODUCTS}",
        deepspeed=SPEED + f"assert macs <= {LIMIT}",
    ),
    task(
        "Count a custom operator.",
        B * S * D * FF,
        "from dispatch_flops import matmul_cost, profile_model, register_flops\n"
        "register_flops('mylib::fused')(lambda a, b, *, out, **_: matmul_cost(a, b))\n"
        "print(profile_model(Custom(), args=[h]).total().macs)",
        fvcore="from fvcore.nn import FlopCountAnalysis\n"
        "def fused(inputs, outputs):\n"
        "    return inputs[0].type().sizes()[0] * inputs[1].type().sizes()[0] * "
        "inputs[1].type().sizes()[1]\n"
        "f = FlopCountAnalysis(Custom(), h).set_op_handle('mylib::fused', fused)\n"
        "print(f.total())",
    ),
    task(
        "Which operators were not counted?",
        ("mylib.fused.default", "mylib::fused"),
        "from dispatch_flops import profile_model\n"
        "print(*profile_model(Custom(), args=[h]).uncounted_ops())",
        fvcore="from fvcore.nn import FlopCountAnalysis\n"
        "f = FlopCountAnalysis(Custom(), h)\nf.total()\nprint(*f.unsupported_ops())",
    ),
    task(
        "How many MACs run in bfloat16 under autocast?",
        MACS,
        "from dispatch_flops import FlopCounterMode\n"
        "from dispatch_flops.analysis import cost_by_dtype\n"
        "with torch.autocast('cpu', torch.bfloat16), FlopCounterMode(display=False) as c:\n"
        "    model(x)\n"
        "print(cost_by_dtype(c.profile)['bfloat16'].macs)",
    ),
    task(
        "Count a layer of 10 billion parameters without its memory.",
        7 * 10**10,
        "from dispatch_flops import profile_model\n"
        "big = nn.Linear(10**5, 10**5, bias=False, device='meta')\n"
        "print(profile_model(big, (7, 10**5)).total().macs)",
        torchinfo="from torchinfo import summary\n"
        "big = nn.Linear(10**5, 10**5, bias=False, device='meta')\n"
        "print(summary(big, (7, 10**5), device='meta', verbose=0).total_mult_adds)",
        fvcore="from fvcore.nn import FlopCountAnalysis\n"
        "big = nn.Linear(10**5, 10**5, bias=False, device='meta')\n"
        "print(FlopCountAnalysis(big, torch.ones(7, 10**5, device='meta')).total())",
        deepspeed="from deepspeed.profiling.flops_profiler import get_model_profile\n"
        "big = nn.Linear(10**5, 10**5, bias=False, device='meta')\n"
        "wide = torch.ones(7, 10**5, device='meta')\n"
        "f = get_model_profile(big, args=[wide], print_profile=False, as_string=False)\n"
        "print(f[1])",
    ),
    task(
        "Which layer is the slowest?",
        "2",
        "from dispatch_flops import profile_model\n"
        "net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2048), nn.Linear(2048, 2048))\n"
        "p = profile_model(net, (512, 4))\n"
        "print(max(p.root.children, key=lambda layer: layer.latency_s).fqn)",
        deepspeed="from deepspeed.profiling.flops_profiler.profiler import *\n"
        "net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2048), nn.Linear(2048, 2048))\n"
        "f = FlopsProfiler(net)\nf.start_profile()\nnet(torch.ones(512, 4))\nf.stop_profile()\n"
        "print(max(net.named_children(), key=lambda pair: get_module_duration(pair[1]))[0])",
    ),
    task(
        "What is the MFU of 4 ns on a board of 50 TFLOP/s, counting products alone?",
        f"{2 * MACS / (50e12 * 4e-9):.4f}",
        OURS + "from dispatch_flops.analysis import Machine, mfu\n"
        "board = Machine(name='board', flops_per_s={'float32': 50e12})\n"
        "print(f\"{mfu(p, board, 4e-9, definition='contractions'):.4f}\")",
        torchinfo=INFO + "print(f'{2 * s.total_mult_adds / 50e12 / 4e-9:.4f}')",
        fvcore=FVCORE + "print(f'{2 * f.total() / 50e12 / 4e-9:.4f}')",
        deepspeed=SPEED + "print(f'{2 * macs / 50e12 / 4e-9:.4f}')",
    ),
    task(
        "How do the MACs grow over sequences of 5, 7 and 11?",
        f"{macs_of(5)} {macs_of(7)} {macs_of(11)}",
        "from dispatch_flops import profile_model\n"
        "print(*[profile_model(model, args=[ids(s)]).total().macs for s in (5, 7, 11)])",
        torchinfo="from torchinfo import summary\n"
        "print(*[summary(model, input_data=[ids(s)], verbose=0).total_mult_adds "
        "for s in (5, 7, 11)])",
        fvcore="from fvcore.nn import FlopCountAnalysis\n"
        "print(*[FlopCountAnalysis(model, ids(s)).total() for s in (5, 7, 11)])",
        deepspeed="from deepspeed.profiling.flops_profiler import get_model_profile\n"
        "print(*[\n    get_model_profile(model, args=[ids(s)], print_profile=False, "
        "as_string=False)[1]\n    for s in (5, 7, 11)\n])",
    ),
    task(
        "Write a page for a colleague without Python.",
        "<!DOCTYPE html>",
        "dispatch-flops profile net.py:Net --input-shape 2,5:int64 --output page.html\n"
        "head -1 page.html",
    ),
    task(
        "How many parameters took part, of three experts?",
        D * D + D,
        "from dispatch_flops import profile_model\n"
        "print(profile_model(Routed(), args=[h]).root.active_params)",
    ),
)
