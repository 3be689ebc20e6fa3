"""What the formula of a module class is given in compiled code: arguments, result and sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from dispatch_flops.compile import counting_backend
from dispatch_flops.errors import UncountedWarning
from tests.helpers.opaque_blocks import BLOCK, A, Block, H, I, block_formula


def five_flops(module: nn.Module, x: Tensor, scale: float, *, out: Tensor) -> int:
    return 5


def test_formula_is_given_a_number_that_varies() -> None:
    backend = counting_backend("aot_eager", custom_mapping={Block: block_formula})
    compiled = torch.compile(Block(), backend=backend)
    for scale in (2, 3, 4, 5):
        compiled(torch.ones(A, I), scale)
        assert backend.step().total.flops == 2 * BLOCK + scale


@dataclasses.dataclass
class Output:
    y: Tensor
    name: str = "x"


@dataclasses.dataclass(frozen=True)
class FrozenOutput:
    y: Tensor


class PairOutput(NamedTuple):
    y: Tensor
    n: int


class Head(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(I, H)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return self.kind(y, 13) if self.kind is PairOutput else self.kind(y)


class Reader(nn.Module):
    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x).y
        return y


@pytest.mark.parametrize("kind", [Output, FrozenOutput, PairOutput])
@pytest.mark.parametrize("whole", [True, False])
def test_formula_is_given_the_structure_of_the_result(kind: Any, whole: bool) -> None:
    def formula(module: Head, x: Tensor, *, out: Any) -> int:
        assert type(out) is kind
        return int(out.y.shape[1]) * 11

    head = Head(kind)
    backend = counting_backend("aot_eager", custom_mapping={Head: formula})
    torch.compile(Reader(head) if whole else head, backend=backend)(torch.ones(A, I))
    assert backend.total().flops == H * 11


class Many(nn.Module):
    def forward(self, x: Tensor, *rest: Tensor, scale: int = 1, **more: Any) -> dict[str, Any]:
        return {"sum": x + rest[0].sum() + more["z"][0].sum(), "all": (x, 1, None)}


class CallsMany(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = Many()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.many(x, x[:, :2], z=[x[:1]])["sum"]
        return found


@pytest.mark.parametrize("whole", [True, False])
def test_formula_is_given_the_arguments_as_the_call_has_them(whole: bool) -> None:
    def formula(module: Many, *args: Tensor, out: Any, **kwargs: Any) -> int:
        assert [tuple(arg.shape) for arg in args] == [(A, I), (A, 2)]
        assert list(kwargs) == ["z"]
        assert kwargs["z"][0].shape == (1, I)
        assert out["sum"].shape == (A, I)
        assert out["all"][1:] == (1, None)
        return 17

    backend = counting_backend("aot_eager", custom_mapping={Many: formula})
    x = torch.ones(A, I)
    if whole:
        torch.compile(CallsMany(), backend=backend)(x)
    else:
        torch.compile(Many(), backend=backend)(x, x[:, :2], z=[x[:1]])
    assert backend.total().flops == 17


class GuardedOutput(OrderedDict[str, Any]):
    """Result like that of transformers' models: it refuses changes, and is read by attribute."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("cannot update")

    @property
    def y(self) -> Tensor:
        found: Tensor = self["y"]
        return found


class GuardedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(I, H)

    def forward(self, x: Tensor) -> GuardedOutput:
        return GuardedOutput(y=self.layer(x))


def test_formula_is_given_a_mapping_of_the_programs_own_class() -> None:
    def formula(module: nn.Module, x: Tensor, *, out: GuardedOutput) -> int:
        assert type(out) is GuardedOutput
        return out.y.shape[1]

    model = Reader(GuardedHead())
    backend = counting_backend("aot_eager", custom_mapping={GuardedHead: formula})
    torch.compile(model, backend=backend)(torch.ones(A, I))
    assert backend.total().flops == H


@dataclasses.dataclass
class Input:
    x: Tensor
    times: int
    unused: int = 0


class TakesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(I, H)

    def forward(self, given: Input) -> Tensor:
        found: Tensor = self.layer(given.x) * given.times
        return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [TakesInput, lambda: nn.Sequential(TakesInput())], ids=["alone", "within another"]
)
def test_formula_is_given_the_sizes_within_an_argument(model: Callable[[], nn.Module]) -> None:
    def formula(module: nn.Module, given: Input, *, out: Tensor) -> int:
        assert type(given) is Input
        return given.x.shape[0] * 100 + given.times

    backend = counting_backend("aot_eager", custom_mapping={TakesInput: formula})
    compiled = torch.compile(model(), backend=backend)
    for size, times in ((2, 3), (3, 5), (7, 11), (13, 17)):
        compiled(Input(torch.ones(size, I), times, unused=size))
        assert backend.step().total.flops == size * 100 + times


class Settings:
    def __init__(self, times: int) -> None:
        self.times = times


class TakesSettings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(I, H)

    def forward(self, x: Tensor, settings: Settings) -> Tensor:
        found: Tensor = self.layer(x) * settings.times
        return found


class HasSettings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = TakesSettings()
        self.settings = Settings(0)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x, self.settings)
        return found


@pytest.mark.slow
def test_formula_is_given_an_object_as_it_was_when_the_call_was_compiled() -> None:
    def formula(module: nn.Module, x: Tensor, settings: Settings, *, out: Tensor) -> int:
        return settings.times

    model = HasSettings()
    backend = counting_backend("aot_eager", custom_mapping={TakesSettings: formula})
    compiled = torch.compile(model, backend=backend)
    for times in (3, 5, 7):
        model.settings.times = times
        compiled(torch.ones(A, I))
    assert backend.step().total.flops == 3 + 5 + 7


@pytest.mark.slow
def test_formula_is_not_asked_where_an_object_has_a_number_that_varies() -> None:
    """The graph that takes any number is compiled at the second one."""

    def formula(module: nn.Module, x: Tensor, settings: Settings, *, out: Tensor) -> int:
        return settings.times

    backend = counting_backend("aot_eager", custom_mapping={TakesSettings: formula})
    compiled = torch.compile(TakesSettings(), backend=backend)
    for times in (3, 5):
        compiled(torch.ones(A, I), Settings(times))
    with pytest.warns(UncountedWarning, match="a Settings with a number that varies"):
        assert backend.step().total.flops == 3 + A * H * (2 * I + 1) + A * H


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(I, H)

    def forward(self, x: Tensor, mask: Any = None, other: Any = None) -> Tensor:
        found: Tensor = self.layer(x)
        return found


class PassesUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Unused()

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        found: Tensor = self.inner(x, mask, other=mask)
        return found


@pytest.mark.parametrize("model", [Unused, PassesUnused])
@pytest.mark.parametrize("mask", [torch.ones(A), 3, 2.5])
def test_formula_that_reads_an_argument_that_the_code_does_not_use_is_listed(
    model: Callable[[], nn.Module], mask: Any
) -> None:
    """The compiled code also runs for another value of it."""

    def formula(module: nn.Module, x: Tensor, mask: Any = None, **_: Any) -> int:
        return int(mask.shape[0] if isinstance(mask, Tensor) else mask * 1)

    backend = counting_backend("aot_eager", custom_mapping={Unused: formula})
    torch.compile(model(), backend=backend)(torch.ones(A, I), mask)
    with pytest.warns(UncountedWarning, match="does not use"):
        assert backend.step().uncounted == {"module.Unused": 1}


def test_formula_that_ignores_what_the_code_does_not_use_is_asked() -> None:
    def formula(module: nn.Module, x: Tensor, *_: Any, **__: Any) -> int:
        return 1

    backend = counting_backend("aot_eager", custom_mapping={Unused: formula}, strict=True)
    torch.compile(PassesUnused(), backend=backend)(torch.ones(A, I), torch.ones(A))
    assert backend.step().total.flops == 1


class Decorated(Block):
    """Module whose forward is wrapped by a function of the program."""

    @staticmethod
    def wrapped(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(forward)
        def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            return forward(self, *args, **kwargs)

        return wrapper

    forward = wrapped(Block.forward)


def test_formula_of_a_module_with_a_decorated_forward_is_asked() -> None:
    backend = counting_backend("aot_eager", custom_mapping={Decorated: block_formula}, strict=True)
    torch.compile(Decorated(), backend=backend)(torch.ones(A, I), scale=7)
    assert backend.step().total.flops == 2 * BLOCK + 7


def test_formula_that_ignores_a_number_that_varies_is_asked() -> None:
    backend = counting_backend("aot_eager", custom_mapping={Block: five_flops}, strict=True)
    compiled = torch.compile(Block(), backend=backend)
    for scale in (0.5, 0.25, 0.125):
        compiled(torch.ones(A, I), scale)
        assert backend.step().total.flops == 5
