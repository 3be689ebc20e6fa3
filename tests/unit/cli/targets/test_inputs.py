"""Inputs: shapes and dtypes as text, and what factories return."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops.cli.targets.inputs import (
    Inputs,
    as_inputs,
    build_inputs,
    convert_inputs,
    parse_dtype,
    parse_shape,
    size_of,
)
from dispatch_flops.errors import TargetError


class TestParseShape:
    @pytest.mark.parametrize(
        "text,name,sizes,dtype",
        [
            ("1,3,224,224", "", (1, 3, 224, 224), None),
            ("1x3x224", "", (1, 3, 224), None),
            ("(2, 3,)", "", (2, 3), None),
            ("5", "", (5,), None),
            ("()", "", (), None),
            ("[3, 5]", "", (3, 5), None),
            ("0,4", "", (0, 4), None),
            ("ids=1,128:int64", "ids", (1, 128), torch.int64),
            ("batch,seq:bool", "", ("batch", "seq"), torch.bool),
            ("max,x:bfloat16", "", ("max", "x"), torch.bfloat16),
        ],
    )
    def test_shape_in_any_form_is_read(
        self, text: str, name: str, sizes: tuple[Any, ...], dtype: torch.dtype | None
    ) -> None:
        spec = parse_shape(text)
        assert (spec.name, spec.sizes, spec.dtype) == (name, sizes, dtype)

    @pytest.mark.parametrize(
        "text", ["", "1,,3", "1,-2", "1.5", "a=b=1", "=1", "1:", "1,3:float33", "1:nn", "2 3"]
    )
    def test_other_text_is_refused(self, text: str) -> None:
        with pytest.raises(TargetError):
            parse_shape(text)

    def test_error_shows_how_to_write_a_shape(self) -> None:
        with pytest.raises(TargetError) as caught:
            parse_shape("2;3")
        assert str(caught.value) == (
            "--input-shape '2;3' is not a shape; write sizes such as 1,3,224,224, with a dtype "
            "1,128:int64, as a keyword argument mask=1,128"
        )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("BF16", torch.bfloat16),
        ("fp16", torch.float16),
        ("torch.Float32", torch.float32),
        ("half", torch.float16),
    ],
)
def test_parse_dtype_takes_torchs_and_short_names_in_any_case(
    name: str, dtype: torch.dtype
) -> None:
    assert parse_dtype(name) is dtype


@pytest.mark.parametrize("name", ["bfloat17", "nn"])
def test_parse_dtype_refuses_other_names(name: str) -> None:
    with pytest.raises(TargetError) as caught:
        parse_dtype(name)
    assert str(caught.value) == (
        f"dtype '{name}' is unknown; use a dtype of torch, such as float32, bfloat16 or int64"
    )


@pytest.mark.parametrize(
    ("value", "given"), [("half", "half"), (0.5, "0.5"), (-1, "-1"), ((3, 4), "3,4")]
)
def test_size_of_a_variable_that_is_not_a_size_is_refused(value: object, given: str) -> None:
    with pytest.raises(TargetError) as caught:
        size_of({"b": value}, "b", 1)
    assert str(caught.value) == (
        f"--set b={given} is not a size; give a whole number of at least 0"
    )


def test_more_elements_than_torch_can_make_are_refused() -> None:
    spec = parse_shape("b,100000000000")
    with pytest.raises(TargetError, match=r"input of shape \(10+, 10+\) cannot be made"):
        spec.build(torch.float32, {"b": 10**11}, None)


class TestBuildInputs:
    MODEL = nn.Linear(5, 7)

    def test_shapes_become_positional_and_keyword_ones(self) -> None:
        specs = (parse_shape("2,width"), parse_shape("mask=3:bool"))
        inputs = build_inputs(specs, self.MODEL, None, {"width": 5})
        assert inputs.args[0].shape == (2, 5)
        assert bool(inputs.args[0].eq(1).all())
        assert inputs.kwargs["mask"].dtype is torch.bool

    @pytest.mark.parametrize(
        "text,dtype,expected",
        [
            ("2", None, torch.float64),
            ("2", torch.int64, torch.int64),
            ("2:int32", torch.int64, torch.int32),
        ],
    )
    def test_dtype_is_the_shapes_then_the_given_then_the_models(
        self, text: str, dtype: torch.dtype | None, expected: torch.dtype
    ) -> None:
        model = nn.Linear(1, 1, dtype=torch.float64)
        assert build_inputs((parse_shape(text),), model, dtype, {}).args[0].dtype is expected

    def test_dtype_of_a_model_without_parameters_is_float32(self) -> None:
        assert build_inputs((parse_shape("2"),), nn.Identity(), None, {}).args[0].dtype is (
            torch.float32
        )

    def test_keyword_argument_given_twice_is_refused(self) -> None:
        specs = (parse_shape("mask=3"), parse_shape("mask=5"))
        with pytest.raises(TargetError) as caught:
            build_inputs(specs, self.MODEL, None, {})
        assert str(caught.value) == "--input-shape mask=... is given twice; give it once"

    def test_size_without_a_value_is_refused(self) -> None:
        with pytest.raises(TargetError) as caught:
            build_inputs((parse_shape("b,5"),), self.MODEL, None, {})
        assert str(caught.value) == "size 'b' of --input-shape has no value; add --set b=4"


@pytest.mark.parametrize(
    "made,expected",
    [
        (1, Inputs((1,))),
        ((1, 2), Inputs((1, 2))),
        ([1], Inputs((1,))),
        ({"a": 1}, Inputs((), {"a": 1})),
        (((1,), {"a": 2}), Inputs((1,), {"a": 2})),
        ((1, {"a": 2}), Inputs((1, {"a": 2}))),
        (Inputs((1,)), Inputs((1,))),
    ],
)
def test_as_inputs_accepts_what_a_factory_may_return(made: Any, expected: Inputs) -> None:
    assert as_inputs(made) == expected


def test_convert_inputs_keeps_structures_and_integers() -> None:
    pair = namedtuple("pair", "left right")
    given = Inputs((pair(torch.ones(2), [torch.ones(3), "text"]),), {"ids": torch.tensor([1])})
    converted = convert_inputs(given, "meta", torch.float64)
    (found,) = converted.args
    assert type(found) is pair
    assert (found.left.dtype, found.left.device.type) == (torch.float64, "meta")
    assert found.right[0].dtype is torch.float64
    assert found.right[1] == "text"
    assert converted.kwargs["ids"].dtype is torch.int64
