"""Signatures of calls: numbers that change with every step need no new cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispatch_flops import FlopCounterMode
from dispatch_flops.counting import dispatch_mode
from dispatch_flops.counting.plans import SHARED_PLANS

STEPS = 50
SETTLED = 6  # the first step allocates state; RAdam starts to rectify with the sixth


class Lamb(torch.optim.Optimizer):
    """A user's optimizer that works with numbers of Python: LAMB, as its paper states it."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                m = state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                v = state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                corrected = m / (1 - 0.9 ** state["step"])
                update = corrected / ((v / (1 - 0.999 ** state["step"])).sqrt() + 1e-6)
                trust = p.norm().item() / max(update.norm().item(), 1e-6)
                p.add_(update, alpha=-group["lr"] * trust)


Make = Callable[[list[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {"Lamb": lambda params: Lamb(params, lr=0.1)}
for _cls, _options in (
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adam, {"weight_decay": 0.01}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
):
    for _foreach in (True, False):
        _name = f"{_cls.__name__}{_options or ''}, foreach={_foreach}"
        OPTIMIZERS[_name] = lambda params, cls=_cls, options=_options, foreach=_foreach: cls(  # type: ignore[misc]
            params, lr=0.1, foreach=foreach, **options
        )
for _cls in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
    OPTIMIZERS[f"{_cls.__name__}, fused"] = lambda params, cls=_cls: cls(  # type: ignore[misc]
        params, lr=0.1, fused=True
    )


def priced_per_step(
    monkeypatch: pytest.MonkeyPatch, make: Make, *, device: str = "cpu"
) -> list[list[str]]:
    """Return the operators that are priced in each step of training with a schedule."""
    priced: list[str] = []
    price = dispatch_mode.cost_of_call

    def pricing(name: str, *args: Any, **kwargs: Any) -> Any:
        priced.append(name)
        return price(name, *args, **kwargs)

    monkeypatch.setattr(dispatch_mode, "cost_of_call", pricing)
    SHARED_PLANS.rules_changed()  # other tests may have priced these operators
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 2))
    model.to(device)
    optimizer = make(list(model.parameters()))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    steps = []
    with FlopCounterMode(model, display=False):
        for _ in range(STEPS):
            priced.clear()
            model(torch.ones(7, 3, device=device)).square().sum().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            steps.append(list(priced))
    return steps


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_step_with_new_numbers_prices_nothing_again(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    steps = priced_per_step(monkeypatch, make)
    assert steps[0]  # the first step prices every operator
    assert steps[SETTLED:] == [[]] * (STEPS - SETTLED)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_capturable_step_prices_nothing_again(
    monkeypatch: pytest.MonkeyPatch, cls: Any, foreach: bool
) -> None:
    adam = sys.modules["torch.optim.adam"]  # torch.optim deletes the attribute
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    steps = priced_per_step(
        monkeypatch, lambda params: cls(params, lr=0.1, foreach=foreach, capturable=True)
    )
    assert steps[0]
    assert steps[SETTLED:] == [[]] * (STEPS - SETTLED)


def flops_of(fn: Callable[[], Any]) -> list[int]:
    """Return the FLOPs so far after each of three calls in one counter."""
    found = []
    with FlopCounterMode(display=False) as counter:
        for _ in fn():
            found.append(counter.profile.total().flops)
    return found


def test_numbers_that_decide_a_cost_are_told_apart() -> None:
    x = torch.ones(2, 3)

    def program() -> Any:
        yield torch.add(x, x, alpha=2.5)  # 2 per element
        yield torch.add(x, x, alpha=1.0)  # 1
        yield torch.add(x, x, alpha=-3)  # 2
        yield torch.linalg.vector_norm(x, 3.0)  # |x|, pow 2 per element, sums 5, root 1
        yield torch.linalg.vector_norm(x, 2.0)  # square 1 per element, sums 5, root 1

    assert flops_of(program) == [12, 18, 30, 30 + 12 + 6, 48 + 6 + 6]


def test_numbers_that_decide_the_size_of_a_result_are_told_apart() -> None:
    with FlopCounterMode(display=False) as counter:
        torch.arange(3.0)
        torch.arange(7.0)
        torch.arange(0, 2, 0.5)
    assert counter.profile.total().bytes_written == 4 * (3 + 7 + 4)


def test_sizes_and_dimensions_are_told_apart() -> None:
    x = torch.ones(2, 3)

    def program() -> Any:
        yield x.sum(dim=[0])  # 3 columns, 1 sum each
        yield x.sum(dim=[1])  # 2 rows, 2 sums each
        yield torch.cumsum(x, 0)
        yield torch.cumsum(x, 1)

    assert flops_of(program) == [3, 3 + 4, 7 + 3, 10 + 4]


def test_number_that_a_users_formula_reads_is_told_apart() -> None:
    x = torch.ones(2, 3)
    own = {torch.ops.aten.mul: lambda a, b, **_: int(b)}
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        for number in (3.0, 5.0, 7.0):
            x * number
    assert counter.profile.total().flops == 3 + 5 + 7


def test_whole_and_other_numbers_in_a_list_are_told_apart() -> None:
    """The sum of whole numbers costs no FLOPs, and has 8 bytes; that with a float has 4."""
    whole = torch.ones(11, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        torch._foreach_add([whole], [1])
        torch._foreach_add([whole], [1.0])
    total = counter.profile.total()
    assert (total.flops, total.bytes_written) == (11, (8 + 4) * 11)


@pytest.mark.parametrize("devices", [("meta", "cpu"), ("cpu", "meta")])
def test_devices_whose_kernels_return_other_results_are_told_apart(
    devices: tuple[str, str],
) -> None:
    """The meta device keeps the mean and the deviation of each row in float32, as CUDA does."""
    rows, width, bfloat16 = 11, 7, 2
    SHARED_PLANS.rules_changed()
    written = {}
    for device in devices:
        layer = nn.LayerNorm(width, device=device, dtype=torch.bfloat16)
        with FlopCounterMode(display=False) as counter:
            layer(torch.empty(rows, width, device=device, dtype=torch.bfloat16))
        written[device] = counter.profile.total().bytes_written
    result = rows * width * bfloat16
    assert written == {"cpu": result + rows * 2 * bfloat16, "meta": result + rows * 2 * 4}
