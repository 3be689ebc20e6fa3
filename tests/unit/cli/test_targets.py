"""Targets: found, built, given inputs; every mistake is one clear line."""

from __future__ import annotations

import json
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from dispatch_flops import profile_model
from dispatch_flops.cli.targets import Inputs, Subject, find, parse_dtype, parse_shape, prepare
from dispatch_flops.cli.targets.inputs import as_inputs
from dispatch_flops.errors import TargetError

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.a = nn.Linear(width, 7)
    def forward(self, x, mask=None):
        return self.a(x)

def pair(width=5, batch=3):
    return Net(width), torch.ones(batch, width)

def anything(**options):
    return Net(**options)

def huge():
    return nn.Linear(10**7, 10**7), torch.ones(10**6, 10**7)

def by_value():
    rates = [rate.item() for rate in torch.linspace(0, 4, 3)]
    return nn.Linear(5, int(rates[-1]) + 3)

def needs(width):
    return Net(width)

def broken():
    raise ValueError("first line\\nsecond line")

def announced():
    raise ValueError("these are wrong:\\n\\n  the first:\\n    it is 3\\nthird line")

def silent():
    raise ValueError("these are wrong:")

def mismatched():
    return torch.ones(2, 3) @ torch.ones(2, 3)

def number():
    return 3

def batch(batch=2):
    return {"x": torch.ones(batch, 5)}

class Holder:
    make = staticmethod(lambda: Net())

model = Net()
constant = 3
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own, with net.py in it, and nothing imported left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (tmp_path / "net.py").write_text(NET)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "net" in name.split("_") or name.startswith(("net", "dispatch_flops_target", "pack")):
            del sys.modules[name]


def _shape(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


class TestFinding:
    @pytest.mark.parametrize(
        "target", ["net.py:Net", "net.py:model", "net.py:anything", "net.py:Holder.make", "net:Net"]
    )
    def test_models_in_files_and_modules(self, target: str) -> None:
        subject = prepare(target)
        assert type(subject.model).__name__ == "Net"
        assert subject.inputs == Inputs()

    def test_a_file_may_import_its_neighbours(self, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "net_neighbour.py").write_text("WIDTH = 11\n")
        (tmp_path / "sub" / "net_main.py").write_text(
            "from net_neighbour import WIDTH\nfrom torch import nn\n"
            "def make(): return nn.Linear(WIDTH, 3)\n"
        )
        model = prepare("sub/net_main.py:make").model
        assert isinstance(model, nn.Linear)
        assert model.in_features == 11

    def test_a_package(self, tmp_path: Path) -> None:
        (tmp_path / "pack").mkdir()
        (tmp_path / "pack" / "inner.py").write_text(NET)
        assert type(prepare("pack.inner:Net").model).__name__ == "Net"

    @pytest.mark.parametrize(
        "target,words",
        [
            ("net.py", "names no factory: write net.py:NAME"),
            ("", "names no factory"),
            (":x", "names no factory"),
            ("missing.py:x", "no file 'missing.py'"),
            ("missing_package.inner:x", "no module 'missing_package'"),
            ("net.missing:x", "no module 'net.missing'"),
            ("net.py:Nett", "no 'Nett'; did you mean Net"),
            ("net.py:constant", "of type int"),
            ("net.py:number", "gave a value of type int"),
            ("net.py:needs", "needs width: give it with --set width=..."),
            ("net.py:broken", "raised: ValueError: first line"),
            ("net.py:announced", "raised: ValueError: these are wrong: the first: it is 3"),
            ("net.py:silent", "raised: ValueError: these are wrong:"),
            ("bad.py:x", "importing bad.py raised: SyntaxError"),
            ("nested.py:x", "importing nested.py raised: ModuleNotFoundError"),
            ("missing.pt2", "no file 'missing.pt2'"),
            ("net.pt2", "no file that torch.export.save wrote"),
            ("hf:missing.json", "hf: takes the path of a config.json"),
            ("hf:net.py", "is no JSON"),
            ("hf:empty.json", 'has no "model_type"'),
        ],
    )
    def test_mistakes(self, target: str, words: str, tmp_path: Path) -> None:
        (tmp_path / "bad.py").write_text("def (")
        (tmp_path / "nested.py").write_text("import missing_dependency")
        (tmp_path / "net.pt2").write_text("no archive")
        (tmp_path / "empty.json").write_text("{}")
        with pytest.raises(TargetError) as caught:
            prepare(target)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_the_users_error_is_the_cause(self) -> None:
        with pytest.raises(TargetError) as caught:
            prepare("net.py:broken")
        assert isinstance(caught.value.__cause__, ValueError)

    def test_a_file_that_cannot_be_imported_leaves_no_module(self, tmp_path: Path) -> None:
        (tmp_path / "net_bad.py").write_text("raise RuntimeError('no')")
        with pytest.raises(TargetError):
            prepare("net_bad.py:x")
        assert "dispatch_flops_target_net_bad" not in sys.modules


class TestVariables:
    def test_they_reach_factories_and_shapes(self) -> None:
        subject = prepare(
            "net.py:Net", shapes=[parse_shape("b,width")], variables={"b": 3, "width": 11}
        )
        assert _shape(subject.inputs.args[0]) == (3, 11)
        assert subject.model.get_parameter("a.weight").shape == (7, 11)

    def test_shapes_on_the_meta_device_take_no_memory(self) -> None:
        shapes = [parse_shape(f"{2**40},width")]
        subject = prepare("net.py:Net", shapes=shapes, variables={"width": 11}, device="meta")
        assert subject.inputs.args[0].is_meta

    def test_they_reach_the_factory_of_the_inputs(self) -> None:
        subject = prepare("net.py:Net", inputs="net.py:batch", variables={"batch": 13})
        assert _shape(subject.inputs.kwargs["x"]) == (13, 5)

    def test_a_factory_with_any_keywords_gets_all(self) -> None:
        model = prepare("net.py:anything", variables={"width": 11}).model
        assert model.get_parameter("a.weight").shape == (7, 11)

    def test_one_that_nothing_takes_is_refused(self) -> None:
        with pytest.raises(TargetError, match=r"--set depth: .*\(they take width\)"):
            prepare("net.py:Net", variables={"depth": 3})

    def test_a_size_that_is_none(self) -> None:
        with pytest.raises(TargetError, match="--set b=half: this must be a size"):
            prepare("net.py:Net", shapes=[parse_shape("b,5")], variables={"b": "half"})


class TestShapes:
    @pytest.mark.parametrize(
        "text,name,sizes,dtype",
        [
            ("1,3,224,224", "", (1, 3, 224, 224), None),
            ("1x3x224", "", (1, 3, 224), None),
            ("(2, 3,)", "", (2, 3), None),
            ("5", "", (5,), None),
            ("()", "", (), None),
            ("0,4", "", (0, 4), None),
            ("ids=1,128:int64", "ids", (1, 128), torch.int64),
            ("batch,seq:bool", "", ("batch", "seq"), torch.bool),
            ("max,x:bfloat16", "", ("max", "x"), torch.bfloat16),
        ],
    )
    def test_read(
        self, text: str, name: str, sizes: tuple[Any, ...], dtype: torch.dtype | None
    ) -> None:
        spec = parse_shape(text)
        assert (spec.name, spec.sizes, spec.dtype) == (name, sizes, dtype)

    @pytest.mark.parametrize(
        "text", ["", "1,,3", "1,-2", "1.5", "a=b=1", "=1", "1:", "1,3:float33", "1:nn", "2 3"]
    )
    def test_refused(self, text: str) -> None:
        with pytest.raises(TargetError):
            parse_shape(text)

    def test_dtypes(self) -> None:
        assert parse_dtype("bfloat16") is parse_dtype("torch.bfloat16") is torch.bfloat16
        with pytest.raises(TargetError, match="dtype 'bfloat17' is unknown"):
            parse_dtype("bfloat17")

    def test_a_name_without_size(self) -> None:
        with pytest.raises(TargetError, match="give 'b' a size, as in --set b=4"):
            prepare("net.py:Net", shapes=[parse_shape("b,5")])


class TestInputs:
    def test_positional_and_keyword(self) -> None:
        subject = prepare("net.py:Net", shapes=[parse_shape("2,5"), parse_shape("mask=3:bool")])
        assert _shape(subject.inputs.args[0]) == (2, 5)
        assert subject.inputs.kwargs["mask"].dtype is torch.bool
        assert bool(subject.inputs.args[0].eq(1).all())

    def test_dtypes(self) -> None:
        def dtypes(dtype: str | None, *shapes: str) -> tuple[torch.dtype, ...]:
            subject = prepare("net.py:Net", shapes=[parse_shape(s) for s in shapes], dtype=dtype)
            weight = subject.model.get_parameter("a.weight").dtype
            return (weight, *(tensor.dtype for tensor in subject.inputs.args))

        f32, bf16, i64 = torch.float32, torch.bfloat16, torch.int64
        assert dtypes(None, "2,5") == (f32, f32)
        assert dtypes("bfloat16", "2,5", "3:int64") == (bf16, bf16, i64)
        assert dtypes("int64", "2,5") == (f32, i64)

    def test_a_dtype_reaches_what_a_factory_made(self) -> None:
        subject = prepare("net.py:pair", dtype="float64")
        assert subject.inputs.args[0].dtype is torch.float64

    def test_shapes_come_before_the_targets_own(self) -> None:
        assert _shape(prepare("net.py:pair").inputs.args[0]) == (3, 5)
        subject = prepare("net.py:pair", shapes=[parse_shape("11,5")])
        assert _shape(subject.inputs.args[0]) == (11, 5)

    def test_shapes_and_a_factory_exclude_each_other(self) -> None:
        with pytest.raises(TargetError, match="exclude each other"):
            prepare("net.py:Net", shapes=[parse_shape("1")], inputs="net.py:batch")

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
    def test_what_a_factory_may_return(self, made: Any, expected: Inputs) -> None:
        assert as_inputs(made) == expected

    def test_structures_stay_what_they_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pair = namedtuple("pair", "left right")
        module = SimpleNamespace(make=lambda: [pair(torch.ones(2), [torch.ones(3), "text"])])
        monkeypatch.setitem(sys.modules, "net_inputs", module)  # type: ignore[arg-type]
        found = prepare("net.py:Net", inputs="net_inputs:make", dtype="float64").inputs.args[0]
        assert type(found) is pair
        assert found.right[0].dtype is torch.float64
        assert found.right[1] == "text"


class TestDevices:
    def test_meta_needs_no_memory(self) -> None:
        subject = prepare("net.py:huge", device="meta")
        profile = profile_model(subject.model, args=subject.inputs.args, device="meta")
        assert profile.total().macs == 10**6 * 10**7 * 10**7

    def test_a_factory_that_needs_data_is_built_on_the_cpu(self) -> None:
        said: list[str] = []
        subject = prepare("net.py:by_value", device="meta", say=said.append)
        assert subject.model.get_parameter("weight").shape == (7, 5)
        assert len(said) == 1

    @pytest.mark.parametrize("target", ["net.py:broken", "net.py:mismatched"])
    def test_other_errors_are_not_tried_again(self, target: str) -> None:
        said: list[str] = []
        with pytest.raises(TargetError):
            prepare(target, device="meta", say=said.append)
        assert said == []

    def test_a_target_is_imported_with_data(self) -> None:
        model = prepare("net.py:model", device="meta").model
        assert not model.get_parameter("a.weight").is_meta

    @pytest.mark.parametrize("name", ["gpu", "cuda:99"])
    def test_unusable(self, name: str) -> None:
        with pytest.raises(TargetError, match=f"device '{name}' cannot be used"):
            prepare("net.py:Net", device=name)


class TestHuggingFace:
    CONFIGS: ClassVar[dict[str, dict[str, Any]]] = {
        "bert": {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20,
                 "num_hidden_layers": 1, "vocab_size": 11, "max_position_embeddings": 32},
        "vit": {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20,
                "num_hidden_layers": 1, "image_size": 16, "patch_size": 8},
        "t5": {"d_model": 12, "d_kv": 4, "d_ff": 20, "num_heads": 3, "num_layers": 1,
               "vocab_size": 11},
    }  # fmt: skip

    @pytest.fixture(autouse=True)
    def _configs(self, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        for name, settings in self.CONFIGS.items():
            (tmp_path / f"{name}.json").write_text(json.dumps({"model_type": name, **settings}))

    @staticmethod
    def _shapes(subject: Subject) -> dict[str, tuple[int, ...]]:
        return {name: _shape(tensor) for name, tensor in subject.inputs.kwargs.items()}

    def test_inputs_follow_the_task(self) -> None:
        assert self._shapes(prepare("hf:bert.json")) == {"input_ids": (1, 32)}
        assert self._shapes(prepare("hf:vit.json")) == {"pixel_values": (1, 3, 16, 16)}
        sizes = {"batch": 2, "seq": 7}
        t5 = prepare("hf:t5.json:AutoModelForSeq2SeqLM", variables=sizes, device="meta")
        assert self._shapes(t5) == {"input_ids": (2, 7), "decoder_input_ids": (2, 7)}
        assert all(tensor.dtype is torch.int64 for tensor in t5.inputs.kwargs.values())

    def test_tokens_are_no_more_than_the_decoder_has_positions_for(self) -> None:
        bert = {"model_type": "bert", **self.CONFIGS["bert"]}
        pair = {"model_type": "encoder-decoder", "encoder": {**bert, "max_position_embeddings": 19},
                "decoder": {**bert, "is_decoder": True, "add_cross_attention": True}}  # fmt: skip
        Path("pair.json").write_text(json.dumps(pair))
        found = self._shapes(prepare("hf:pair.json:EncoderDecoderModel"))
        assert found == {"input_ids": (1, 19), "decoder_input_ids": (1, 32)}
        whisper = {"model_type": "whisper", "d_model": 12, "encoder_layers": 1, "decoder_layers": 1,
                   "encoder_attention_heads": 3, "decoder_attention_heads": 3, "num_mel_bins": 10,
                   "max_source_positions": 20, "max_target_positions": 17}  # fmt: skip
        Path("whisper.json").write_text(json.dumps(whisper))
        found = self._shapes(prepare("hf:whisper.json", device="meta"))
        assert found == {"input_features": (1, 10, 40), "decoder_input_ids": (1, 17)}

    def test_a_config_without_a_limit_of_positions(self) -> None:
        xlnet = {"model_type": "xlnet", "vocab_size": 11, "d_model": 12, "n_layer": 1, "n_head": 3,
                 "d_inner": 12}  # fmt: skip
        Path("xlnet.json").write_text(json.dumps(xlnet))
        found = self._shapes(prepare("hf:xlnet.json:AutoModel", device="meta"))
        assert found == {"input_ids": (1, 128)}

    def test_images_are_of_the_models_dtype(self) -> None:
        vit = {"model_type": "vit", "dtype": "bfloat16", **self.CONFIGS["vit"]}
        Path("vit.json").write_text(json.dumps(vit))
        subject = prepare("hf:vit.json")
        assert subject.inputs.kwargs["pixel_values"].dtype is torch.bfloat16
        assert subject.model(**subject.inputs.kwargs).last_hidden_state.dtype is torch.bfloat16

    def test_images_have_the_size_that_the_part_which_sees_asks_for(self) -> None:
        vit, bert = ({"model_type": kind, **self.CONFIGS[kind]} for kind in ("vit", "bert"))
        pair = {"model_type": "vision-encoder-decoder", "encoder": vit, "decoder": bert}
        pair["decoder"] |= {"is_decoder": True, "add_cross_attention": True}
        Path("pair.json").write_text(json.dumps(pair))
        found = self._shapes(prepare("hf:pair.json:VisionEncoderDecoderModel"))
        assert found["pixel_values"] == (1, 3, 16, 16)
        vision = {"image_size": 64, "patch_size": 16, "num_hidden_layers": 1, "hidden_size": 12,
                  "num_attention_heads": 3}  # fmt: skip
        Path("sam.json").write_text(json.dumps({"model_type": "sam", "vision_config": vision}))
        found = self._shapes(prepare("hf:sam.json", device="meta"))
        assert found == {"pixel_values": (1, 3, 64, 64)}

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_a_profile(self, device: str) -> None:
        subject = prepare(
            "hf:bert.json:BertForMaskedLM", variables={"batch": 2, "seq": 7}, device=device
        )
        profile = profile_model(
            subject.model,
            kwargs=subject.inputs.kwargs,
            device="meta" if device == "meta" else None,
        )
        d, ff, vocab = 12, 20, 11
        layer = 4 * d * d * 7 + 2 * 7 * 7 * d + 2 * d * ff * 7
        assert profile.total().macs == 2 * (layer + 7 * d * d + 7 * d * vocab)

    @pytest.mark.parametrize(
        "target,words",
        [
            ("hf:bert.json:Missing", "transformers has no class 'Missing'"),
            ("hf:odd.json", "odd.json' raised: ValueError"),
            ("hf:vit.json:AutoModelForCausalLM", "AutoModelForCausalLM of vit.json raised"),
        ],
    )
    def test_mistakes(self, target: str, words: str, tmp_path: Path) -> None:
        (tmp_path / "odd.json").write_text('{"model_type": "odd"}')
        with pytest.raises(TargetError, match=words):
            prepare(target)

    def test_a_config_that_transformers_saved(self) -> None:
        transformers = pytest.importorskip("transformers")
        config = transformers.Mamba2Config(
            hidden_size=12, num_hidden_layers=1, num_heads=4, head_dim=6, vocab_size=11
        )
        assert config.time_step_limit[1] == float("inf")  # JSON has no infinity: it is written
        config.save_pretrained("saved")  # as an object, which transformers alone reads
        assert prepare("hf:saved").model.config.time_step_limit[1] == float("inf")

    def test_a_folder_with_a_config(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoint").mkdir()
        (tmp_path / "bert.json").rename(tmp_path / "checkpoint" / "config.json")
        assert type(prepare("hf:checkpoint").model).__name__ == "BertModel"


class TestTimm:
    def test_a_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Model(nn.Identity):
            pretrained_cfg = {"input_size": (3, 11, 13)}  # noqa: RUF012

        def create_model(name: str, pretrained: bool) -> nn.Module:
            assert (name, pretrained) == ("some_net", False)
            return Model()

        timm = SimpleNamespace(create_model=create_model)
        monkeypatch.setitem(sys.modules, "timm", timm)  # type: ignore[arg-type]
        subject = prepare("timm:some_net", variables={"batch": 5})
        assert _shape(subject.inputs.args[0]) == (5, 3, 11, 13)
        with pytest.raises(TargetError, match=r"timm.create_model\('other'\) raised"):
            prepare("timm:other")

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "timm", None)  # type: ignore[arg-type]
        with pytest.raises(TargetError, match="timm"):
            prepare("timm:resnet18")


class TestExported:
    @pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch.export's own
    def test_a_file_with_its_inputs(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.ReLU(), nn.Linear(7, 11)))
        program = torch.export.export(model, (torch.ones(3, 5),))
        torch.export.save(program, tmp_path / "model.pt2")
        for device in ("cpu", "meta"):
            subject = prepare("model.pt2", device=device)
            profile = profile_model(
                subject.model,
                args=subject.inputs.args,
                kwargs=subject.inputs.kwargs,
                device="meta" if device == "meta" else None,
            )
            macs = {fqn: cost.macs for fqn, cost in profile.by_module().items() if cost.macs}
            first, second = 3 * 5 * 7, 3 * 7 * 11
            assert macs == {"": first + second, "0": first, "1": second, "1.1": second}
            assert profile.total_params == 5 * 7 + 7 + 7 * 11 + 11

    def test_no_variables(self) -> None:
        assert find("model.pt2").variables == frozenset()
