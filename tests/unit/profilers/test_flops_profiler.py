"""``get_model_profile`` and ``FlopsProfiler``: parameters, return values and printouts."""

from __future__ import annotations

import copy
import errno
import inspect
import io
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dispatch_flops import FlopsProfiler, get_model_profile, profile_model
from dispatch_flops.analysis.latency import measured_seconds
from dispatch_flops.errors import (
    ConfigError,
    NotProfiledError,
    TargetError,
    UncountedWarning,
    WrongThreadError,
)
from dispatch_flops.profilers.flops_profiler import write_or_warn
from tests.helpers.engine import Engine
from tests.helpers.small_net import FLOPS, MACS, PARAMS, B, Net


def test_get_model_profile_returns_numbers_or_strings() -> None:
    numbers = get_model_profile(Net(), (B, 5), print_profile=False, as_string=False)
    assert numbers == (FLOPS, MACS, PARAMS)
    strings = get_model_profile(Net(), (B, 5), print_profile=False)
    assert strings == (f"{FLOPS} ", f"{MACS} MACs", f"{PARAMS}")  # DeepSpeed's empty unit


@pytest.mark.parametrize("name", ["mode", "func_name"])
def test_get_model_profile_with_mode_calls_that_method(name: str) -> None:
    _, macs, _ = get_model_profile(
        Net(), (B, 5), print_profile=False, as_string=False, **{name: "twice"}
    )
    assert macs == 2 * MACS


def test_get_model_profile_on_meta_counts_the_same_without_latency(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Net()
    before = dict(model.named_parameters())
    assert get_model_profile(model, (B, 5), as_string=False, device="meta") == (
        FLOPS,
        MACS,
        PARAMS,
    )
    assert all(p is before[name] for name, p in model.named_parameters())
    assert "fwd latency:" in (out := capsys.readouterr().out)
    assert "n/a" in next(line for line in out.splitlines() if line.startswith("fwd latency:"))


def test_get_model_profile_with_ignore_modules_keeps_their_parameters() -> None:
    _, macs, params = get_model_profile(
        Net(), (B, 5), print_profile=False, as_string=False, ignore_modules=[nn.Linear]
    )
    assert (macs, params) == (0, PARAMS)


def test_get_model_profile_with_output_file_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "profile.txt"
    get_model_profile(Net(), (B, 5), output_file=file)
    assert capsys.readouterr().out == ""
    assert "DeepSpeed Flops Profiler" in file.read_text()


def test_profiler_around_a_forward_counts_only_the_forward(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Net()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    loss = model(torch.ones(B, 5)).sum()
    profiler.stop_profile()
    loss.backward()  # outside: not counted
    assert profiler.get_total_macs() == MACS
    assert profiler.get_total_macs(as_string=True) == f"{MACS} MACs"
    assert profiler.get_total_params() == PARAMS
    assert profiler.get_total_params(as_string=True) == f"{PARAMS}"
    assert profiler.get_total_duration() > 0
    profiler.print_model_profile(profile_step=5, top_modules=2)
    out = capsys.readouterr().out
    assert "Profile Summary at step 5:" in out
    assert "(a): Linear(" in out
    for top_modules in (1, 2):
        profiler.print_model_aggregated_profile(top_modules=top_modules)
        params = capsys.readouterr().out.split("depth 1:")[1].splitlines()[1]
        assert ("Dropout" in params) is (top_modules == 2)
    profiler.end_profile()
    assert profiler.get_total_macs() == MACS  # nothing is lost at the end


def test_profiler_of_contractions_counts_no_other_flops() -> None:
    model = Net()
    profiler = FlopsProfiler(model, flops="contractions")
    profiler.start_profile()
    model(torch.ones(B, 5))
    profiler.stop_profile()
    assert profiler.get_total_flops() == 2 * MACS


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copy_of_a_started_profiler_is_not_started(copied: Any) -> None:
    profiler = FlopsProfiler(Net())
    profiler.start_profile()
    profiler.model(torch.ones(B, 5))
    other = copied(profiler)
    assert not other.started
    other.end_profile()
    profiler.model(torch.ones(B, 5))
    profiler.end_profile()
    assert (other.get_total_macs(), profiler.get_total_macs()) == (MACS, 2 * MACS)
    other.start_profile()
    other.model(torch.ones(B, 5))
    other.end_profile()
    assert (other.get_total_macs(), profiler.get_total_macs()) == (MACS, 2 * MACS)


def test_profiler_totals_with_backward_are_of_the_forward() -> None:
    model = Net()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(B, 5)).sum().backward()
    profiler.stop_profile()
    assert profiler.get_total_macs() == MACS
    assert profiler.profile.total("backward").macs == B * 5 * 7 + 2 * B * 7 * 3


def test_profiler_started_repeatedly_counts_from_the_last_start() -> None:
    model, x = Net(), torch.ones(B, 5)
    profiler = FlopsProfiler(model)
    for _ in range(3):
        profiler.start_profile()
        profiler.start_profile()
        model(x)
        profiler.stop_profile()
        assert profiler.get_total_macs() == MACS
    profiler.start_profile()
    model(x)
    profiler.reset_profile()
    model(x)
    profiler.stop_profile()
    assert profiler.get_total_macs() == MACS
    profiler.end_profile()


@torch.library.custom_op("dispatch_flops_profiler::unpriced", mutates_args=())
def unpriced(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Unpriced(Net):
    """Net, and an operator that has no known cost."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        unpriced(x)
        return super().forward(x, scale)


@pytest.mark.filterwarnings("ignore::dispatch_flops.errors.UncountedWarning")
def test_strings_of_a_lower_bound_are_marked() -> None:
    model, x = Unpriced().eval(), torch.ones(B, 5)
    strings = get_model_profile(model, args=[x], print_profile=False)
    assert strings == (f">= {FLOPS} ", f">= {MACS} MACs", f"{PARAMS}")
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(x)
    profiler.stop_profile()
    assert profiler.get_total_flops(as_string=True) == strings[0]
    assert profiler.get_total_macs(as_string=True) == strings[1]


@pytest.mark.parametrize("stop", [FlopsProfiler.stop_profile, FlopsProfiler.end_profile])
def test_profiler_with_warnings_as_errors_raises_once_and_keeps_the_profile(stop: Any) -> None:
    profiler = FlopsProfiler(Unpriced())
    for _ in range(2):
        profiler.start_profile()
        profiler.model(torch.ones(B, 5))
        with pytest.raises(UncountedWarning, match="unpriced"):
            stop(profiler)
        stop(profiler)
        assert not _get_current_dispatch_mode_stack()
        assert profiler.get_total_macs() == MACS
    profiler.end_profile()
    assert not profiler.started


def test_profiler_that_drops_a_profile_does_not_warn() -> None:
    profiler = FlopsProfiler(Unpriced())
    for forget in (profiler.start_profile, profiler.reset_profile, profiler.drop_profile):
        profiler.start_profile()
        profiler.model(torch.ones(B, 5))
        forget()
    assert not _get_current_dispatch_mode_stack()
    assert not profiler.started
    with pytest.raises(NotProfiledError):
        _ = profiler.profile


def test_profiler_reset_while_paused_stays_paused() -> None:
    model, x = Net(), torch.ones(B, 5)
    profiler = FlopsProfiler(model)
    for resumed in (False, True):
        profiler.start_profile()
        model(x)
        profiler.pause_profile()
        profiler.reset_profile()
        model(x)
        if resumed:
            profiler.resume_profile()
            model(x)
        profiler.stop_profile()
        assert profiler.get_total_macs() == resumed * MACS


def test_profiler_stopped_in_another_thread_raises_and_goes_on() -> None:
    profiler = FlopsProfiler(Net())
    profiler.start_profile()
    with ThreadPoolExecutor(1) as pool, pytest.raises(WrongThreadError):
        pool.submit(profiler.stop_profile).result()
    profiler.model(torch.ones(B, 5))
    profiler.end_profile()
    assert profiler.get_total_macs() == MACS


def test_profiler_with_ignore_list_excludes_these_modules() -> None:
    model = Net()
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_list=[nn.Linear])
    model(torch.ones(B, 5))
    profiler.stop_profile()
    assert profiler.get_total_macs() == 0


def test_profiler_asked_before_start_raises_not_profiled() -> None:
    profiler = FlopsProfiler(Net())
    for ask in (
        profiler.get_total_flops,
        profiler.print_model_profile,
        profiler.print_model_aggregated_profile,
    ):
        with pytest.raises(NotProfiledError, match="start_profile"):
            ask()


def test_profiler_printed_before_any_forward_says_not_available(
    capsys: pytest.CaptureFixture[str],
) -> None:
    profiler = FlopsProfiler(Net())
    profiler.start_profile()
    profiler.stop_profile()
    profiler.print_model_profile()
    assert "n/a" in capsys.readouterr().out


def test_names_that_stdout_cannot_encode_are_printed_with_question_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    model = nn.Sequential(OrderedDict({"é": type("Ü", (nn.Linear,), {})(3, 5)}))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(2, 3))
    profiler.end_profile()
    profiler.print_model_profile()
    profiler.print_model_aggregated_profile()
    stdout.flush()
    printed = stdout.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "(?): ?(" in printed
    assert "{'?': '30 MACs'}" in printed.rpartition("depth 1:")[2]


def test_get_model_profile_has_the_parameters_of_deepspeed() -> None:
    theirs = (
        "model input_shape args kwargs print_profile detailed module_depth top_modules warm_up "
        "as_string output_file ignore_modules mode"
    ).split()
    assert list(inspect.signature(get_model_profile).parameters)[: len(theirs)] == theirs
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(get_model_profile).parameters.items()
    }
    assert [defaults[n] for n in ("print_profile", "detailed", "module_depth", "top_modules")] == [
        True,
        True,
        -1,
        1,
    ]
    assert [defaults[n] for n in ("warm_up", "as_string", "mode")] == [1, True, "forward"]


@pytest.mark.parametrize("name", ["module_depth", "top_modules"])
def test_get_model_profile_with_a_wrong_print_option_raises_before_the_model_runs(
    name: str,
) -> None:
    model, calls = Net(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ConfigError, match=name):
        get_model_profile(model, (B, 5), **{name: "all"})
    assert not calls


@pytest.mark.parametrize("factor", ["1", float("nan"), None])
def test_profiler_with_a_wrong_recompute_fwd_factor_raises_where_it_is_made(factor: Any) -> None:
    with pytest.raises(ConfigError, match="recompute_fwd_factor"):
        FlopsProfiler(Net(), recompute_fwd_factor=factor)


def test_profiler_on_meta_has_no_latency(capsys: pytest.CaptureFixture[str]) -> None:
    get_model_profile(Net(), (B, 5), device="meta", operator_latency=True)
    assert "Time" not in capsys.readouterr().out
    profiler = FlopsProfiler(Net().to("meta"))
    profiler.start_profile()
    profiler.model(torch.ones(B, 5, device="meta")).sum().backward()
    profiler.stop_profile()
    assert profiler.get_total_macs() == MACS
    assert profiler.get_total_duration() is None
    assert profiler.profile.timing.latency("backward") is None


def test_run_info_is_added_only_after_stop_profile() -> None:
    profiler = FlopsProfiler(Net())
    profiler.start_profile()
    with pytest.raises(NotProfiledError, match="stop_profile"):
        profiler.add_run_info(batch_size=B)
    profiler.stop_profile()
    profiler.add_run_info(batch_size=B)
    assert profiler.profile.run.batch_size == B


def test_get_model_profile_without_any_operator_prints_a_profile(
    capsys: pytest.CaptureFixture[str],
) -> None:
    get_model_profile(nn.Identity(), (B, 5))
    assert "Nothing has run" not in capsys.readouterr().out
    assert measured_seconds(profile_model(nn.Identity(), (B, 5)))[1] == "forward"


def test_recompute_fwd_factor_is_part_of_the_printed_estimate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    profiler = FlopsProfiler(Net(), recompute_fwd_factor=1.0)
    profiler.start_profile()
    profiler.model(torch.ones(B, 5)).sum().backward()
    profiler.end_profile()
    profiler.print_model_profile()
    assert "\nbwd FLOPS per GPU = 3 * fwd flops per GPU / bwd latency: " in capsys.readouterr().out


def test_empty_output_file_is_stdout_as_in_deepspeed(capsys: pytest.CaptureFixture[str]) -> None:
    get_model_profile(Net(), (B, 5), output_file="")
    assert "DeepSpeed Flops Profiler" in capsys.readouterr().out


def test_output_file_that_is_a_folder_raises_an_error_of_the_operating_system(
    tmp_path: Path,
) -> None:
    model = Net()
    with pytest.raises(IsADirectoryError) as caught:
        get_model_profile(model, (B, 5), output_file=str(tmp_path))
    assert isinstance(caught.value, TargetError)
    assert caught.value.filename == str(tmp_path)
    assert caught.value.errno == errno.EISDIR
    assert str(tmp_path) in str(caught.value)
    assert not model._forward_hooks


@pytest.mark.parametrize("output_file", [5, ".", f"{__file__}/new/profile.txt", "x" * 256])
def test_output_file_is_refused_before_the_model_runs(output_file: Any) -> None:
    class Fails(nn.Module):
        def forward(self) -> None:
            raise AssertionError("the model ran")

    with pytest.raises(TargetError, match="output_file="):
        get_model_profile(Fails(), output_file=output_file)


@pytest.mark.parametrize(
    ("output_file", "says"), [(5, "output_file=5: pass the path of a file"), ("a\0b", "null byte")]
)
def test_output_file_that_is_no_path_is_refused_and_ends_no_training_loop(
    output_file: Any, says: str
) -> None:
    with pytest.raises(TargetError, match=says):
        get_model_profile(Net(), (B, 5), output_file=output_file)
    with pytest.warns(UserWarning, match=f"{says}.*; printed instead"):
        write_or_warn("text", output_file)


def test_output_file_below_a_file_raises_an_error_of_the_operating_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError) as caught:
        get_model_profile(Net(), (B, 5), output_file=tmp_path / "file" / "profile.txt")
    assert isinstance(caught.value, OSError)
    assert str(caught.value).endswith("profile.txt': its folder is a file")


def _lines(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_printout_states_the_sizes_that_the_engine_knows(
    capsys: pytest.CaptureFixture[str], is_sequence_parallel: bool
) -> None:
    model = Net()
    sizes = {"dp_world_size": None, "seq_dp_world_size": 5}
    known = sizes if is_sequence_parallel else {"dp_world_size": 5}
    engine = Engine(
        model, world_size=15, mp_world_size=3, micro_batch_size=7, enabled=False, **known
    )
    profiler = FlopsProfiler(model, ds_engine=engine)
    profiler.start_profile()
    model(torch.ones(B, 5))
    profiler.print_model_profile(detailed=False)  # DeepSpeed's users may print before the stop
    profiler.end_profile()
    lines = _lines(capsys.readouterr().out)
    assert lines["world size"] == "15"
    assert lines["data parallel size"] == "5"
    assert lines["model parallel size"] == "3"
    assert lines["batch size per GPU"] == "7"


def test_printout_without_an_engine_states_no_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = FlopsProfiler(model := Net())
    profiler.start_profile()
    model(torch.ones(B, 5))
    profiler.stop_profile()
    profiler.print_model_profile(detailed=False)
    assert "world size" not in _lines(capsys.readouterr().out)


def test_totals_are_attributes_once_the_profile_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    profiler = FlopsProfiler(model := Net().eval())
    assert (profiler.flops, profiler.macs, profiler.params) == (None, None, None)
    profiler.start_profile()
    model(torch.ones(B, 5))
    profiler.stop_profile()
    profiler.print_model_profile()
    profiler.end_profile()
    assert (profiler.flops, profiler.macs, profiler.params) == (FLOPS, MACS, PARAMS)
    assert capsys.readouterr().out


@pytest.mark.parametrize("engine", [nn.Linear(3, 5), "engine", 0])
def test_what_is_not_an_engine_is_refused_at_once(engine: Any) -> None:
    with pytest.raises(TargetError, match=f"of type {type(engine).__name__}; pass the engine"):
        FlopsProfiler(Net(), engine)


def test_profile_that_is_dropped_is_not_there_any_more() -> None:
    profiler = FlopsProfiler(Net())
    profiler.start_profile()
    profiler.model(torch.ones(B, 5))
    profiler.stop_profile()
    assert profiler.get_total_macs() == MACS
    profiler.drop_profile()
    with pytest.raises(NotProfiledError):
        profiler.get_total_macs()


def test_profile_that_another_thread_cannot_end_or_drop_goes_on() -> None:
    profiler = FlopsProfiler(Net())
    profiler.start_profile()
    with ThreadPoolExecutor(1) as pool:
        for stop in (profiler.end_profile, profiler.drop_profile):
            with pytest.raises(WrongThreadError):
                pool.submit(stop).result()
            assert profiler.started
    profiler.model(torch.ones(B, 5))
    profiler.end_profile()
    assert not profiler.started
    assert profiler.get_total_macs() == MACS
