"""Calls of torch's own layers that are like earlier ones; see ``undispatched``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F

from dispatch_flops import _torch
from dispatch_flops.counting.output_shapes import Shapes, shapes_of
from dispatch_flops.counting.undispatched import Costs, KnownRuns, costs_of, runs_plainly
from dispatch_flops.operators.interrupts import is_of_signal_handler

if TYPE_CHECKING:
    from dispatch_flops.counting.thread_state import (
        KnownModule,
        OpenCall,
        ThreadState,
    )
    from dispatch_flops.operators.registry import Rule

_is_grad_enabled = torch.is_grad_enabled
_share_storage = _torch.share_storage
_hooks = _torch.module_globals
_functions, _functions_of_torch = vars(F), vars(torch)
_sequence_nr = _torch.sequence_nr
_keep_modes_out = _torch.keep_modes_out
_is_cudnn_enabled = _torch.is_cudnn_enabled

_LIMIT = 4096  # kinds of calls kept before all are dropped
_MOST = 4  # calls kept of one kind

_TENSORS = (Tensor, Parameter)
_Tensors = tuple[Tensor | None, ...]


class _Layer:
    """A class of layers whose forward takes one tensor and calls one function of torch.

    name: of the function, in ``torch.nn.functional``. parameters, buffers: return those of a layer
    that it is given. state: returns what else it is given that decides its operators; None if
    nothing does. required: values that attributes must have. methods: others that forward calls.
    """

    __slots__ = (
        "_of_torch", "buffers", "cls", "forward", "function", "methods", "name", "parameters",
        "required", "state",
    )  # fmt: skip

    def __init__(
        self,
        cls: type[nn.Module],
        name: str,
        parameters: Callable[[Any], _Tensors] = lambda parameters: (),
        state: Callable[[Any], Any] | None = None,
        *,
        buffers: Callable[[Any], _Tensors] | None = None,
        methods: tuple[str, ...] = (),
        **required: Any,
    ) -> None:
        self.cls, self.forward = cls, cls.forward
        self.name, self.function = name, _functions[name]
        self._of_torch = _functions_of_torch.get(name)  # which that one may call
        self.parameters, self.buffers, self.state = parameters, buffers, state
        self.required = required
        self.methods = {name: getattr(cls, name) for name in methods}

    def is_original(self) -> bool:
        """Return True if nothing replaced what a call runs before this module was imported."""
        functions = (self.forward, self.function, *self.methods.values())
        return all(map(_torch.is_of_torch, functions))

    def is_known(self, module: nn.Module) -> bool:
        """Return True if the module runs the operators that its class does in most cases."""
        return all(getattr(module, name) == value for name, value in self.required.items())

    def is_replaced(self, own: Mapping[str, Any]) -> bool:
        """Return True if the program has replaced anything that a layer's call runs.

        own: the attributes of the layer.
        """
        return (
            "forward" in own
            or self.cls.forward is not self.forward
            or _functions[self.name] is not self.function
            or _functions_of_torch.get(self.name) is not self._of_torch
            or (bool(self.methods) and self._is_method_replaced(own))
        )

    def _is_method_replaced(self, own: Mapping[str, Any]) -> bool:
        for name, method in self.methods.items():  # ``any`` takes three times as long
            if name in own or getattr(self.cls, name) is not method:
                return True
        return False


_BOTH: Callable[[Any], Any] = itemgetter("weight", "bias")
_CONVOLUTION = itemgetter("stride", "padding", "dilation", "padding_mode")


def _weight(parameters: Mapping[str, Tensor | None]) -> _Tensors:
    return (parameters["weight"],)


def _batch_norm(own: Mapping[str, Any]) -> Any:
    return own["training"], own["track_running_stats"], _is_cudnn_enabled()


def _convolution(cls: type[nn.Module], name: str) -> _Layer:
    return _Layer(cls, name, _BOTH, _CONVOLUTION, methods=("_conv_forward",), padding_mode="zeros")


# Other layers may run operators by values, or take arguments that a pre-hook is not given.
LAYERS: dict[type[nn.Module], _Layer] = {
    layer.cls: layer
    for layer in (
        _Layer(nn.Linear, "linear", _BOTH),
        _convolution(nn.Conv1d, "conv1d"),
        _convolution(nn.Conv2d, "conv2d"),
        _convolution(nn.Conv3d, "conv3d"),
        _Layer(nn.Embedding, "embedding", _weight, itemgetter("max_norm"), max_norm=None),
        _Layer(nn.LayerNorm, "layer_norm", _BOTH, itemgetter("normalized_shape")),
        _Layer(nn.RMSNorm, "rms_norm", _weight, itemgetter("normalized_shape")),
        _Layer(nn.GroupNorm, "group_norm", _BOTH, itemgetter("num_groups")),
        _Layer(
            nn.BatchNorm2d, "batch_norm", _BOTH, _batch_norm,
            buffers=itemgetter("running_mean", "running_var"), methods=("_check_input_dim",),
            training=False, track_running_stats=True,
        ),
        _Layer(nn.GELU, "gelu", state=itemgetter("approximate")),
        _Layer(nn.ReLU, "relu", state=itemgetter("inplace")),
        _Layer(nn.SiLU, "silu", state=itemgetter("inplace")),
    )
    if layer.is_original()
}  # fmt: skip


@dataclass(slots=True, eq=False)
class LayerCall:
    """A call of a layer, and what was recorded of it.

    cls: the layer's class. is_same: compares the input and the layer's tensors with its own.
    absent: positions among these of tensors that it did not have. state: what else decides which
    operators run. costs: empty until the call has returned. memory: what ``UndispatchedMemory``
    noted of it. is_dispatched: so are all calls that are like it.
    """

    cls: type[nn.Module]
    is_same: Callable[..., bool]
    absent: tuple[int, ...]
    state: Any
    costs: Costs = ()
    output_shapes: Shapes = ()
    memory: Any = None
    is_dispatched: bool = False

    def is_like(self, given: _Tensors, state: Any) -> bool:
        """Return True if a call is like this one: of an input and a layer with these tensors."""
        if state != self.state:
            return False
        if self.absent:
            for position in self.absent:
                if given[position] is not None:
                    return False
            given = _present(given)
        return self.is_same(*given)


def _present(tensors: _Tensors) -> tuple[Tensor, ...]:
    return tuple([tensor for tensor in tensors if tensor is not None])


class KnownLayers(KnownRuns):
    """The calls of layers in one run."""

    def __init__(self, own_rules: Mapping[Any, Rule]) -> None:
        self._calls: dict[Any, list[LayerCall]] = {}  # by kind
        self._latest: dict[type, LayerCall] = {}
        super().__init__(own_rules)

    def forget(self) -> None:
        """Let no call be like one of these; modules keep those that were found for them."""
        for calls in list(self._calls.values()):
            for call in calls:
                call.is_same = _is_never_same
        self._calls.clear()

    def find(
        self, thread: ThreadState, known: KnownModule, module: nn.Module, args: Any
    ) -> LayerCall | None:
        """Return an earlier call that the call of a layer is like, or a new one, without costs.

        None if the call is to be dispatched, and tells nothing about others.
        """
        layer, own = LAYERS.get(module.__class__), module.__dict__
        if layer is None:  # the program has changed its class
            return None
        try:
            if (
                not self.is_on
                or len(args) != 1
                or not runs_plainly()  # first: a mode for functions would see what is asked here
                or (x := args[0]).__class__ is not Tensor
                or x.is_nested  # to compare one ends the process
                or own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
                or "weight" in own  # in place of the parameter
                or layer.is_replaced(own)
                or len(_hooks._global_forward_hooks) != 1
                or len(_hooks._global_forward_pre_hooks) != 1
                or _hooks._global_backward_hooks
                or _hooks._global_backward_pre_hooks
                or (self.memory is not None and thread.stack[-1].named is None)
            ):
                return None
            tensors = layer.parameters(own["_parameters"])
            if layer.buffers is not None:
                tensors += layer.buffers(own["_buffers"])
            given = x, *tensors
            state: Any = _is_grad_enabled()
            if layer.state is not None:
                state = state, layer.state(own)
            call = known.layer_call or self._latest.get(layer.cls)
            if call is None or call.cls is not layer.cls or not call.is_like(given, state):
                call = self._find(layer, module, given, state)
                if call is None:
                    return None
                self._latest[layer.cls] = call
            if tensors and _share_storage(given):  # the cost depends on what they share
                return None
        except Exception as error:  # a state that cannot be compared, perhaps
            if is_of_signal_handler(error):
                raise
            return None
        if call.is_dispatched or (
            self.memory is not None
            and call.memory is not None
            and not self.memory.can_repeat_layer(call.memory)
        ):
            return None
        if call.costs:
            for tensor in tensors:
                if tensor.__class__ is Parameter:
                    thread.param_sink.add(id(tensor))
        return call

    def _find(
        self, layer: _Layer, module: nn.Module, given: _Tensors, state: Any
    ) -> LayerCall | None:
        """Return a kept call, or a new one; None for the first call of a kind.

        Many kinds of calls, with shapes of their own, are never repeated.
        """
        # The dimension that vmap maps over is hidden, and so is what autocast has cast before.
        if _torch.function_transforms() or _torch.is_any_autocast_enabled():
            return None
        present = _present(given)
        kind = (layer.cls, *[tensor.shape for tensor in present])
        calls = self._calls.get(kind)
        if calls is None:
            if len(self._calls) >= _LIMIT:
                self.forget()
            self._calls[kind] = []
            return None
        for call in calls:
            if call.is_like(given, state):
                return call
        if len(calls) >= _MOST or not layer.is_known(module):
            return None
        if any(tensor.__class__ not in _TENSORS for tensor in present):
            return None  # a subclass may run operators of its own
        hash(state)  # raises TypeError for a list, which may change
        absent = tuple([i for i, tensor in enumerate(given) if tensor is None])
        calls.append(LayerCall(layer.cls, _torch.tensor_comparison(present), absent, state))
        return calls[-1]

    def keep(self, opened: OpenCall, output: Any) -> None:
        """Note what was recorded of a new call, which has returned ``output``."""
        call, costs = opened.new_call, costs_of(opened)
        assert isinstance(call, LayerCall)
        call.output_shapes = shapes_of(output)
        if self.memory is not None and costs:  # none if the calls were aggregated meanwhile
            call.memory = self.memory.of_layer(opened.memory_before, costs, output)
            call.is_dispatched = call.memory is None
        call.costs = costs  # last: another thread may have found the call


def _is_never_same(*tensors: Tensor) -> bool:
    return False


def begin_layer(thread: ThreadState, known: KnownModule, call: LayerCall) -> None:
    """Begin a call of a layer, which is like ``call`` and runs without the mode."""
    known.layer_call = call
    thread.undispatched = known, _sequence_nr(), _keep_modes_out()


def end_layer(thread: ThreadState, known: KnownModule, start: int, *, returned: bool) -> None:
    """Record what was recorded of the earlier call, for one that has run without the mode.

    start: the sequence number when it began. returned: it has not raised.
    """
    module_phase, call = known.module_phase, known.layer_call
    assert call is not None and thread.current is not None
    if returned:
        for cost, count in call.costs:
            module_phase.counts[cost] += count
        if known.is_new:
            known.is_new = False
            thread.known_modules[id(known.module())] = known
            thread.output_shapes.setdefault(module_phase.fqn, call.output_shapes)
    seq = _sequence_nr()
    if seq != start:
        thread.mark(start, module_phase.fqn)
        thread.mark(seq, thread.current.fqn)
    thread.last_seq = seq
    thread.recorded_in = module_phase
