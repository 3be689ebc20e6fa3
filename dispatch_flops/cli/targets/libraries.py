"""Targets that a library builds: transformers configs, timm names and exported programs."""

from __future__ import annotations

import importlib
import json
import logging
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dispatch_flops.cli.targets.inputs import Inputs, Variables, convert_inputs, size_of
from dispatch_flops.cli.targets.source import raise_target_error, require_file, require_model
from dispatch_flops.errors import TargetError

DEFAULT_TOKENS = 128
_AUDIO_SAMPLES = 16_000  # one second at the sampling rate of speech models
# Inputs of tokens, and the parts of a config of several models that may be theirs.
_TOKENS = {
    "input_ids": ("text_config", "encoder"),
    "decoder_input_ids": ("decoder", "text_config"),
}


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """``hf:config.json[:TaskClass]``: a transformers model with random weights.

    path: a config.json, or the folder that contains it.
    task: a class of transformers, such as ``AutoModelForCausalLM`` or ``BertForMaskedLM``.
    """

    path: Path
    task: str = "AutoModel"

    @property
    def variables(self) -> frozenset[str]:
        return frozenset(("batch", "seq"))

    def build(self, variables: Variables) -> tuple[nn.Module, Inputs | None]:
        transformers = _imported("transformers", "hf:")
        try:
            task = getattr(transformers, self.task, None)
        except Exception as error:  # transformers imports the class here
            raise_target_error(f"importing {self.task} of transformers", error)
        if task is None:
            raise TargetError(f"transformers has no class {self.task!r}; use one such as AutoModel")
        with _silenced("transformers"):
            config = self._config(transformers)
            try:
                model = task.from_config(config) if hasattr(task, "from_config") else task(config)
                return require_model(model, self.task), default_inputs(model, variables)
            except TargetError:
                raise
            except Exception as error:
                raise_target_error(f"{self.task} of {self.path}", error)

    def _config(self, transformers: Any) -> Any:
        path = self.path / "config.json" if self.path.is_dir() else self.path
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise TargetError(
                f"cannot read {str(path)!r}: {error.strerror}; hf: needs the path of a config.json"
            ) from None
        except ValueError as error:
            raise TargetError(f"{str(path)!r} is not JSON: {error}") from error
        if not isinstance(settings, dict) or settings.get("model_type") is None:
            raise TargetError(f'{str(path)!r} is not a transformers config: it has no "model_type"')
        try:
            return transformers.AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise_target_error(f"the config {str(path)!r}", error)


def default_inputs(model: Any, variables: Variables) -> Inputs | None:
    """Return inputs for the model's ``main_input_name``; ``None`` if it is not a known one.

    The variables batch and seq default to 1 and to 128 tokens, or the model's maximum if that is
    less. Images and spectrograms have the size that the config states, and the model's dtype.
    """
    config, batch = model.config, size_of(variables, "batch", 1)
    kind = getattr(model, "main_input_name", "input_ids")
    match kind:
        case "input_ids":
            inputs = {kind: _tokens(_part(config, *_TOKENS[kind]), batch, variables)}
        case "pixel_values":
            inputs = {kind: _pixels(config, batch)}
        case "input_values":
            inputs = {kind: torch.ones(batch, size_of(variables, "seq", _AUDIO_SAMPLES))}
        case "input_features":
            inputs = {kind: _spectrogram(config, batch)}
        case _:
            return None
    if kind == "input_ids" and hasattr(config, "vision_config"):
        inputs["pixel_values"] = _pixels(config.vision_config, batch)
    if getattr(config, "is_encoder_decoder", False):
        decoder = _part(config, *_TOKENS["decoder_input_ids"])
        inputs["decoder_input_ids"] = _tokens(decoder, batch, variables)
    return convert_inputs(Inputs((), inputs), None, model.dtype)


def _part(config: Any, *names: str) -> Any:
    """Return the first of the parts that the config has; the config itself if it has none."""
    parts = (getattr(config, name, None) for name in names)
    return next((part for part in parts if part is not None), config)


def _tokens(config: Any, batch: int, variables: Variables) -> torch.Tensor:
    length = size_of(variables, "seq", min([DEFAULT_TOKENS, *_positions(config)]))
    return torch.ones(batch, length, dtype=torch.long)


def _positions(config: Any) -> list[int]:
    """Return the limits of the number of tokens that the config states."""
    limits = [
        getattr(config, f"max_{of}", None) for of in ("position_embeddings", "target_positions")
    ]
    return [limit for limit in limits if isinstance(limit, int) and limit > 0]


def note_on_positions(model: Any, inputs: Inputs) -> str:
    """Return what there is to say of more tokens than a transformers model has positions for.

    Without data no look-up fails, as that of a learned position would.
    """
    config = getattr(model, "config", None)
    named = {getattr(model, "main_input_name", ""): next(iter(inputs.args), None), **inputs.kwargs}
    for name, parts in _TOKENS.items():
        tokens = named.get(name)
        limit = min(_positions(_part(config, *parts)), default=None)
        if isinstance(tokens, torch.Tensor) and limit is not None and tokens.shape[-1] > limit:
            return (
                f"{name} has {tokens.shape[-1]} tokens, and the model {limit} positions: with "
                "data it fails, or goes beyond what it was trained for"
            )
    return ""


def _pixels(config: Any, batch: int) -> torch.Tensor:
    if getattr(config, "image_size", None) is None:
        config = _part(config, "vision_config", "encoder")
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.ones(batch, getattr(config, "num_channels", 3), height, width)


def _spectrogram(config: Any, batch: int) -> torch.Tensor:
    """Return ones of shape (batch, mel bins, frames): two frames per position of the encoder."""
    bins = getattr(config, "num_mel_bins", 80)
    return torch.ones(batch, bins, 2 * getattr(config, "max_source_positions", 1500))


@dataclass(frozen=True, slots=True)
class Timm:
    """``timm:name``: a timm model with random weights, and an image of its input size."""

    name: str

    @property
    def variables(self) -> frozenset[str]:
        return frozenset(("batch",))

    def build(self, variables: Variables) -> tuple[nn.Module, Inputs | None]:
        timm = _imported("timm", "timm:")
        try:
            model = timm.create_model(self.name, pretrained=False)
        except Exception as error:
            raise_target_error(f"timm.create_model({self.name!r})", error)
        settings = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
        size = tuple((settings or {}).get("input_size", (3, 224, 224)))
        return require_model(model, self.name), Inputs(
            (torch.ones(size_of(variables, "batch", 1), *size),)
        )


@dataclass(frozen=True, slots=True)
class Exported:
    """A program saved by ``torch.export.save``, with its example inputs.

    Modules keep their names; the export does not keep their classes.
    """

    path: Path

    @property
    def variables(self) -> frozenset[str]:
        return frozenset()

    def build(self, variables: Variables) -> tuple[nn.Module, Inputs | None]:
        require_file(self.path)
        if not zipfile.is_zipfile(self.path):
            raise TargetError(f"{str(self.path)!r} is not a program saved by torch.export.save")
        try:
            # The constants of the graph have data, also if the default device is meta.
            with torch.device("cpu"), _silenced("torch.export"):
                program = torch.export.load(self.path)
                model = torch.export.unflatten(program)
        except Exception as error:
            raise_target_error(f"loading {str(self.path)!r}", error)
        args, kwargs = program.example_inputs or ((), {})
        return model, Inputs(tuple(args), dict(kwargs))


def _imported(name: str, prefix: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a library of another torch raises RuntimeError, for example
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise TargetError(f"{prefix} targets need {name}; run pip install {name}") from None
        raise_target_error(f"importing {name}", error)


@contextmanager
def _silenced(name: str) -> Iterator[None]:
    """Hide a library's log messages below the level of an error."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
