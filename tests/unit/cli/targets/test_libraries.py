"""Targets that a library builds: transformers configs, timm names and exported programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from dispatch_flops import profile_model
from dispatch_flops.cli.targets import PreparedModel, parse_shape, prepare
from dispatch_flops.cli.targets.libraries import Exported
from dispatch_flops.errors import TargetError


def _shapes(prepared: PreparedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in prepared.inputs.kwargs.items()}


class TestHuggingFace:
    CONFIGS: ClassVar[dict[str, dict[str, Any]]] = {
        "bert": {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20,
                 "num_hidden_layers": 1, "vocab_size": 11, "max_position_embeddings": 32},
        "vit": {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20,
                "num_hidden_layers": 1, "image_size": 16, "patch_size": 8},
        "t5": {"d_model": 12, "d_kv": 4, "d_ff": 20, "num_heads": 3, "num_layers": 1,
               "vocab_size": 11},
        "whisper": {"d_model": 12, "encoder_layers": 1, "decoder_layers": 1,
                    "encoder_attention_heads": 3, "decoder_attention_heads": 3,
                    "num_mel_bins": 10, "max_source_positions": 20, "max_target_positions": 17},
    }  # fmt: skip

    @pytest.fixture(autouse=True)
    def _configs(self, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        for name, settings in self.CONFIGS.items():
            (tmp_path / f"{name}.json").write_text(json.dumps({"model_type": name, **settings}))

    def test_inputs_follow_the_models_main_input(self) -> None:
        assert _shapes(prepare("hf:bert.json")) == {"input_ids": (1, 32)}
        assert _shapes(prepare("hf:vit.json")) == {"pixel_values": (1, 3, 16, 16)}
        sizes = {"batch": 2, "seq": 7}
        t5 = prepare("hf:t5.json:AutoModelForSeq2SeqLM", variables=sizes, device="meta")
        assert _shapes(t5) == {"input_ids": (2, 7), "decoder_input_ids": (2, 7)}
        assert all(tensor.dtype is torch.int64 for tensor in t5.inputs.kwargs.values())

    def test_tokens_are_limited_by_the_decoders_positions(self) -> None:
        bert = {"model_type": "bert", **self.CONFIGS["bert"]}
        pair = {"model_type": "encoder-decoder", "encoder": {**bert, "max_position_embeddings": 19},
                "decoder": {**bert, "is_decoder": True, "add_cross_attention": True}}  # fmt: skip
        Path("pair.json").write_text(json.dumps(pair))
        found = _shapes(prepare("hf:pair.json:EncoderDecoderModel"))
        assert found == {"input_ids": (1, 19), "decoder_input_ids": (1, 32)}
        found = _shapes(prepare("hf:whisper.json", device="meta"))
        assert found == {"input_features": (1, 10, 40), "decoder_input_ids": (1, 17)}

    def test_more_tokens_than_positions_are_noted_where_no_data_would_fail(self) -> None:
        def notes(seq: int, target: str = "hf:bert.json", device: str = "meta") -> list[str]:
            found: list[str] = []
            prepare(target, variables={"seq": seq}, device=device, notify=found.append)
            return found

        assert notes(33) == [
            "input_ids has 33 tokens, and the model 32 positions: with data it fails, or goes "
            "beyond what it was trained for"
        ]
        assert notes(32) == notes(33, device="cpu") == []
        assert notes(1000, "hf:t5.json:AutoModelForSeq2SeqLM") == []
        (note,) = notes(18, "hf:whisper.json")
        assert note.startswith("decoder_input_ids has 18 tokens, and the model 17 positions")

    def test_more_tokens_than_positions_are_noted_of_inputs_by_shape(self) -> None:
        found: list[str] = []
        shapes = [parse_shape("1,33:int64")]
        prepare("hf:bert.json", shapes=shapes, device="meta", notify=found.append)
        (note,) = found
        assert note.startswith("input_ids has 33 tokens, and the model 32 positions")

    def test_config_without_a_limit_of_positions_has_the_default_tokens(self) -> None:
        xlnet = {"model_type": "xlnet", "vocab_size": 11, "d_model": 12, "n_layer": 1, "n_head": 3,
                 "d_inner": 12}  # fmt: skip
        Path("xlnet.json").write_text(json.dumps(xlnet))
        found = _shapes(prepare("hf:xlnet.json:AutoModel", device="meta"))
        assert found == {"input_ids": (1, 128)}

    def test_images_have_the_models_dtype(self) -> None:
        vit = {"model_type": "vit", "dtype": "bfloat16", **self.CONFIGS["vit"]}
        Path("vit.json").write_text(json.dumps(vit))
        prepared = prepare("hf:vit.json")
        assert prepared.inputs.kwargs["pixel_values"].dtype is torch.bfloat16
        assert prepared.model(**prepared.inputs.kwargs).last_hidden_state.dtype is torch.bfloat16

    def test_images_have_the_size_of_the_vision_config(self) -> None:
        vit, bert = ({"model_type": kind, **self.CONFIGS[kind]} for kind in ("vit", "bert"))
        pair = {"model_type": "vision-encoder-decoder", "encoder": vit, "decoder": bert}
        pair["decoder"] |= {"is_decoder": True, "add_cross_attention": True}
        Path("pair.json").write_text(json.dumps(pair))
        found = _shapes(prepare("hf:pair.json:VisionEncoderDecoderModel"))
        assert found["pixel_values"] == (1, 3, 16, 16)
        vision = {"image_size": 64, "patch_size": 16, "num_hidden_layers": 1, "hidden_size": 12,
                  "num_attention_heads": 3}  # fmt: skip
        Path("sam.json").write_text(json.dumps({"model_type": "sam", "vision_config": vision}))
        found = _shapes(prepare("hf:sam.json", device="meta"))
        assert found == {"pixel_values": (1, 3, 64, 64)}

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_profile_of_a_config_matches_the_closed_form(self, device: str) -> None:
        prepared = prepare(
            "hf:bert.json:BertForMaskedLM", variables={"batch": 2, "seq": 7}, device=device
        )
        profile = profile_model(
            prepared.model,
            kwargs=prepared.inputs.kwargs,
            device="meta" if device == "meta" else None,
        )
        d, ff, vocab = 12, 20, 11
        layer = 4 * d * d * 7 + 2 * 7 * 7 * d + 2 * d * ff * 7
        assert profile.total().macs == 2 * (layer + 7 * d * d + 7 * d * vocab)

    @pytest.mark.parametrize(
        "target,message",
        [
            (
                "hf:bert.json:Missing",
                "transformers has no class 'Missing'; use one such as AutoModel",
            ),
            ("hf:odd.json", "the config 'odd.json' raised ValueError: "),
            ("hf:vit.json:AutoModelForCausalLM", "AutoModelForCausalLM of vit.json raised "),
            (
                "hf:missing.json",
                "cannot read 'missing.json': No such file or directory; hf: needs the path of a "
                "config.json",
            ),
            ("hf:net.py", "'net.py' is not JSON: "),
            (
                "hf:empty.json",
                "'empty.json' is not a transformers config: it has no \"model_type\"",
            ),
        ],
    )
    def test_target_that_is_not_a_config_is_refused(
        self, target: str, message: str, tmp_path: Path
    ) -> None:
        (tmp_path / "odd.json").write_text('{"model_type": "odd"}')
        (tmp_path / "empty.json").write_text("{}")
        with pytest.raises(TargetError) as caught:
            prepare(target)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)

    def test_config_saved_by_transformers_is_read_with_its_infinities(self) -> None:
        transformers = pytest.importorskip("transformers")
        config = transformers.Mamba2Config(
            hidden_size=12, num_hidden_layers=1, num_heads=4, head_dim=6, vocab_size=11
        )
        assert config.time_step_limit[1] == float("inf")  # JSON has no infinity: it is written
        config.save_pretrained("saved")  # as an object, which transformers alone reads
        assert prepare("hf:saved").model.config.time_step_limit[1] == float("inf")

    def test_folder_with_a_config_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoint").mkdir()
        (tmp_path / "bert.json").rename(tmp_path / "checkpoint" / "config.json")
        assert type(prepare("hf:checkpoint").model).__name__ == "BertModel"


class TestTimm:
    def test_name_builds_a_model_and_an_image(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Model(nn.Identity):
            pretrained_cfg = {"input_size": (3, 11, 13)}  # noqa: RUF012

        def create_model(name: str, pretrained: bool) -> nn.Module:
            assert (name, pretrained) == ("some_net", False)
            return Model()

        timm = SimpleNamespace(create_model=create_model)
        monkeypatch.setitem(sys.modules, "timm", timm)  # type: ignore[arg-type]
        prepared = prepare("timm:some_net", variables={"batch": 5})
        assert prepared.inputs.args[0].shape == (5, 3, 11, 13)
        with pytest.raises(
            TargetError, match=r"^timm.create_model\('other'\) raised AssertionError"
        ):
            prepare("timm:other")

    def test_missing_timm_says_how_to_install_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "timm", None)  # type: ignore[arg-type]
        with pytest.raises(TargetError, match="^timm: targets need timm; run pip install timm$"):
            prepare("timm:resnet18")

    @pytest.mark.parametrize("target", ["timm:net", "hf:config.json:Net"])
    def test_library_that_cannot_be_imported_is_named(
        self, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = "raise RuntimeError('operator torchvision::nms does not exist')"
        (tmp_path / "timm.py").write_text(broken)
        (tmp_path / "transformers.py").write_text(f"def __getattr__(name): {broken}")
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("timm", "transformers"):
            monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
            del sys.modules[name]  # the teardown restores it
        with pytest.raises(TargetError, match="^importing .*: operator torchvision::nms does not"):
            prepare(target)


class TestExported:
    @pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch.export's own
    def test_file_brings_its_inputs_and_module_names(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.ReLU(), nn.Linear(7, 11)))
        program = torch.export.export(model, (torch.ones(3, 5),))
        torch.export.save(program, tmp_path / "model.pt2")
        for device in ("cpu", "meta"):
            prepared = prepare("model.pt2", device=device)
            profile = profile_model(
                prepared.model,
                args=prepared.inputs.args,
                kwargs=prepared.inputs.kwargs,
                device="meta" if device == "meta" else None,
            )
            macs = {fqn: cost.macs for fqn, cost in profile.by_module().items() if cost.macs}
            first, second = 3 * 5 * 7, 3 * 7 * 11
            assert macs == {"": first + second, "0": first, "1": second, "1.1": second}
            assert profile.total_params == 5 * 7 + 7 + 7 * 11 + 11

    def test_file_takes_no_variables(self) -> None:
        assert Exported(Path("model.pt2")).variables == frozenset()

    @pytest.mark.parametrize(
        "name,message",
        [
            ("missing.pt2", "file 'missing.pt2' does not exist; check the path"),
            ("net.pt2", "'net.pt2' is not a program saved by torch.export.save"),
        ],
    )
    def test_file_that_is_not_a_program_is_refused(
        self, name: str, message: str, tmp_path: Path
    ) -> None:
        (tmp_path / "net.pt2").write_text("no archive")
        with pytest.raises(TargetError) as caught:
            prepare(name)
        assert str(caught.value) == message
