"""Published profiles, compared with closed forms and with the printed numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dispatch_flops import FlopCounterMode, Profile
from tests.helpers.profiling import profile_of
from tests.models.graph import FULL_SIZE, GraphShape, GraphTransformer
from tests.models.language import MegatronGPT
from tests.models.special import CifarMoE
from tests.models.vision import LeNet5


def _macs(profile: Profile) -> dict[str, int]:
    return {fqn: cost.macs for fqn, cost in profile.by_module("forward").items()}


class TestLeNet5:
    """Batch 1024 of 32 x 32 images."""

    MACS = 426_516_480
    PARAMS = 61_706

    def test_closed_form_gives_the_published_macs(self) -> None:
        assert LeNet5.module_macs(1024)[""] == self.MACS

    def test_counter_gives_the_published_totals(self) -> None:
        model = LeNet5()
        with FlopCounterMode(model, display=False) as fc:
            model(torch.ones(1024, 1, 32, 32))
        assert fc.get_total_macs() == self.MACS
        assert fc.profile.total_params == self.PARAMS

    def test_get_model_profile_gives_the_published_totals(self) -> None:
        from dispatch_flops import get_model_profile

        _, macs, params = get_model_profile(
            LeNet5(), input_shape=(1024, 1, 32, 32), print_profile=False, as_string=False
        )
        assert (macs, params) == (self.MACS, self.PARAMS)


@pytest.fixture(scope="module")
def bert() -> Profile:
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig()).eval()
    ids = torch.ones(4, TestBertBase.S, dtype=torch.long)
    with torch.no_grad():
        return profile_of(lambda: model(ids, torch.ones_like(ids)), model=model)


@pytest.mark.slow
class TestBertBase:
    """transformers' BERT-base from its configuration, 4 sequences of 128."""

    ROWS, D, FF, S = 4 * 128, 768, 3072, 128

    def test_totals_match_the_closed_form(self, bert: Profile) -> None:
        attention = 4 * self.D**2 * self.ROWS + 2 * self.S * self.ROWS * self.D
        layer = attention + 2 * self.D * self.FF * self.ROWS
        assert bert.total("forward").macs == 12 * layer + 4 * self.D**2 == 44_696_862_720
        assert bert.total_params == 109_482_240
        assert bert.uncounted_ops() == {}

    def test_modules_match_the_closed_form(self, bert: Profile) -> None:
        linear = self.ROWS * self.D * self.D
        scores = 2 * self.ROWS * self.S * self.D
        wide = self.ROWS * self.D * self.FF
        encoder = 12 * (4 * linear + scores + 2 * wide)
        layer = "encoder.layer.0"
        expected = {
            "embeddings": 0,
            "encoder": encoder,
            layer: 4 * linear + scores + 2 * wide,
            f"{layer}.attention": 4 * linear + scores,
            f"{layer}.attention.self": 3 * linear + scores,
            f"{layer}.attention.self.query": linear,
            f"{layer}.attention.output": linear,
            f"{layer}.intermediate": wide,
            f"{layer}.output": wide,
            "encoder.layer.11": 4 * linear + scores + 2 * wide,
            "pooler": 4 * self.D * self.D,
        }
        found = _macs(bert)
        assert {fqn: found[fqn] for fqn in expected} == expected

    @pytest.mark.parametrize(
        "fqn,giga,printed",
        [
            ("encoder", 1e9, 44.69),
            ("encoder.layer.0", 1e9, 3.72),
            ("encoder.layer.0.attention", 1e9, 1.31),
            ("encoder.layer.0.attention.self", 1e9, 1.01),
            ("encoder.layer.0.attention.self.query", 1e6, 301.99),
            ("encoder.layer.0.intermediate", 1e9, 1.21),
            ("pooler", 1e6, 2.36),
        ],
    )
    def test_modules_match_the_published_numbers(
        self, bert: Profile, fqn: str, giga: float, printed: float
    ) -> None:
        assert round(_macs(bert)[fqn] / giga, 2) == printed

    def test_parameters_match_the_published_numbers(self, bert: Profile) -> None:
        millions = {
            "": 109.48,
            "embeddings": 23.84,
            "encoder": 85.05,
            "encoder.layer.0": 7.09,
            "encoder.layer.0.attention": 2.36,
            "encoder.layer.0.attention.self": 1.77,
            "pooler": 0.59,
        }
        found = {fqn: round(bert.node(fqn).total_params / 1e6, 2) for fqn in millions}
        assert found == millions


@pytest.fixture(scope="module")
def moe() -> Profile:
    model = CifarMoE()
    return profile_of(model, torch.ones(4, 3, 32, 32), model=model)


class TestMixtureOfExperts:
    """The CIFAR net with two residual mixtures, batch 4.

    The published 2.81 MMACs count the perceptron that both mixtures hold four times: each of
    its two calls under each of its two parents. It runs twice.
    """

    def test_modules_match_the_closed_form(self, moe: Profile) -> None:
        expected = CifarMoE.module_macs(4)
        found = _macs(moe)
        assert {fqn: found[fqn] for fqn in expected} == expected
        twice_too_many = 2 * 4 * 84 * 84
        assert round((expected[""] + twice_too_many) / 1e6, 2) == 2.81

    @pytest.mark.parametrize(
        "fqn,kilo",
        [
            ("conv1", 1411.2),
            ("conv2", 960.0),
            ("fc1", 192.0),
            ("fc2", 40.32),
            ("fc4", 3.36),
            ("moe_layer_list.0.gate", 1.34),
            ("moe_layer_list.0.experts", 28.22),
            ("moe_layer_list.0.experts.1", 14.11),
            ("moe_layer_list.0.coefficient", 0.67),
            ("moe_layer_list.1.gate", 2.69),
            ("moe_layer_list.1.experts", 56.45),
        ],
    )
    def test_modules_match_the_published_numbers(self, moe: Profile, fqn: str, kilo: float) -> None:
        assert round(_macs(moe)[fqn] / 1e3, 2) == kilo

    def test_parameters_match_the_closed_form(self, moe: Profile) -> None:
        expected = CifarMoE.module_params()
        assert {fqn: moe.node(fqn).total_params for fqn in expected} == expected
        thousands = {"": 113.33, "moe_layer_list": 51.33, "moe_layer_list.0": 21.93}
        assert {fqn: round(expected[fqn] / 1e3, 2) for fqn in thousands} == thousands


class TestGraphTransformer:
    """Attention along edges; benchmarks/graph_transformer.py runs the full size."""

    SMALL = GraphShape(features=9, width=16, heads=3, layers=4, nodes=37, edges=101, rows=11)

    def test_closed_form_at_full_size_gives_the_known_totals(self) -> None:
        assert FULL_SIZE.module_macs()[""] == 411_819_233_792
        assert round(FULL_SIZE.params() / 1e6, 2) == 64.07

    @pytest.mark.slow
    def test_small_model_matches_the_closed_form(self) -> None:
        pytest.importorskip("torch_geometric")
        model = GraphTransformer(self.SMALL).eval()
        with torch.no_grad():
            profile = profile_of(model, *model.inputs(), model=model)
        expected = self.SMALL.module_macs()
        found = _macs(profile)
        assert {fqn: found[fqn] for fqn in expected} == expected
        assert profile.total_params == self.SMALL.params()
        assert profile.uncounted_ops() == {}
        ops = profile.by_operator("forward")
        calls = {name: total.calls for name, total in ops.items()}
        assert calls["aten.index_select.default"] >= 3 * self.SMALL.layers
        assert any(name.startswith("aten.scatter_") for name in calls)
        assert calls["aten.native_layer_norm.default"] == self.SMALL.layers - 1
        built = self.SMALL.layers
        unused = (f"convs.{built}", f"lns.{built - 1}")
        assert [profile.node(fqn).calls for fqn in unused] == [0, 0]


@pytest.fixture(scope="module")
def megatron() -> Profile:
    with torch.device("meta"):
        model = MegatronGPT(TestMegatronGPT.VOCAB, 1024, TestMegatronGPT.D, 12, 32)
        ids = torch.ones(TestMegatronGPT.SEQUENCES, TestMegatronGPT.LENGTH, dtype=torch.long)
    return profile_of(model, ids, model=model)


class TestMegatronGPT:
    """12 layers of width 8192, 32 heads, 4 sequences of 1024, vocabulary 50304, on meta."""

    D, ROWS, SEQUENCES, LENGTH, VOCAB = 8192, 4 * 1024, 4, 1024, 50304

    def test_totals_match_the_closed_form(self, megatron: Profile) -> None:
        linears = MegatronGPT.linear_macs(self.ROWS, self.D, 12, self.VOCAB)
        attention = MegatronGPT.attention_macs(self.SEQUENCES, self.LENGTH, self.D, 12)
        assert (linears, attention) == (41_270_340_747_264, 824_633_720_832)
        assert megatron.total("forward").macs == linears + attention
        by_operator: dict[str, Any] = {
            name: total.cost.macs
            for name, total in megatron.by_operator("forward").items()
            if total.cost and total.cost.macs
        }
        batched = {name for name in by_operator if "bmm" in name}
        assert sum(by_operator[name] for name in batched) == attention
        assert sum(n for name, n in by_operator.items() if name not in batched) == linears

    @pytest.mark.parametrize(
        "fqn,giga",
        [
            ("layers.0.attention.query_key_value", 824.63),
            ("layers.0.attention.dense", 274.88),
            ("layers.11.mlp", 2199.02),
            ("layers.11.mlp.dense_h_to_4h", 1099.51),
        ],
    )
    def test_modules_match_the_published_numbers(
        self, megatron: Profile, fqn: str, giga: float
    ) -> None:
        assert round(_macs(megatron)[fqn] / 1e9, 2) == giga

    def test_model_without_logits_matches_the_published_total(self, megatron: Profile) -> None:
        """The published 39584.03 G include 134.22 M per layer for the softmax."""
        softmax = 12 * self.SEQUENCES * 32 * self.LENGTH**2
        linears = MegatronGPT.linear_macs(self.ROWS, self.D, 12, 0)
        assert round((linears + softmax) / 1e9, 2) == 39584.03
        attention = MegatronGPT.attention_macs(self.SEQUENCES, self.LENGTH, self.D, 12)
        assert _macs(megatron)["layers"] == linears + attention
