"""``get_model_profile``: profile one call of a model, print the profile, return its totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn

from dispatch_flops.profilers.flops_profiler import forward_string, path_to_write, print_or_write
from dispatch_flops.profilers.model import profile_model
from dispatch_flops.renderers import deepspeed
from dispatch_flops.renderers.deepspeed import units


@overload
def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = ...,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    print_profile: bool = ...,
    detailed: bool = ...,
    module_depth: int = ...,
    top_modules: int = ...,
    warm_up: int = ...,
    as_string: Literal[True] = ...,
    output_file: str | Path | None = ...,
    ignore_modules: Sequence[type[nn.Module]] | None = ...,
    mode: str = ...,
    func_name: str | None = ...,
    *,
    fold: bool = ...,
    **options: Any,
) -> tuple[str, str, str]: ...


@overload
def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = ...,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    print_profile: bool = ...,
    detailed: bool = ...,
    module_depth: int = ...,
    top_modules: int = ...,
    warm_up: int = ...,
    *,
    as_string: Literal[False],
    output_file: str | Path | None = ...,
    ignore_modules: Sequence[type[nn.Module]] | None = ...,
    mode: str = ...,
    func_name: str | None = ...,
    fold: bool = ...,
    **options: Any,
) -> tuple[int, int, int]: ...


@overload
def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = ...,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    print_profile: bool = ...,
    detailed: bool = ...,
    module_depth: int = ...,
    top_modules: int = ...,
    warm_up: int = ...,
    as_string: bool = ...,
    output_file: str | Path | None = ...,
    ignore_modules: Sequence[type[nn.Module]] | None = ...,
    mode: str = ...,
    func_name: str | None = ...,
    *,
    fold: bool = ...,
    **options: Any,
) -> tuple[str, str, str] | tuple[int, int, int]: ...


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | Path | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
    func_name: str | None = None,
    *,
    fold: bool = False,
    **options: Any,
) -> tuple[str, str, str] | tuple[int, int, int]:
    """Profile one call of a model, print the profile, and return its totals.

        flops, macs, params = get_model_profile(
            torch.nn.Linear(3, 5), input_shape=(2, 3), print_profile=False, as_string=False
        )
        # 70, 30, 20

    model, input_shape, args, kwargs, warm_up, ignore_modules, mode: see ``profile_model``.
    print_profile: print the profile.
    detailed: print the module tree, too.
    module_depth: deepest level printed; -1 (the default) prints all.
    top_modules: classes printed per level in the aggregated part, at least 1.
    as_string: return strings with a unit ("426.52 MMACs") instead of numbers; a lower bound is
        marked, as in ">= 426.52 MMACs".
    output_file: write the profile to this file instead of stdout.
    func_name: DeepSpeed's older name of ``mode``; wins over it.
    fold: print equal sibling modules as one.
    options: further arguments of ``profile_model``, such as ``device="meta"`` or ``repeats=9``.

    Returns ``(flops, macs, params)``: FLOPs and MACs of the forward pass, and the model's number
    of parameters.
    Raises what ``profile_model`` raises, and OutputError if ``output_file`` cannot be written.
    """
    view = deepspeed.make_view(  # wrong values raise before the model runs
        profile_step=warm_up,
        module_depth=module_depth,
        top_modules=top_modules,
        detailed=detailed,
        fold=fold,
    )
    if print_profile:
        path_to_write(output_file)  # a file that cannot be written raises before the model runs
    profile = profile_model(
        model,
        input_shape,
        args,
        kwargs,
        warm_up=warm_up,
        ignore_modules=ignore_modules,
        mode=func_name or mode,
        **options,
    )
    if print_profile:
        print_or_write(deepspeed.render(profile, view), output_file)
    total = profile.root.total("forward")
    params = profile.total_params
    if not as_string:
        return total.flops, total.macs, params
    return (
        forward_string(profile, units.number_to_string(total.flops)),
        forward_string(profile, units.macs_to_string(total.macs)),
        units.params_to_string(params),
    )
