"""Prepared models: variables, inputs, dtypes and devices of a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dispatch_flops import profile_model
from dispatch_flops.cli.targets import Inputs, parse_shape, prepare
from dispatch_flops.cli.targets.libraries import Exported, HuggingFace, Timm
from dispatch_flops.cli.targets.objects import Factory
from dispatch_flops.cli.targets.preparation import find_source
from dispatch_flops.errors import TargetError


class TestFindSource:
    @pytest.mark.parametrize(
        "target,expected",
        [
            ("hf:config.json", HuggingFace(Path("config.json"), "AutoModel")),
            ("hf:folder", HuggingFace(Path("folder"), "AutoModel")),
            ("hf:config.json:BertModel", HuggingFace(Path("config.json"), "BertModel")),
            ("timm:resnet18", Timm("resnet18")),
            ("folder/model.pt2", Exported(Path("folder/model.pt2"))),
        ],
    )
    def test_prefix_or_suffix_selects_the_library(self, target: str, expected: object) -> None:
        assert find_source(target) == expected

    def test_other_targets_are_python_objects(self) -> None:
        assert isinstance(find_source("net.py:Net"), Factory)


class TestVariables:
    def test_variables_reach_factories_and_shapes(self) -> None:
        prepared = prepare(
            "net.py:Net", shapes=[parse_shape("b,width")], variables={"b": 3, "width": 11}
        )
        assert prepared.inputs.args[0].shape == (3, 11)
        assert prepared.model.get_parameter("a.weight").shape == (7, 11)

    def test_variables_reach_the_factory_of_the_inputs(self) -> None:
        prepared = prepare("net.py:Net", inputs="net.py:batch", variables={"batch": 13})
        assert prepared.inputs.kwargs["x"].shape == (13, 5)

    def test_factory_of_any_keywords_receives_all_variables(self) -> None:
        model = prepare("net.py:anything", variables={"width": 11}).model
        assert model.get_parameter("a.weight").shape == (7, 11)

    @pytest.mark.parametrize(
        "target,known", [("net.py:Net", "; they take width"), ("net.py:model", "")]
    )
    def test_variable_that_nothing_takes_is_refused(self, target: str, known: str) -> None:
        with pytest.raises(TargetError) as caught:
            prepare(target, variables={"depth": 3})
        assert str(caught.value) == (
            f"--set depth is not used: neither the target nor its inputs take it{known}"
        )


class TestInputs:
    def test_target_without_inputs_has_empty_inputs(self) -> None:
        assert prepare("net.py:Net").inputs == Inputs()

    def test_shapes_replace_the_targets_own_inputs(self) -> None:
        assert prepare("net.py:pair").inputs.args[0].shape == (3, 5)
        prepared = prepare("net.py:pair", shapes=[parse_shape("11,5")])
        assert prepared.inputs.args[0].shape == (11, 5)

    def test_shapes_with_a_factory_are_refused(self) -> None:
        with pytest.raises(TargetError) as caught:
            prepare("net.py:Net", shapes=[parse_shape("1")], inputs="net.py:batch")
        assert str(caught.value) == (
            "--input-shape and --inputs cannot be combined; give one of them"
        )

    def test_factory_of_inputs_without_a_name_is_refused(self) -> None:
        with pytest.raises(TargetError, match="NAME is a function that returns the inputs$"):
            prepare("net.py:Net", inputs="net.py")

    def test_dtype_applies_to_the_model_if_floating_point_else_to_shapes(self) -> None:
        def dtypes(dtype: str | None, *shapes: str) -> tuple[torch.dtype, ...]:
            prepared = prepare("net.py:Net", shapes=[parse_shape(s) for s in shapes], dtype=dtype)
            weight = prepared.model.get_parameter("a.weight").dtype
            return (weight, *(tensor.dtype for tensor in prepared.inputs.args))

        f32, bf16, i64 = torch.float32, torch.bfloat16, torch.int64
        assert dtypes(None, "2,5") == (f32, f32)
        assert dtypes("bfloat16", "2,5", "3:int64") == (bf16, bf16, i64)
        assert dtypes("int64", "2,5") == (f32, i64)

    @pytest.mark.parametrize("options", [{}, {"inputs": "net.py:batch"}])
    def test_dtype_that_applies_to_nothing_is_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(TargetError, match="--dtype int8 is for the inputs of --input-shape, a"):
            prepare("net.py:Net", dtype="int8", **options)

    def test_dtype_applies_to_the_inputs_of_a_factory(self) -> None:
        prepared = prepare("net.py:pair", dtype="float64")
        assert prepared.inputs.args[0].dtype is torch.float64


class TestDevice:
    def test_huge_model_on_meta_needs_no_memory(self) -> None:
        prepared = prepare("net.py:huge", device="meta")
        profile = profile_model(prepared.model, args=prepared.inputs.args, device="meta")
        assert profile.total().macs == 10**6 * 10**7 * 10**7

    def test_huge_shape_on_meta_needs_no_memory(self) -> None:
        shapes = [parse_shape(f"{2**40},width")]
        prepared = prepare("net.py:Net", shapes=shapes, variables={"width": 11}, device="meta")
        assert prepared.inputs.args[0].is_meta

    def test_factory_that_needs_data_is_built_on_the_cpu(self) -> None:
        notices: list[str] = []
        prepared = prepare("net.py:by_value", device="meta", notify=notices.append)
        assert prepared.model.get_parameter("weight").shape == (7, 5)
        assert notices == [
            "building needs data, which the meta device does not hold; building on the CPU"
        ]

    @pytest.mark.parametrize("target", ["net.py:broken", "net.py:mismatched"])
    def test_factory_that_fails_otherwise_is_not_built_again(self, target: str) -> None:
        notices: list[str] = []
        with pytest.raises(TargetError):
            prepare(target, device="meta", notify=notices.append)
        assert notices == []

    def test_module_level_model_keeps_its_data_on_meta(self) -> None:
        model = prepare("net.py:model", device="meta").model
        assert not model.get_parameter("a.weight").is_meta

    @pytest.mark.parametrize("name", ["gpu", "cuda:99"])
    def test_unusable_device_is_refused(self, name: str) -> None:
        with pytest.raises(TargetError, match=f"^device '{name}' cannot be used: "):
            prepare("net.py:Net", device=name)
