"""The cases of PyTorch's own test suite for ``torch.utils.flop_counter``.

Only the import changes, and ``functools.partial`` states that FLOPs are those of contractions.
Two cases differ from PyTorch's suite on purpose, and each says why: what
``register_flop_formula`` accepts and the warning about ``mods``. Expected counts are products of
the sizes.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count

import dispatch_flops

aten = torch.ops.aten

FlopCounterMode = partial(dispatch_flops.FlopCounterMode, display=False, flops="contractions")

pytestmark = pytest.mark.filterwarnings("ignore:no cost is known")


def counted(counter: Any) -> int:
    return sum(counter.flop_counts["Global"].values())


def test_products_of_several_kinds_are_summed() -> None:
    layer = nn.Linear(11, 13)
    with FlopCounterMode() as counter:
        torch.mm(torch.randn(2, 3), torch.randn(3, 5))
        torch.addmm(torch.randn(2, 5), torch.randn(2, 3), torch.randn(3, 5), beta=0.5, alpha=0.5)
        torch.matmul(torch.randn(3, 5), torch.randn(5, 7))
        torch.einsum("ij,jk->ik", torch.randn(5, 7), torch.randn(7, 11))
        layer(torch.randn(7, 11))
    assert counted(counter) == 2 * (2 * 3 * 5 + 2 * 3 * 5 + 3 * 5 * 7 + 5 * 7 * 11 + 7 * 11 * 13)


def test_a_counter_starts_anew_with_each_block() -> None:
    counter = FlopCounterMode()
    with counter:
        torch.mm(torch.randn(2, 3), torch.randn(3, 5))
    assert counted(counter) == 2 * 2 * 3 * 5
    with counter:
        torch.bmm(torch.randn(7, 2, 3), torch.randn(7, 3, 5))
    assert counted(counter) == 2 * 7 * 2 * 3 * 5
    with counter:
        for bias in ((2, 5), (2, 1), (5,)):
            torch.addmm(torch.randn(bias), torch.randn(2, 3), torch.randn(3, 5))
    assert counted(counter) == 3 * 2 * 2 * 3 * 5
    with counter:
        torch.baddbmm(torch.randn(7, 2, 5), torch.randn(7, 2, 3), torch.randn(7, 3, 5))
    assert counted(counter) == 2 * 7 * 2 * 3 * 5
    with counter:
        torch.conv2d(torch.randn(2, 3, 7, 7), torch.randn(5, 3, 4, 4), padding=1)
    assert counted(counter) == 2 * 2 * (6 * 6) * 5 * 3 * (4 * 4)
    with counter:
        torch.conv1d(torch.randn(2, 3, 7), torch.randn(5, 3, 4), padding=1)
    assert counted(counter) == 2 * 2 * 6 * 5 * 3 * 4


def test_backward_counts_a_product_for_each_gradient() -> None:
    with FlopCounterMode() as counter:
        left = torch.randn(2, 3, requires_grad=True)
        middle = torch.mm(left, torch.randn(3, 5)).unsqueeze(0).expand(7, 2, 5)
        torch.bmm(middle, torch.randn(7, 5, 11)).sum().backward()
    assert counted(counter) == 2 * 2 * (2 * 3 * 5 + 7 * 2 * 5 * 11)


def test_second_backward_is_counted_as_the_first() -> None:
    with FlopCounterMode() as counter:
        matrix = torch.randn(3, 5, requires_grad=True)
        for _ in range(2):
            matrix.mm(matrix.t()).sum().backward()
    assert counted(counter) == 2 * 3 * (2 * 3 * 5 * 3)


def test_scripted_function_counts_as_the_plain_one() -> None:
    def square(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(square)
    for function in (square, scripted):
        with FlopCounterMode() as counter:
            function(torch.randn(5, 5))
        assert counted(counter) == 2 * 5 * 5 * 5


def test_autograd_function_counts_its_own_forward_and_backward() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return torch.mm(grad, grad) + torch.mm(grad, grad)

    with FlopCounterMode() as counter:
        Square.apply(torch.randn(5, 5, requires_grad=True)).sum().backward()
    assert counted(counter) == 2 * 3 * 5 * 5 * 5


def test_gradients_of_convolution_count_as_the_convolutions_that_they_are() -> None:
    """The gradients of a transposed convolution are two plain convolutions."""
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    weight = torch.randn(3, 5, 4, dtype=torch.float64)
    grad = torch.randn(2, 5, 19, dtype=torch.float64)
    with FlopCounterMode() as composed:
        of_x = F.conv1d(grad, weight)
        of_weight = F.conv1d(grad.transpose(1, 0), x.transpose(1, 0)).transpose(1, 0)

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (F.conv_transpose1d(x, weight) * grad).sum()

    with FlopCounterMode() as differentiated:
        grads = torch.func.grad(loss, argnums=(0, 1))(x, weight)
    torch.testing.assert_close(grads, (of_x, of_weight))
    macs = 2 * 3 * 16 * 5 * 4
    assert counted(composed) == 2 * 2 * macs
    assert counted(differentiated) == 2 * 3 * macs


@pytest.mark.parametrize("convolve", [F.conv2d, F.conv_transpose2d])
@pytest.mark.parametrize(
    ("ins", "outs", "groups"),
    [(1, 1, 1), (1, 3, 1), (3, 1, 1), (3, 7, 1), (2, 4, 2), (4, 2, 2)],
)
def test_backward_of_convolution_is_twice_its_forward(
    convolve: Any, ins: int, outs: int, groups: int
) -> None:
    """PyTorch's case names the groups and never passes them.

    Passed, torch's counter gives a grouped backward more than twice the forward: it ignores the
    groups for the weight's gradient, which needs only the channels of its own group.
    """
    is_transposed = convolve is F.conv_transpose2d
    shape = (ins, outs // groups) if is_transposed else (outs, ins // groups)
    x = torch.rand(1, ins, 5, 5, requires_grad=True)
    weight = torch.randn(*shape, 2, 2, requires_grad=True)
    with FlopCounterMode() as counter:
        convolve(x, weight, groups=groups).sum().backward()
    positions = 5 * 5 if is_transposed else 4 * 4
    forward = 2 * positions * ins * (outs // groups) * 2 * 2
    ops = counter.get_flop_counts()["Global"]
    assert ops[aten.convolution] == forward
    assert ops[aten.convolution_backward] == 2 * forward


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3, padding=1)
        self.rest = nn.Sequential(nn.Conv2d(5, 7, 3, padding=1), nn.BatchNorm2d(7), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.first(x))


def test_counts_of_a_layer_have_the_models_class_and_the_layers_name() -> None:
    model = Stage()
    with FlopCounterMode(model) as counter:
        model(torch.randn(2, 3, 8, 8, requires_grad=True)).sum().backward()
    rest = 2 * (2 * 8 * 8) * 5 * 7 * (3 * 3)
    first = 2 * (2 * 8 * 8) * 3 * 5 * (3 * 3)
    assert counter.flop_counts["Stage.rest"][aten.convolution] == rest
    assert counter.flop_counts["Stage.rest"][aten.convolution_backward] == 2 * rest
    assert counter.flop_counts["Stage"][aten.convolution] == first + rest
    assert counted(counter) == 3 * (first + rest)


def test_repeated_transposed_convolution_is_counted_each_time() -> None:
    model = nn.ConvTranspose2d(3, 7, (2, 2), stride=2)
    x = torch.rand(1, 3, 11, 5)
    with FlopCounterMode() as counter:
        for _ in range(13):
            model(x).sum().backward()
    assert counter.get_total_flops() == 13 * 2 * 2 * (11 * 5) * 3 * 7 * (2 * 2)


def test_custom_mapping_takes_formulas_of_shapes_and_of_tensors() -> None:
    x = torch.randn(3, 5)
    with FlopCounterMode(custom_mapping={aten.add: lambda *_, out_shape: 7}) as counter:
        x + x
    assert counted(counter) == 7

    def elements(*_args: Any, out_val: torch.Tensor) -> int:
        return out_val.numel()

    elements._get_raw = True  # type: ignore[attr-defined]
    with FlopCounterMode(custom_mapping={aten.add: elements}) as counter:
        x + x
    assert counted(counter) == 3 * 5


def test_pointwise_operator_counts_nothing() -> None:
    with FlopCounterMode() as counter:
        torch.randn(3, 5).cos()
    assert counted(counter) == 0


def _attention_inputs(count: int) -> list[torch.Tensor]:
    batch, length, heads, size = 2, 128, 8, 64
    shape = (batch, length, heads, size)
    return [torch.empty(shape, device="meta", dtype=torch.float16) for _ in range(count)]


def test_flash_attention_reads_its_own_layout() -> None:
    with FlopCounterMode() as counter:
        aten._flash_attention_forward(
            *_attention_inputs(3), None, None, 128, 128, 0.0, False, False
        )
    assert counted(counter) == 2 * 2 * (2 * 8) * 128 * 128 * 64


def test_backward_of_flash_attention_reads_its_own_layout() -> None:
    grad, q, k, v, out = _attention_inputs(5)
    logsumexp = torch.empty(2, 8, 128, device="meta")
    seed = torch.empty(2, dtype=torch.int64, device="meta")
    with FlopCounterMode() as counter:
        aten._flash_attention_backward(
            grad, q, k, v, out, logsumexp, None, None, 128, 128, 0.0, False, seed, None
        )
    shape = (2, 8, 128, 64)
    assert counted(counter) == 5 * 2 * (2 * 8) * 128 * 128 * 64
    assert counted(counter) == sdpa_backward_flop_count(shape, shape, shape, shape)


def test_product_into_a_given_tensor_is_counted() -> None:
    with FlopCounterMode() as counter:
        torch.mm(torch.randn(2, 3), torch.randn(3, 5), out=torch.zeros(2, 5))
    assert counted(counter) == 2 * 2 * 3 * 5


def test_hooks_are_one_of_each_kind_inside_and_none_after() -> None:
    tables = nn.modules.module
    model = nn.Linear(3, 5)
    with FlopCounterMode():
        assert len(tables._global_forward_pre_hooks) == 1
        assert len(tables._global_forward_hooks) == 1
        model(torch.randn(2, 3)).sum().backward()
    assert not tables._global_forward_pre_hooks
    assert not tables._global_forward_hooks


def test_modules_may_take_and_return_containers() -> None:
    class Square(nn.Module):
        def forward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            x = given["x"].relu_()
            return {"x": torch.mm(x, x)}

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Square()
            self.two = Square()

        def forward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return self.two(self.one(given))

    class Alone(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (torch.mm(x, x),)

    with FlopCounterMode() as counter:
        Pair()({"x": torch.randn(5, 5, requires_grad=True).clone()})["x"].sum().backward()
    assert counter.flop_counts["Pair"][aten.mm] == 2 * 3 * 2 * 5 * 5 * 5
    with FlopCounterMode() as counter:
        Alone()(torch.randn(5, 5, requires_grad=True))[0].sum().backward()
    assert counter.flop_counts["Alone"][aten.mm] == 3 * 2 * 5 * 5 * 5


def test_passing_the_model_warns_of_nothing() -> None:
    """torch's counter warns that ``mods`` is not needed, because it ignores it.

    Here it says which module is the model and which are not, so there is nothing to warn of.
    """
    model, criterion = nn.Linear(3, 5), nn.MSELoss()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counter = FlopCounterMode(model)
    with counter:
        criterion(model(torch.randn(2, 3)), torch.randn(2, 5))
    assert set(counter.flop_counts) == {"Global", "Linear"}
    with FlopCounterMode() as counter:
        criterion(model(torch.randn(2, 3)), torch.randn(2, 5))
    assert set(counter.flop_counts) == {"Global", "Linear", "MSELoss"}


def test_formula_registered_with_torch_counts_a_custom_operator() -> None:
    """PyTorch's case also tests which targets ``register_flop_formula`` refuses: that is torch's.

    Its formula may be asked once for all calls of equal shapes, as the cost is the same.
    """
    with torch.library._scoped_library("dispatch_flops_suite", "FRAGMENT"):

        @torch.library.custom_op("dispatch_flops_suite::wave", mutates_args=())
        def wave(x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        asked = []

        @register_flop_formula(torch.ops.dispatch_flops_suite.wave)
        def formula(*_args: Any, **_kwargs: Any) -> int:
            asked.append(True)
            return 9973

        with FlopCounterMode() as counter:
            wave(torch.randn(3))
    assert len(asked) == 1
    assert counted(counter) == 9973
    assert counter.flop_counts["Global"][torch.ops.dispatch_flops_suite.wave] == 9973


def test_inference_mode_counts_as_without() -> None:
    model = Stage().eval()
    x = torch.randn(2, 3, 8, 8)
    with FlopCounterMode(model) as plain:
        model(x).sum()
    with torch.inference_mode(), FlopCounterMode(model) as inferred:
        model(x).sum()
    assert counted(plain) == counted(inferred) == 2 * (2 * 8 * 8) * (3 * 5 + 5 * 7) * (3 * 3)
    layers = [counter.flop_counts["Stage.rest"] for counter in (plain, inferred)]
    assert (
        layers[0][aten.convolution]
        == layers[1][aten.convolution]
        == (2 * (2 * 8 * 8) * 5 * 7 * (3 * 3))
    )


def test_copies_keep_the_counts_and_count_on_their_own() -> None:
    counter = FlopCounterMode(nn.Linear(3, 5))
    with counter:
        torch.mm(torch.randn(2, 3), torch.randn(3, 5))
        early = copy.deepcopy(counter)
        torch.mm(torch.randn(2, 3), torch.randn(3, 5))
    late = copy.deepcopy(counter)
    assert counted(early) == 2 * 2 * 3 * 5
    assert counted(late) == counted(counter) == 2 * 2 * 2 * 3 * 5
    with early:
        torch.mm(torch.randn(7, 3), torch.randn(3, 5))
    assert counted(early) == 2 * 7 * 3 * 5
    assert counted(counter) == 2 * 2 * 2 * 3 * 5
