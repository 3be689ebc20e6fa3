"""Tensors without values, on the meta device or fake, have the counts of real ones."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from dispatch_flops import FlopCounterMode, Profile, profile_model
from tests.helpers.paths import BENCHMARKS
from tests.helpers.profiling import profile_of
from tests.helpers.untouched import model_state
from tests.models import CASES
from tests.models.case import Case

sys.path.append(str(BENCHMARKS))

import llama
import models_table

B, D, F = 3, 5, 7


def train(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    out = model(*inputs)
    out = out if isinstance(out, torch.Tensor) else torch.utils._pytree.tree_leaves(out)[0]
    out.sum().backward()


def counts(profile: Profile, phase: Any) -> dict[str, int]:
    return {fqn: cost.macs for fqn, cost in profile.by_module(phase).items()}


def with_a_quarter_of_its_steps(lstm: Case) -> Case:
    """Return the LSTM with 16 steps of its 64: each runs operators, and costs the same."""

    def inputs() -> tuple[Any, ...]:
        (x,) = lstm.inputs()
        return (x[:, : x.shape[1] // 4],)

    return dataclasses.replace(lstm, inputs=inputs, macs=lstm.macs // 4)


SMALL = [
    with_a_quarter_of_its_steps(case) if case.name == "LSTM" else case
    for case in CASES
    if case.runs_for_real
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_meta_and_fake_tensors_have_the_counts_of_real_ones(case: Any) -> None:
    profiles = {}
    for name in ("cpu", "meta", "fake"):
        with FakeTensorMode() if name == "fake" else torch.device("cpu"):
            model, inputs = case.build("cpu" if name == "fake" else name)
            try:
                profiles[name] = profile_of(train, model, inputs, model=model)
            except (NotImplementedError, DataDependentOutputException) as error:
                assert "dispatch_flops" in error.__notes__[0]  # routing depends on values
    for profile in profiles.values():
        assert counts(profile, "forward") == counts(profiles["cpu"], "forward")
        # the LSTM of oneDNN always computes the gradients of its input and first state
        if case.name != "LSTM":
            assert counts(profile, "backward") == counts(profiles["cpu"], "backward")
    assert profiles["cpu"].root.total("forward").macs == case.macs


@pytest.mark.parametrize("device", ["meta", "fake"])
class TestData:
    def run(self, device: str, function: Callable[[torch.Tensor], Any], **options: Any) -> Profile:
        with FakeTensorMode() if device == "fake" else torch.device("meta"):
            return profile_of(function, torch.ones(B, D), **options)

    @pytest.mark.parametrize("reads", [lambda x: x.sum().item(), torch.nonzero])
    def test_error_for_missing_values_names_meta_value(self, device: str, reads: Any) -> None:
        with pytest.raises((RuntimeError, NotImplementedError)) as caught:
            self.run(device, reads)
        assert any("meta_value=1" in note for note in caught.value.__notes__)

    @pytest.mark.parametrize(("answer", "taken"), [(1, D), (0, F)])
    def test_meta_value_answers_every_value_that_is_read(
        self, device: str, answer: int, taken: int
    ) -> None:
        seen = []

        def branch(x: torch.Tensor) -> torch.Tensor:
            seen.append((x.sum().item(), (x > 0).all().item(), x.long().sum().item()))
            return x @ x.new_ones(D, D if (x > 0).all() else F)

        profile = self.run(device, branch, meta_value=answer)
        assert profile.total().macs == B * D * taken
        assert seen == [(answer, answer, answer)]
        assert [type(value) for value in seen[0]] == [float, bool, int]


class Keeping(nn.Module):
    """Model that keeps tensors by length: in an attribute, a buffer, a dict and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, F)
        self.longest = 0
        self.by_length: dict[int, torch.Tensor] = {}
        self.scales: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = len(x)
        if n > self.longest:
            self.longest = n
            self.angles = torch.ones(n, 1, device=x.device)
            self.register_buffer("positions", torch.ones(n, 1, device=x.device), persistent=False)
            self.by_length[n] = torch.ones(n, 1, device=x.device)
            self.scales.append(torch.ones(n, 1, device=x.device))
        kept = self.angles * self.positions * self.by_length[n] * self.scales[0]
        return self.linear(x) * kept


@pytest.mark.parametrize("used_before", [False, True])
def test_profile_on_meta_restores_what_the_model_keeps(used_before: bool) -> None:
    model, x = Keeping(), torch.ones(B, D)
    expected = copy.deepcopy(model)(x)
    if used_before:
        model(x)
    before, unsaved = model_state(model), set(model._non_persistent_buffers_set)
    profile = profile_model(model, args=[x], device="meta")
    assert profile.total().macs == B * D * F
    assert profile.total_params == D * F + F
    assert model_state(model) == before
    assert model._non_persistent_buffers_set == unsaved
    assert len(model.scales) == len(model.by_length) == int(used_before)
    assert torch.equal(model(x), expected)


class Sealed(nn.Linear):
    """Module that refuses to set attributes, except its mode, as TorchScript does."""

    __slots__ = ("note",)
    sealed = False

    def __setattr__(self, name: str, value: Any) -> None:
        if self.sealed and name != "training":
            raise AttributeError(f"{name} is sealed")
        super().__setattr__(name, value)


def test_profile_on_meta_of_modules_without_setattr_restores_tensors() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(D, F), nn.BatchNorm1d(F)))
    model = nn.Sequential(
        scripted, Sealed(F, D), torch.jit.freeze(torch.jit.script(nn.ReLU().eval()))
    )
    model[1].__dict__["sealed"] = True
    held = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    profile = profile_model(model, args=[torch.ones(B, D)], device="meta")
    assert profile.total().macs == 2 * B * D * F
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == held
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_profile_on_meta_ignores_tensors_that_cannot_be_on_meta() -> None:
    model = nn.Linear(D, F)
    model.rates = torch.quantize_per_tensor(torch.ones(B), 1.0, 0, torch.qint8)
    model.rows = torch.nested.nested_tensor([torch.ones(B), torch.ones(D)])
    assert profile_model(model, args=[torch.ones(B, D)], device="meta").total().macs == B * D * F


def test_meta_value_does_not_change_real_values() -> None:
    found = []
    profile_of(lambda: found.append(torch.ones(3).sum().item()), meta_value=7)
    assert found == [3.0]


def test_meta_value_lets_bert_build_its_mask_on_meta() -> None:
    transformers = pytest.importorskip("transformers")
    layers, hidden, s = 2, 32, 11
    config = transformers.BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=64
    )
    with torch.device("meta"):
        model = transformers.BertModel(config).eval()
        ids, mask = torch.ones(1, s, dtype=torch.long), torch.ones(1, s)
        counter = FlopCounterMode(model, display=False, meta_value=1)
        with counter, torch.no_grad():
            model(ids, attention_mask=mask)
    layer = s * (4 * hidden**2 + 2 * hidden * 64) + 2 * s * s * hidden
    assert counter.profile.total().macs == layers * layer + hidden**2


ROWS, K, N, GROUPS = 12, 20, 28, 3  # not multiples of 8, which torch requires for bfloat16


@pytest.mark.parametrize("device", ["cpu", "meta", "fake"])
@pytest.mark.parametrize(
    ("a", "b", "macs"),
    [
        ((ROWS, K), (GROUPS, K, N), ROWS * K * N),
        ((GROUPS, ROWS, K), (K, ROWS), ROWS * K * ROWS),
        ((ROWS, K), (K, N), ROWS * K * N),
        ((GROUPS, ROWS, K), (GROUPS, K, N), GROUPS * ROWS * K * N),
    ],
)
def test_grouped_mm_of_float32_runs_on_every_device(device: str, a: Any, b: Any, macs: int) -> None:
    with FakeTensorMode() if device == "fake" else torch.device(device):
        left, right = torch.ones(a, requires_grad=True), torch.ones(b, requires_grad=True)
        ends = None if len(a) == len(b) == 3 else torch.ones(GROUPS, dtype=torch.int32).cumsum(0)
        ends = None if ends is None else (ends * 4).to(torch.int32)
        grad = torch.ones((GROUPS, ROWS, N) if len(a) == len(b) else (a[-2], b[-1]))

        def run() -> torch.Tensor:
            out = nn.functional.grouped_mm(left, right, offs=ends)
            out.backward(grad)
            return out

        profile = profile_of(run)
    assert profile.total("forward").macs == macs
    assert profile.total("backward").macs == 2 * macs
    for leaf in (left, right):
        assert leaf.grad is not None
        assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, torch.float32)


def test_grouped_mm_of_mismatched_shapes_is_refused() -> None:
    left, right = torch.ones(12, 8, device="meta"), torch.ones(3, 12, 8, device="meta")
    ends = torch.ones(3, dtype=torch.int32, device="meta")
    with (
        FlopCounterMode(display=False),
        pytest.raises(RuntimeError, match="a and b must have same reduction dim"),
    ):
        nn.functional.grouped_mm(left, right, offs=ends)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["8B", "405B"])
def test_llama_on_meta_has_its_closed_form(size: str) -> None:
    config, s = llama.CONFIGS[size], 8192
    model = llama.on_meta(config)
    profile = llama.count(model, s, backward=size == "8B")
    assert profile.total("forward").macs == config.forward_macs(1, s)
    assert profile.total_params == profile.root.active_params == config.params
    if size == "8B":
        assert profile.total("backward").macs == config.backward_macs(1, s)


CHEAP = ["gpt2", "bert", "vit", "llama-8b", "mixtral", "mamba-fused", "mamba-fused-unknown"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEAP)
def test_published_model_on_meta_has_its_closed_form(name: str) -> None:
    pytest.importorskip("transformers")
    model = models_table.MODELS[name]()
    profile = models_table.count(model)
    assert profile.total().macs == model.macs
    assert profile.total_params == model.params
    assert profile.is_lower_bound is not model.complete


def test_fused_scan_has_the_cost_of_its_operators() -> None:
    from mamba import Mamba, MambaShape, selective_scan, selective_scan_cost

    shape, s = MambaShape(layers=2, hidden=8, inner=16, state=3, rank=2, vocab=17), 5
    fused, plain = (
        profile_of(
            Mamba(shape, fused=fused).requires_grad_(False),
            torch.ones(1, s, dtype=torch.long),
            custom_mapping={selective_scan: selective_scan_cost},
        ).total()
        for fused in (True, False)
    )
    assert fused.macs == plain.macs == shape.product_macs(1, s) + shape.scan_macs(1, s)
    assert fused.flops == plain.flops


def test_fake_tensors_have_no_latency() -> None:
    with FakeTensorMode():
        model, x = nn.Linear(3, 5), torch.ones(2, 3)
        with FlopCounterMode(model, display=False, latency=True) as counter:
            model(x)
        assert profile_model(model, args=[x]).timing.latency("forward") is None
    assert counter.profile.root.latency_s is None
    assert counter.profile.total().macs == 2 * 3 * 5
