"""Undocumented parts of torch that the package uses, under names of its own.

No other module names an undocumented part of torch, so a change in torch is adapted to here. Each
entry states its purpose and the public alternative, if there is one. It names the torch release
that introduced the part if that is later than 2.11, the oldest that is supported. Each part that is
relied on has a test in tests/torch_contract.

Sections, in this order:
    operators: kernels, schemas and names of operators; decomposition; attention's choice of kernel.
    dispatch modes: the modes in force and their flags.
    autocast: the caller's autocast within ``__torch_dispatch__``.
    autograd: sequence numbers, running nodes and graph tasks, saved-tensor hooks.
    tensors: classes of tensors, storages and their sizes, jit tracing, nested containers.
    modules: tables of hooks and the frames of module calls.
    torch.compile: stances, compiled autograd, AOTAutograd, inductor, graph breaks.
    torch.distributed: groups, meshes, modules that the program may have imported.
    simulated ranks: groups without processes, DDP and pipelines among them.
    what cannot be moved here: attributes and names that other files read.

Importing this module does not import torch._dynamo, torch._inductor or torch._functorch: the
functions that need them do. What runs at every operator is torch's own function, not a wrapper.
Each ``type: ignore`` here is for a name that torch's type stubs lack or give another type.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, ModuleType
from typing import Any, NamedTuple, Protocol

import torch
import torch._subclasses.fake_tensor
import torch._subclasses.functional_tensor
import torch.fx.node
import torch.nested._internal.nested_tensor
import torch.nn.modules.module
import torch.utils._python_dispatch
import torch.utils._pytree
import torch.utils.checkpoint
from torch import fx

# -- operators --------------------------------------------------------------------------------

# Keys of the registry. Public: none (torch.ops has instances, not the classes).
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator

# Under which keys an operator has kernels. Public: none.
DispatchKey = torch._C.DispatchKey
COMPOSITE = DispatchKey.CompositeImplicitAutograd


def has_kernel(name: str, key: str) -> bool:
    """Return True if the operator has a kernel under that key; False for unknown names.

    ``prim::device`` and ``aten::sym_size`` reach a mode and are unknown to torch's own table.
    """
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    except RuntimeError:
        return False


def is_fallthrough(name: str, key: str) -> bool:
    """Return True if what is registered under that key only goes on to the next. Public: none."""
    return has_kernel(name, key) and (
        torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(
            name, DispatchKey.__members__[key]
        )
    )


def is_custom_op(op: OpOverload) -> bool:
    """Return True if ``torch.library.custom_op`` made it. Public: none."""
    return op.name() in torch._library.custom_ops.OPDEFS


# Every operator's name, for ``ops --coverage``. Public: none.
all_operator_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names


def libraries_loaded() -> Hashable:
    """Return a value that changes when a library adds operators.

    A library adds them when it is imported, by torch.ops.load_library, or in Python by
    torch.library. Listing all operators instead takes milliseconds. Public: none.
    """
    global _libraries
    defined, implemented = torch.library._defs, torch.library._impls  # type: ignore[attr-defined]
    sizes = (
        len(sys.modules),
        len(torch.ops.loaded_libraries),
        len(defined),
        len(implemented),
    )
    # Every counter asks. Torch's own names stay, and are not compared.
    known = _libraries
    if known[0] != sizes or not (known[1] <= defined and known[2] <= implemented):
        added = frozenset(implemented - _implemented_at_import)
        _libraries = sizes, frozenset(defined - _defined_at_import), added
    return _libraries


_libraries: tuple[Any, ...] = ((), frozenset(), frozenset())
_defined_at_import = frozenset(torch.library._defs)  # type: ignore[attr-defined]
_implemented_at_import = frozenset(torch.library._impls)  # type: ignore[attr-defined]


def kernel_of(op: OpOverload) -> Callable[..., Any]:
    """Return the function that an overload's call calls. Public: the overload itself."""
    kernel: Callable[..., Any] = op._op
    return kernel


_FUNCTIONS = (torch._C._VariableFunctions, torch._C.TensorBase, torch._C._nn)


def functions_named_as(op: OpOverload) -> list[Callable[..., Any]]:
    """Return torch's functions and methods in C++ that have an operator's name, such as torch.add.

    Public: what they are imported as, for most of them.
    """
    if op.namespace != "aten":
        return []
    name = schema_of(op).name[len("aten::") :]
    function, method, of_layers = (getattr(holder, name, None) for holder in _FUNCTIONS)
    one_by_one = _given_one_by_one(method) if method is not None and _takes_sizes(op) else None
    return [one for one in (function, one_by_one, method, of_layers) if callable(one)]


def _takes_sizes(op: OpOverload) -> bool:
    """Return True for an operator on a tensor and a list of whole numbers."""
    kinds = [str(argument.real_type) for argument in schema_of(op).arguments]
    return kinds in (["Tensor", "List[int]"], ["Tensor", "List[SymInt]"])


def _given_one_by_one(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return what passes the numbers of a list as arguments.

    Given a list, torch first takes it for a number, and drops the exception: 0.4 µs.
    """

    def run(tensor: torch.Tensor, sizes: Sequence[int]) -> Any:
        return method(tensor, *sizes) if sizes else method(tensor, sizes)

    return run


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Return the schema: names of the arguments, and which are ``out=``. Public: none."""
    return op._schema


def packet_name(packet: OpOverloadPacket) -> str:
    """Return ``"aten::mm"`` for ``torch.ops.aten.mm``. Public: none."""
    return packet._qualified_op_name


def overload_name(op: OpOverload) -> str:
    """Return ``"default"``, ``"Tensor"`` and so on. Public: the end of ``str(op)``."""
    return op._overloadname


def overloads_of(packet: OpOverloadPacket) -> list[OpOverload]:
    """Return all overloads of an operator. Public: none."""
    return [getattr(packet, name) for name in packet.overloads()]  # type: ignore[no-untyped-call]


def overload_of(custom_op: torch.library.CustomOpDef) -> OpOverload:
    """Return what ``torch.library.custom_op`` registered. Public: ``torch.ops.<library>``."""
    return custom_op._opoverload


def is_decomposable(op: OpOverload) -> bool:
    """Return True if ``op`` consists of other operators. Public: none."""
    try:
        return bool(op._can_decompose())
    except RuntimeError:  # torch has no such operator by that name: prim.device, aten.sym_size
        return False


def run_taken_apart(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the operators that ``op`` consists of, by torch's own kernel, as without a mode.

    Public: ``OpOverload.decompose``, which prefers a decomposition in Python, written for
    compilers, with other operators and other roundings.
    """
    if has_kernel(op.name(), COMPOSITE.name):
        return op._op_dk(COMPOSITE, *args, **kwargs)
    return op.decompose(*args, **kwargs)


def prefers_python() -> bool:
    """Return True if operators run by decompositions in Python, as in traces. Public: none."""
    return torch._C._dispatch_tls_is_dispatch_key_included(DispatchKey.PythonDispatcher)


# Keys under which autograd runs an operator, by device; "Other" is for tensors in function
# transforms, CUDA also for fake tensors. Public: the names in documentation.
_AUTOGRAD_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradMeta", "AutogradOther")
_DEVICES_OF_SOME_BUILDS = ("XPU", "MPS", "XLA", "HPU", "PrivateUse1")


def autograd_keys() -> tuple[str, ...]:
    """Return the keys under which autograd runs operators, of the devices that torch has here."""
    found = (d for d in _DEVICES_OF_SOME_BUILDS if has_kernel("aten::empty.memory_format", d))
    return (*_AUTOGRAD_KEYS, *(f"Autograd{device}" for device in found))


def autograd_kernel(op: OpOverload, key: str) -> Callable[..., Any] | None:
    """Return the kernel of ``op`` under a key of autograd; called with the keyset and arguments.

    None where there is none, where autograd runs the kernel of the device, which a dispatch mode
    sees, and for one in Python under this very key: under a mode, torch looks such kernels up when
    it calls them, and would find the one that is to replace it. Public:
    ``torch.library.get_kernel``, whose result's method ``call_boxed`` is documented with it.
    """
    name, noted = op.name(), _noted(op, key)
    if noted in torch.library._impls or noted in _own_kernels:  # type: ignore[attr-defined]
        return None
    is_autograds = has_kernel(name, "Autograd") or has_kernel(name, key)
    if has_kernel(name, key.removeprefix("Autograd")) and not is_autograds:
        return None
    try:
        kernel: Callable[..., Any] = torch.library.get_kernel(op, key).call_boxed
    except RuntimeError:
        return None
    return kernel


def may_be_replaced(op: OpOverload) -> bool:
    """Return True if Python defined ``op`` or gave it a kernel of autograd, and may do so again.

    A kernel of a library that was removed raises when it is called, and the names that
    ``libraries_loaded`` compares are the same once another library has defined them. Public: none.
    """
    noted = (_noted(op, key) for key in ("Autograd", "CompositeImplicitAutograd"))
    is_defined = op.name() in torch.library._defs  # type: ignore[attr-defined]
    return is_defined or not torch.library._impls.isdisjoint(noted)  # type: ignore[attr-defined]


# Under the first, ``torch.vmap`` takes all composite operators apart; under the others, a few have
# kernels of their own that do so, for any transform of torch.func. Public: none.
_BATCHED = "FuncTorchBatched"
_OF_TRANSFORMS = ("FuncTorchVmapMode", "FuncTorchDynamicLayerFrontMode")


def transform_kernels(op: OpOverload) -> dict[str, Callable[..., Any]]:
    """Return the kernels by which torch.func takes a composite operator apart, by dispatch key.

    They are called as ``autograd_kernel`` says.
    """
    keys = (_BATCHED, *(key for key in _OF_TRANSFORMS if has_kernel(op.name(), key)))
    return {key: torch.library.get_kernel(op, key).call_boxed for key in keys}


_own_kernels: set[str] = set()  # of ``Kernels``, as torch.library would name them


def _noted(op: OpOverload, key: str) -> str:
    """Return how ``torch.library`` notes a kernel in Python."""
    return f"{op.namespace}/{op.name().partition('::')[2]}/{key}"


_has_replaced = False


@contextmanager
def _hidden_warning_of_replacement(op: OpOverload, key: str) -> Iterator[None]:
    """Hide torch's warning, issued once in a process, that a kernel replaces another."""
    global _has_replaced
    if _has_replaced or not has_kernel(op.name(), key):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    _has_replaced = True


class Kernels:
    """Kernels in Python for operators of one library, until they are removed.

    Public: ``torch.library.Library``, which has no public way to remove them, takes three times as
    long, and refuses a kernel for the meta device of a composite operator.
    """

    def __init__(self, namespace: str) -> None:
        self._library: Any = torch._C._dispatch_library("IMPL", namespace, "", __file__, 0)
        self._names: set[str] = set()

    def register(self, op: OpOverload, kernel: Callable[..., Any], key: str) -> None:
        """Have ``kernel(keyset, *args, **kwargs)`` run ``op`` where this key comes first."""
        self._names.add(_noted(op, key))
        _own_kernels.update(self._names)
        with _hidden_warning_of_replacement(op, key):
            self._library.impl(op.name().partition("::")[2], key, kernel, True)

    def remove(self) -> None:
        """Remove the kernels; does nothing the second time."""
        _own_kernels.difference_update(self._names)
        self._library.reset()


def is_flash_chosen_on_cpu(*args: Any, **kwargs: Any) -> bool:
    """Return True if attention on the CPU would take the fused kernel. Public: none.

    The rules read sizes, strides and dtypes alone, so that any device's tensors will do. They raise
    RuntimeError where ``sdpa_kernel`` permits no kernel that the CPU has.
    """
    try:
        choice = torch.ops.aten._fused_sdp_choice.default._op_dk(DispatchKey.CPU, *args, **kwargs)
    except RuntimeError:
        return False
    return bool(choice == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)


# Attention of separate operators, and its probabilities. Public: ``sdpa_kernel``, process-wide.
math_attention: Callable[..., tuple[torch.Tensor, torch.Tensor]] = (
    torch.ops.aten._scaled_dot_product_attention_math
)


def formula_of_torchs_own_counter(op: Any) -> Callable[..., Any] | None:
    """Return what the user registered by ``torch.utils.flop_counter.register_flop_formula``.

    Public: that function, but not the table of what it registered.
    """
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(op.overloadpacket if isinstance(op, OpOverload) else op)


# -- dispatch modes ---------------------------------------------------------------------------

# The base of every counter. Public: none (documented in its source alone). The class methods
# ``_should_skip_dynamo`` and ``ignore_compile_internals`` are overridden by name.
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode

# This thread's modes, outermost first. Public: none.
modes_in_force: Callable[[], list[TorchDispatchMode]] = (
    torch.utils._python_dispatch._get_current_dispatch_mode_stack
)

number_of_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

# Take the innermost mode off, or put one on, and nothing else. Public: ``with mode:``, which also
# sets flags of torch.compile; an interrupt within it leaves them wrong.
pop_mode: Callable[[], TorchDispatchMode] = torch.utils._python_dispatch._pop_mode
push_mode: Callable[[TorchDispatchMode], None] = torch.utils._python_dispatch._push_mode


def stacked_modes() -> list[TorchDispatchMode]:
    """Return the modes that ``pop_mode`` takes off one by one, outermost first. Public: none.

    Those of fake tensors and tracers have places of their own, outside of these.
    """
    return [mode for mode in modes_in_force() if not mode.is_infra_mode()]


class ModeScope(NamedTuple):
    """A part of the program at whose end torch restores dispatch modes or keys of its start.

    That is ``torch.inference_mode``, a node of a backward pass (of one graph task), or the call of
    a compiled callable. A mode that is entered inside sees nothing afterwards. One that is left
    inside comes back, or its key does: then the next operator that is given no tensor raises an
    internal error.
    """

    is_inference: bool = False
    graph_task: int = -1
    is_compiled: bool = False

    @classmethod
    def here(cls) -> ModeScope:
        """Return the scope of this moment; an inference mode within another looks like it."""
        return cls(torch.is_inference_mode_enabled(), graph_task_id(), is_in_compiled_call())


NO_SCOPE = ModeScope()


def are_modes_seen() -> bool:
    """Return False if no operator reaches this thread's modes. Public: none."""
    return torch._C._dispatch_tls_is_dispatch_key_included(DispatchKey.Python)


def tell_of_modes() -> None:
    """Tell torch.compile of the modes that are in force in this thread. Public: none.

    A mode that ends restores the flags that it found, which are the process's. A mode of another
    thread, or one that was left out of order, may have ended since.
    """
    flags, modes = torch.utils._python_dispatch, modes_in_force()
    flags._is_in_torch_dispatch_mode = bool(modes)
    flags._is_in_non_infra_torch_dispatch_mode = not all(mode.is_infra_mode() for mode in modes)
    sees_compiler = not all(mode.ignore_compile_internals() for mode in modes)
    flags._is_in_any_mode_without_ignore_compile_internals = sees_compiler
    flags.set_is_in_mode_without_ignore_compile_internals(sees_compiler)


# Modes of tracers that see operators before autograd does: how many, and taking one off.
# ``push_mode`` puts one on. Public: none.
_modes_before_autograd: Callable[[], int] = torch._ops._len_torch_dispatch_stack_pre_dispatch
_pop_mode_before_autograd: Callable[[], TorchDispatchMode] = torch._ops._pop_mode_from_pre_dispatch


class _HiddenModes(threading.local):
    """The modes that each block of ``modes_disabled`` took off in a thread, outermost first."""

    def __init__(self) -> None:
        self.stacks: list[list[TorchDispatchMode]] = []


_HIDDEN = _HiddenModes()


class modes_disabled:
    """Block in which no mode sees the profiler's own operators. Public: none.

    torch's own, ``_disable_current_modes``, is a generator. After an interrupt as its block begins
    or ends it puts the modes back when it is freed, also one that was left before that.
    """

    def __init__(self) -> None:
        self._hidden: list[TorchDispatchMode] = []
        self._before_autograd: list[TorchDispatchMode] = []

    def __enter__(self) -> None:
        self._hidden.extend(modes_in_force())
        _HIDDEN.stacks.append(self._hidden)
        try:
            while _modes_before_autograd():
                self._before_autograd.append(_pop_mode_before_autograd())
            while modes_in_force():
                pop_mode()
        except BaseException:
            self._put_back()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._put_back()
        except BaseException:  # an interrupt: the frames above must meet the modes that they left
            self._put_back()
            raise

    def __del__(self) -> None:
        self._put_back()  # where an interrupt came before the first line of ``__exit__``

    def _put_back(self) -> None:
        """Put the modes back, once; may run again after an interrupt."""
        if not any(stack is self._hidden for stack in _HIDDEN.stacks):
            return
        while len(modes_in_force()) < len(self._hidden):
            push_mode(self._hidden[len(modes_in_force())])
        while self._before_autograd:
            push_mode(self._before_autograd.pop())
        _HIDDEN.stacks[:] = [stack for stack in _HIDDEN.stacks if stack is not self._hidden]


def is_hidden(mode: TorchDispatchMode) -> bool:
    """Return True if a block of ``modes_disabled`` in this thread will put the mode back."""
    return any(hidden is mode for stack in _HIDDEN.stacks for hidden in stack)


def leave_hidden_mode(mode: TorchDispatchMode) -> None:
    """Make sure that no block of ``modes_disabled`` in this thread puts the mode back."""
    for stack in _HIDDEN.stacks:
        stack[:] = [hidden for hidden in stack if hidden is not mode]


# While an object of it lives, no dispatch mode sees the operators of this thread. Unlike
# ``modes_disabled`` it takes off none, and takes a tenth of the time. Public: none.
keep_modes_out: Callable[[], object] = torch._C._DisableTorchDispatch

# Reads a tensor's properties without ``__torch_function__`` of its class or of modes. Public:
# ``torch._C`` alone has it.
torch_functions_disabled: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction
# The number of modes for ``__torch_function__`` in force in this thread. Public: none.
function_modes: Callable[[], int] = torch._C._len_torch_function_stack

# -- autocast ---------------------------------------------------------------------------------

# Whether it is enabled in this thread. Public: ``torch.is_autocast_enabled`` of a type of device.
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

_AUTOCAST_KEYS = {
    name: torch._C.DispatchKeySet(getattr(DispatchKey, name))
    for name in dir(DispatchKey)
    if name.startswith("Autocast")
}


class _Autocast(threading.local):
    """The keys of autocast that are enabled for the operator that a thread runs, if decided."""

    enabled: Any = None


_autocast = _Autocast()


def with_autocast(call: Callable[..., Any], op: OpOverload) -> Callable[..., Any]:
    """Return ``call``, which runs ``op`` in ``__torch_dispatch__``, with its caller's autocast.

    torch disables autocast there. An operator that autocast casts runs with autocast disabled
    anyway; the kernels of others may run operators that autocast would cast. Public: none.
    """
    keys = torch._C.DispatchKeySet(DispatchKey.Undefined)
    for name, key in _AUTOCAST_KEYS.items():
        if not has_kernel(op.name(), name):
            keys = keys | key

    def run(*args: Any, **kwargs: Any) -> Any:
        # The nesting of autocast blocks is known only from changing it; 1 is this change alone.
        is_in_autocast = torch.autocast_increment_nesting() > 1
        torch.autocast_decrement_nesting()
        if not is_in_autocast:
            return call(*args, **kwargs)
        outer = _autocast.enabled
        excluded = torch._C._dispatch_tls_local_exclude_set()
        if outer is None:
            # The snapshot is of the outermost operator, also in the operators that it consists of.
            with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
                enabled = excluded - torch._C._dispatch_tls_local_exclude_set()
        else:
            enabled = outer
        enabled = _autocast.enabled = enabled & keys
        included = torch._C._dispatch_tls_local_include_set()
        try:
            with torch._C._ForceDispatchKeyGuard(included, excluded - enabled):
                return call(*args, **kwargs)
        finally:
            _autocast.enabled = outer

    return run


# -- lazy conjugates --------------------------------------------------------------------------

_LAZY = (DispatchKey.Conjugate, DispatchKey.Negative)
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


def with_conjugates(call: Callable[..., Any], op: OpOverload) -> Callable[..., Any]:
    """Return ``call``, which runs ``op`` in ``__torch_dispatch__``, with conjugates resolved.

    torch conjugates and negates lazily, and excludes there what resolves the results before other
    operators use them: these would take ``x.conj()`` for ``x``. Those of a kernel of torch that
    conjugates, which are of FFT and of linear algebra, thus return other values. Public: none.
    """
    if not op.name().startswith(("aten::fft_", "aten::linalg_")):
        return call

    def run(*args: Any, **kwargs: Any) -> Any:
        before = [(key, _is_excluded(key)) for key in _LAZY]
        try:
            for key in _LAZY:
                _exclude(key, False)
            return call(*args, **kwargs)
        finally:
            for key, was_excluded in before:
                _exclude(key, was_excluded)

    return run


# -- autograd ---------------------------------------------------------------------------------

# The number that the next node of this thread gets; asked after every operator. Public: none.
sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr

# The node whose backward runs in this thread, or None. Public: none.
current_node: Callable[[], Any] = torch._C._current_autograd_node

# References to a tensor, from C++ and from its Python object. Public: none.
tensor_use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]

# References to a storage by its ``_cdata``: of each of its tensors and, if it has one, of its
# Python object. Public: none.
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count  # type: ignore[attr-defined]

# Which backward pass runs in this thread, -1 for none; asked at every operator. Public: none.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# The innermost ``(pack, unpack)``, or None; True: also where torch.jit traces. Public: none.
saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks

# The class of the node that runs a function again for a reentrant checkpoint. Public: none.
REENTRANT_NODE: type = torch.utils.checkpoint.CheckpointFunction._backward_cls

# The function through which all of backward runs, by which its frames are known. Public: none.
ENGINE_CODE: CodeType = torch.autograd.graph._engine_run_backward.__code__


def keeps_graph(engine: FrameType) -> bool:
    """Return True if the backward pass of a frame with ``ENGINE_CODE`` keeps what nodes saved."""
    _gradients, retain_graph, *_ = engine.f_locals["args"]
    return bool(retain_graph)


def holds_saved_tensors(node: Any) -> bool:
    """Return True for a node of C++ that holds a tensor, as it does until its backward returns.

    Public: ``grad_fn._raw_saved_*``, of whose attribute ``data`` the documentation says nothing.
    """
    try:
        saved = [getattr(node, name) for name in _names_of_saved(node.__class__)]
    except RuntimeError:  # of a list of tensors that is released
        return False
    return any(getattr(tensor, "data", None) is not None for tensor in saved)


@functools.lru_cache(maxsize=256)
def _names_of_saved(node: type) -> tuple[str, ...]:
    return tuple(name for name in dir(node) if name.startswith("_raw_saved_"))


# -- tensors ----------------------------------------------------------------------------------

# Whether a tensor has memory that torch shows; sparse tensors, oneDNN's, and those of function
# transforms do not. Public: ``untyped_storage()``, which raises.
has_storage: Callable[[torch.Tensor], bool] = torch._C._has_storage

# The address of a tensor's StorageImpl, the same for all views of a storage, also on meta; raises
# NotImplementedError for a tensor without one. Public: untyped_storage().data_ptr() is 0 on meta.
storage_address: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]

# Whether two of these tensors, among which None counts for nothing, show the same storage, in one
# call. Public: none.
share_storage: Callable[[tuple[torch.Tensor | None, ...]], bool] = functools.partial(
    torch._C._any_output_is_alias_to_input_or_output,
    (),
    {},  # type: ignore[attr-defined]
)


def tensor_comparison(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return what compares as many tensors with these. Public: none in one call.

    They are the same if types, dtypes, devices, layouts, shapes, strides and whether they require a
    gradient are. A tensor that is given twice is never the same. The result takes anything but
    strided nested tensors: their exception leaves C++ through the interpreter, which it destroys.
    """
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[[*tensor.shape] for tensor in tensors],  # type: ignore[misc]
        dynamic_dims_strides=[[*tensor.stride()] for tensor in tensors],  # type: ignore[misc]
    )
    found: Callable[..., bool] = guards.check
    return found


# Tensors without data; those that tracers compute with; jagged nested ones. Public: none.
FakeTensor = torch._subclasses.fake_tensor.FakeTensor
FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
FunctionalTensor = torch._subclasses.functional_tensor.FunctionalTensor
NestedTensor = torch.nested._internal.nested_tensor.NestedTensor

# What ``__torch_dispatch__`` is of subclasses that have none of their own. Public: none.
disabled_torch_dispatch: Any = torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]

# Zeros without memory, as forward-mode differentiation has them. Public: none.
efficient_zeros: Callable[..., torch.Tensor] = torch._efficientzerotensor

# Whether a tensor consists of inner tensors that ``__tensor_flatten__`` names. Public: none.
is_wrapper_subclass: Callable[[Any], bool] = (
    torch.utils._python_dispatch.is_traceable_wrapper_subclass
)


class FollowedMethod:
    """A method of a class of torch's, which is replaced while its calls are followed.

    follow: have ``follower`` called after each call, with the object whose method it is.
    unfollow: end that; does nothing the second time.
    """

    def __init__(self, owner: type, name: str) -> None:
        base: Callable[..., Any] = getattr(owner, name)
        followers: list[Callable[[Any], None]] = []

        @functools.wraps(base)
        def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = base(self, *args, **kwargs)
            for follower in tuple(followers):
                follower(self)
            return result

        self._owner, self._name, self._base = owner, name, vars(owner).get(name)
        self._followed, self._followers = followed, followers

    def follow(self, follower: Callable[[Any], None]) -> None:
        self._followers.append(follower)
        setattr(self._owner, self._name, self._followed)

    def unfollow(self, follower: Callable[[Any], None]) -> None:
        if follower in self._followers:
            self._followers.remove(follower)
        if not self._followers and vars(self._owner).get(self._name) is self._followed:
            if self._base is None:  # it is inherited
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._base)


# These are not operators. FSDP releases and allocates the memory of parameters by the first; the
# second runs what was captured. Public: none.
storage_sizes = FollowedMethod(torch.UntypedStorage, "resize_")
graph_replays = FollowedMethod(torch.cuda.CUDAGraph, "replay")


def package_runs() -> FollowedMethod | None:
    """Return what follows the calls of AOTInductor's packages; None if the program has none.

    They run a library that was compiled. Public: none.
    """
    module = sys.modules.get("torch.export.pt2_archive._package")
    return None if module is None else _calls_of(module.AOTICompiledModel)


@functools.cache
def _calls_of(owner: type) -> FollowedMethod:
    return FollowedMethod(owner, "__call__")


# Whether a profiler is on in this thread: torch's, or the reports below. Public: none.
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
_PROFILER_OF_ALLOCATIONS = torch._C._profiler.ProfilerConfig(
    torch._C._profiler.ProfilerState.CPU,
    False,  # report_input_shapes
    True,  # profile_memory
    False,  # with_stack
    False,  # with_flops
    False,  # with_modules
    torch._C._profiler._ExperimentalConfig(),
)


def start_reporting_allocations() -> None:
    """Have torch's allocators report what this thread allocates, until the reports are stopped.

    No profiler may be on. Public: ``torch.profiler.profile(profile_memory=True)``, which writes to
    stderr, and takes a hundred times as long to start and stop as this older profiler.
    """
    torch._C._autograd._enable_profiler_legacy(_PROFILER_OF_ALLOCATIONS)


def stop_reporting_allocations() -> tuple[list[int], list[int]]:
    """Return the bytes of each allocation (positive) and release (negative), in order.

    The first list is of the CPU, the second of CUDA devices, whose blocks are multiples of 512
    bytes. On the CPU, releases of what was allocated before the start are not reported.
    """
    if not is_profiling():
        return [], []
    threads: Any = torch._C._autograd._disable_profiler_legacy()  # torch's type of kind() is wrong
    events = [event for thread in threads for event in thread if event.kind() == "memory_alloc"]
    on_cpu = [event.cpu_memory_usage() for event in events]
    on_cuda = [event.cuda_memory_usage() for event in events]
    return [size for size in on_cpu if size], [size for size in on_cuda if size]


def reports_on_cuda() -> bool:
    """Return True if CUDA's allocator is torch's own, which reports and keeps statistics."""
    return torch.cuda.is_initialized() and _cuda_allocator() == "native"


def _cuda_allocator() -> str:
    return torch.cuda.memory.get_allocator_backend()


def released_on_cuda(device: torch.device) -> int:
    """Return the bytes that were asked for, on a CUDA device, and released, so far.

    Public: ``torch.cuda.memory_stats``, which takes longer.
    """
    statistics: Any = torch._C._cuda_memoryStats(device.index)  # type: ignore[attr-defined]
    return int(statistics["requested_bytes"]["all"]["freed"])


_fp32_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter


# Public: ``torch.backends.cudnn.enabled``, which takes longer to read.
is_cudnn_enabled: Callable[[], bool] = torch._C._get_cudnn_enabled
_is_grad_enabled = torch.is_grad_enabled
_is_deterministic = torch._C._get_deterministic_algorithms
_is_cudnn_deterministic = torch._C._get_cudnn_deterministic
_tries_kernels = torch._C._get_cudnn_benchmark
_may_use_tf32 = torch._C._get_cudnn_allow_tf32


# Returns the settings by which a device's kernels of convolutions and layers are chosen; None if
# they do not tell. Public: ``torch.backends.mkldnn.flags``, ``torch.backends.cudnn.flags`` and
# ``fp32_precision``, which take longer to read.
SettingsReader = Callable[[], tuple[Any, ...] | None]


def cpu_kernel_settings() -> tuple[Any, ...] | None:
    """Return the settings by which kernels on the CPU are chosen."""
    return (
        torch.get_num_threads(),
        _is_grad_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_mkldnn_deterministic(),
        torch._C._get_nnpack_enabled(),
        _is_deterministic(),
        _fp32_precision("mkldnn", "conv"),
        _fp32_precision("mkldnn", "rnn"),
    )


def cuda_kernel_settings() -> tuple[Any, ...] | None:
    """Return the settings by which kernels on CUDA are chosen.

    None where cuDNN tries its kernels when it meets a new signature.
    """
    if _tries_kernels():
        return None
    try:
        precision: Any = _may_use_tf32()  # a third of the time that two texts take
    except RuntimeError:  # some kernels may, others may not
        precision = _fp32_precision("cuda", "conv"), _fp32_precision("cuda", "rnn")
    return (
        _is_grad_enabled(),
        _is_deterministic(),
        is_cudnn_enabled(),
        _is_cudnn_deterministic(),
        precision,
    )


# Whether ``torch.jit.trace`` is running, and how to suspend it. Public: none.
tracing_state: Callable[[], Any] = torch._C._get_tracing_state
set_tracing_state: Callable[[Any], None] = torch._C._set_tracing_state  # type: ignore[attr-defined]
_TRACER = torch._C._dispatch_key_parse("Tracer")


def tracer_not_excluded() -> AbstractContextManager[Any]:
    """Context in which the tracing state can be set, also in an operator, where torch refuses to
    while its key is excluded. Public: none.
    """
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded.remove(_TRACER))


# Nested containers as torch sees them. Public: none in torch (the package optree).
tree_leaves: Callable[[Any], list[Any]] = torch.utils._pytree.tree_leaves
tree_map: Callable[..., Any] = torch.utils._pytree.tree_map
tree_map_only: Callable[..., Any] = torch.utils._pytree.tree_map_only

# -- modules ----------------------------------------------------------------------------------

# Where the tables of global hooks are, of which there is a public way to add, and to remove what
# one has added. Public: none to see or to replace them.
module_globals: ModuleType = torch.nn.modules.module
_OPTIMIZERS: Any = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides it

# How a module is called, by which the frames of calls are known. Public: ``__call__``.
MODULE_CALL_CODE: CodeType = torch.nn.Module._call_impl.__code__


@functools.cache
def _tables_of_global_hooks() -> list[tuple[dict[str, Any], list[str]]]:
    """Return where the tables are, and the names that they have there."""
    return [
        (holder, [name for name, table in holder.items() if _is_table_of_hooks(name, table)])
        for holder in (vars(module_globals), vars(_OPTIMIZERS))
    ]


def _is_table_of_hooks(name: str, value: Any) -> bool:
    return name.startswith("_global_") and isinstance(value, dict)


def remove_global_hooks(*hooks: Callable[..., Any]) -> None:
    """Remove these from the global hooks of modules and optimizers, where they are installed.

    Public: the handle that registration returns, which an interrupt can lose.
    """
    for holder, names in _tables_of_global_hooks():
        tables = [holder[name] for name in names]
        found = {key for table in tables for key, hook in list(table.items()) if hook in hooks}
        # The hooks themselves go last: they are what another attempt finds the keys by.
        for table in sorted(
            tables, key=lambda table: any(hook in hooks for hook in table.values())
        ):
            for key in found:
                table.pop(key, None)


# A module's tables of forward pre-hooks, of those that take kwargs, and of forward hooks.
# Public: registration and the handle's ``remove``, which together take 2 us for each hook.
call_hooks: Callable[[torch.nn.Module], tuple[dict[int, Any], dict[int, Any], dict[int, Any]]] = (
    attrgetter("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks")
)

# An optimizer's tables of step pre-hooks and post-hooks; public as for a module's.
step_hooks: Callable[[torch.optim.Optimizer], tuple[dict[int, Any], dict[int, Any]]] = attrgetter(
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
)


# The tables of the hooks of all optimizers; public as for a module's.
all_step_pre_hooks: dict[int, Any] = _OPTIMIZERS._global_optimizer_pre_hooks
all_step_post_hooks: dict[int, Any] = _OPTIMIZERS._global_optimizer_post_hooks


def undisabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that ``torch.compiler.disable`` was called for; any other as it is.

    Torch calls it for parts of its optimizers, some of them twice, when a program first compiles
    anything. Public: none.
    """
    while (inner := getattr(function, "_torchdynamo_orig_callable", None)) is not None:
        function = inner
    return function


_PACKAGE = str(Path(torch.__file__).parent)


def is_of_torch(function: Any) -> bool:
    """Return True for a function that torch itself defines, in C++ or Python."""
    code = getattr(function, "__code__", None)
    if code is None:
        return isinstance(function, BuiltinFunctionType)
    return bool(code.co_filename.startswith(_PACKAGE))


# In these, torch gives a module a class of its own, below that of the program: parametrize,
# fully_shard and replicate.
_CLASS_MAKERS = (
    "torch.nn.utils.parametrize",
    "torch.distributed.fsdp",
    "torch.distributed._composable",
)


def class_of(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the class of a module as the program wrote it. Public: none."""
    cls = type(module)
    while cls.__module__.startswith(_CLASS_MAKERS) and cls.__bases__[-1] is not torch.nn.Module:
        base = cls.__bases__[-1]
        is_written = getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
        if is_written or not issubclass(base, torch.nn.Module):
            break
        cls = base
    return cls


def module_call() -> Any:
    """Return how modules are called now: a program may have put another function there."""
    return torch.nn.Module._call_impl


# True of parameters without a shape as yet. Public: ``isinstance`` of UninitializedParameter.
is_lazy: Callable[[Any], bool] = torch.nn.parameter.is_lazy


def function_transforms() -> tuple[Any, ...] | None:
    """Return the transforms of torch.func that run, each with its batch size if it is a ``vmap``.

    Inside ``vmap`` a tensor's shape lacks the dimension that is mapped over. Public: none.
    """
    transforms = _interpreter_stack()
    if transforms is None:
        return None
    return tuple(
        _Vmap(one).batchSize() if one.key() == _TransformType.Vmap else str(one.key())
        for one in transforms
    )


_interpreter_stack = torch._C._functorch.get_interpreter_stack
_TransformType = torch._C._functorch.TransformType
_Vmap = torch._C._functorch.CVmapInterpreterPtr


def is_in_vmap() -> bool:
    """Return True while torch.vmap runs a function, on one sample as it seems. Public: none."""
    return _is_in(_TransformType.Vmap)


def is_in_forward_mode() -> bool:
    """Return True while forward-mode autograd computes tangents. Public: none."""
    return torch.autograd.forward_ad._current_level >= 0 or _is_in(_TransformType.Jvp)


def _is_in(transform: Any) -> bool:
    return any(level.key() == transform for level in _interpreter_stack() or ())


def is_batched(tensor: torch.Tensor) -> bool:
    """Return True for a tensor that stands for one sample of torch.vmap. Public: none."""
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return functorch.is_batchedtensor(tensor)


def without_gradient_wrappers(value: Any) -> Any:
    """Return a value with the tensors in place of which torch.func.grad has wrappers.

    These have no storage. Public: none.
    """
    functorch = torch._C._functorch

    def unwrap(part: Any) -> Any:
        while isinstance(part, torch.Tensor) and functorch.is_gradtrackingtensor(part):
            part = functorch.get_unwrapped(part)
        return part

    return torch.utils._pytree.tree_map(unwrap, value)


# -- torch.compile ----------------------------------------------------------------------------

DYNAMO = "torch._dynamo"  # in sys.modules once the program has compiled something
_COMPILED_CALL = str(Path("torch", "_dynamo", "eval_frame.py"))
POLYFILLS = str(Path(torch.__file__).parent / "_dynamo" / "polyfills")  # Python for builtins


def current_stance() -> Any:
    """Return the stance: what torch.compile does at the next call. Public: none to ask."""
    from torch._dynamo import eval_frame

    return eval_frame._stance


def set_stance(stance: Any) -> Any:
    """Set the stance, or an object that acts as one; return the previous one.

    Public: ``torch.compiler.set_stance``, which makes no exception for higher-order operators.
    """
    from torch._dynamo import eval_frame

    return eval_frame._set_stance(stance)


def is_in_compiled_call() -> bool:
    """Return True within a call of what ``torch.compile`` returned, compiled or forced eager.

    A dispatch mode that is entered there sees nothing after the call, which restores the dispatch
    keys of its start. Public: ``torch.compiler.is_compiling``, which tells of tracing alone.
    """
    frame = sys._getframe(1) if DYNAMO in sys.modules else None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith(_COMPILED_CALL):
            return True
        frame = frame.f_back
    return False


@functools.cache
def keep_from_compiling(module: str) -> None:
    """Have torch.compile run the functions of a module or package, in place of compiling them.

    Public: ``torch.compiler.disable``, for one function. Inside of it the code that called it
    looks eager, compiled or not.
    """
    from torch._dynamo import trace_rules

    trace_rules.add(module)


def answer_set_stance(answer: Callable[[Any], Any] | None) -> None:
    """Have ``answer`` called where the program sets a stance; None: torch's own function again.

    It is given the stance and returns the one before. Public: none.
    """
    from torch._dynamo import decorators, eval_frame

    decorators._set_stance = answer or eval_frame._set_stance  # type: ignore[assignment]


def suspend_compiled_autograd() -> tuple[Any, ...] | None:
    """Have backward passes run eagerly; return what ``resume_compiled_autograd`` takes.

    None where they run eagerly anyway. Public: ``torch._dynamo.config.compiled_autograd``, which is
    read at compilation.
    """
    from torch._dynamo import compiled_autograd

    compiler, is_dynamic = torch._C._dynamo.compiled_autograd.set_autograd_compiler(None, False)
    if compiler is None:
        return None
    compiled_autograd.compiled_autograd_enabled = False
    return compiler, is_dynamic, compiled_autograd.depth


def resume_compiled_autograd(state: tuple[Any, ...]) -> None:
    """Have backward passes compiled again, unless the program has changed or ended it meanwhile."""
    from torch._dynamo import compiled_autograd

    compiler, is_dynamic, depth = state
    set_compiler = torch._C._dynamo.compiled_autograd.set_autograd_compiler
    changed, changed_dynamic = set_compiler(None, False)
    if changed is not None:
        set_compiler(changed, changed_dynamic)
    elif compiled_autograd.depth == depth:
        set_compiler(compiler, is_dynamic)
        compiled_autograd.compiled_autograd_enabled = True


@functools.cache
def _higher_order_utils() -> ModuleType:
    """Import the module once: it is asked several times for each operator of some modes."""
    return importlib.import_module("torch._higher_order_ops.utils")


def compiles_higher_order_operator() -> bool:
    """Return True while torch.cond or its like compiles itself. Public: none. Later than 2.11."""
    asked = getattr(_higher_order_utils(), "_in_hop_compile", None)
    return asked is not None and bool(asked())


def functions_of_running_operators() -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield the functions of the higher-order operators that run, each with the operator's name.

    They are those of the program's call. A mode may get functions that autograd or torch.func has
    traced anew. Public: none; the frames of ``HigherOrderOperator.__call__`` have them.
    """
    code, frame = HigherOrderOperator.__call__.__code__, sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            for argument in frame.f_locals["args"]:
                if isinstance(argument, fx.GraphModule):
                    yield frame.f_locals["self"].name(), argument
        frame = frame.f_back  # type: ignore[assignment]


def module_classes_in(function: fx.GraphModule) -> set[Any]:
    """Return the classes of the modules whose calls torch has traced into a function.

    torch.export gives their qualified names. A module that the function calls is not among them.
    Public: none; ``nn_module_stack`` of its nodes has them.
    """
    return {
        cls
        for part in function.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
        for _, cls in _calls_around(node)
    }


def _calls_around(node: fx.Node) -> list[tuple[Any, Any]]:
    calls = list((node.meta.get("nn_module_stack") or {}).values())
    return calls[:-1] if node.op == "call_module" else calls


def triton_kernels() -> Any:
    """Return the table of Triton kernels, which operators name by number. Public: none."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table


# Calls a function on each leaf of a node's arguments. Public: none.
map_aggregate: Callable[[Any, Callable[[Any], Any]], Any] = torch.fx.node.map_aggregate


def fake_mode() -> AbstractContextManager[Any]:
    """Return a block in which tensors have shapes only. Public: none (torch._subclasses).

    Constants of a graph are real tensors, which the block accepts as inputs. ``while_loop`` wants
    an environment of symbols.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return torch._subclasses.fake_tensor.FakeTensorMode(
        allow_non_fake_inputs=True, shape_env=ShapeEnv()
    )


def fakes_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Return the fake tensor's own mode, or a new one for another tensor. Public: none."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else fake_mode()


def no_autograd_cache() -> AbstractContextManager[Any]:
    """Return a block in which AOTAutograd compiles anew, instead of reusing cached code.

    Public: the variable TORCHINDUCTOR_AUTOGRAD_CACHE, of the whole process.
    """
    from torch._functorch import config

    patched: AbstractContextManager[Any] = config.patch(enable_autograd_cache=False)
    return patched


def aot_autograd(
    fw_compiler: Callable[..., Any], bw_compiler: Callable[..., Any]
) -> Callable[[fx.GraphModule, Any], Any]:
    """Return a backend that gives these the partitioned graphs of a function. Public: none."""
    from torch._dynamo.backends.common import aot_autograd as make
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    backend: Callable[[fx.GraphModule, Any], Any] = make(
        fw_compiler=fw_compiler,
        bw_compiler=bw_compiler,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return backend


def graph_breaks() -> list[Any]:
    """Return why and where torch.compile ended graphs early in this process, the oldest first.

    Public: ``torch._dynamo.explain``, which runs the program by a backend of its own.
    """
    from torch._dynamo.utils import graph_break_reasons

    return graph_break_reasons


def call_at_compilations(begun: Callable[[Any], None], done: Callable[[Any], None]) -> bool:
    """Have both functions called around each compilation; False where they are called already.

    ``torch._dynamo.reset`` ends it. Public: ``torch._dynamo.callback``'s functions, which do not
    tell what is registered.
    """
    from torch._dynamo.callback import callback_handler

    if begun in callback_handler.start_callbacks:
        return False
    callback_handler.register_start_callback(begun)
    callback_handler.register_end_callback(done)
    return True


def compiling_backend() -> Any:
    """Return the backend for which torch.compile compiles in this thread now; None if not known.

    Public: none.
    """
    from torch._dynamo import convert_frame

    frame = sys._getframe(1)
    while frame is not None and not (
        frame.f_code.co_name == "_compile" and frame.f_code.co_filename == convert_frame.__file__
    ):
        frame = frame.f_back  # type: ignore[assignment]
    return _unwrapped_backend(frame.f_locals.get("compiler_fn") if frame is not None else None)


def _unwrapped_backend(backend: Any) -> Any:
    """Return the backend that the program gave to torch.compile."""
    for _ in range(8):
        for name in ("_torchdynamo_orig_backend", "compiler_fn"):
            backend = getattr(backend, name, None) or backend
    return backend


def backend_of_compiled_module(module: torch.nn.Module) -> Any:
    """Return the backend for which ``module.compile()`` was called; None if it was not.

    Public: none.
    """
    compiled = getattr(module, "_compiled_call_impl", None)
    names = compiled.__code__.co_freevars if compiled is not None else ()
    cells = compiled.__closure__ or () if compiled is not None else ()
    context = next((cell for name, cell in zip(names, cells, strict=True) if name == "self"), None)
    return None if context is None else _unwrapped_backend(context.cell_contents.callback)


def is_never_compiled(function: Callable[..., Any]) -> bool:
    """Return True if torch.compile leaves calls of a function eager, except from compiled code.

    Public: none.
    """
    from torch._dynamo import trace_rules

    return bool(trace_rules.check(function))


def compilations() -> list[Any]:
    """Return the last compilations of this process, with what failed and why. Public: none."""
    from torch._dynamo.utils import get_compilation_metrics

    return get_compilation_metrics()


# Of a node that is traced once more.
ORIGIN = "dispatch_flops: original_aten"
CHECKPOINTED = "dispatch_flops: recompute"


def keep_node_meta(graph: fx.GraphModule) -> None:
    """Have AOTAutograd copy the meta of a traced function's nodes to the nodes that it makes.

    It does so by itself, but not for a function with a list among its inputs: it calls that one.
    It notes an ``original_aten`` anew; the one before is ``meta["custom"][ORIGIN]``. What
    torch.utils.checkpoint noted would change what is compiled: ``meta["custom"][CHECKPOINTED]`` has
    it. Source: ``create_functional_call`` and ``torch._dynamo.utils.flatten_graph_inputs``. Public:
    none.
    """
    from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
    from torch.fx.traceback import preserve_node_meta

    for node in graph.graph.nodes:
        noted = {
            ORIGIN: node.meta.get("original_aten"),
            CHECKPOINTED: True if node.meta.pop("recompute", None) is not None else None,
        }
        node.meta.pop("ac_graph_id", None)
        known = {key: value for key, value in noted.items() if value is not None}
        if known:
            node.meta["custom"] = {**node.meta.get("custom", {}), **known}

    def forward(*args: Any) -> Any:
        with preserve_node_meta():
            return PropagateUnbackedSymInts(graph).run(*args)

    graph.forward = forward  # type: ignore[method-assign]


def is_checkpointed(node: fx.Node) -> bool:
    """Return True if torch.utils.checkpoint decides whether a node is recomputed. Public: none."""
    noted = node.meta.get("custom") or {}
    return node.meta.get("recompute") is not None or CHECKPOINTED in noted


def is_backend_name(name: Any) -> bool:
    """Return True if torch.compile knows a backend of that name.

    Public: ``torch.compiler.list_backends``, which omits those for debugging.
    """
    from torch._dynamo import list_backends

    return isinstance(name, str) and name in list_backends(exclude_tags=())  # type: ignore[no-untyped-call]


def find_backend(backend: Any) -> Callable[..., Any]:
    """Return the backend of that name, or the backend itself if it is callable. Public: none."""
    from torch._dynamo.backends.registry import lookup_backend

    found: Callable[..., Any] = lookup_backend(backend)
    return found


def is_aot_autograd(backend: Any) -> bool:
    """Return True if torch._dynamo's ``aot_autograd`` made the backend. Public: none."""
    from torch._dynamo.backends.common import AotAutograd

    return isinstance(backend, AotAutograd)


def compiling_apart(inputs: Sequence[Any]) -> AbstractContextManager[Any]:
    """Return a block in which a backend compiles a graph that AOTAutograd is about to compile.

    It keeps what AOTAutograd records of the two compilations apart. Public: none.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing

    block: AbstractContextManager[Any] = tracing(TracingContext(detect_fake_mode(inputs)))
    return block


def with_other_compilers(
    backend: Any, change: Callable[..., Any]
) -> Callable[[fx.GraphModule, Any], Any]:
    """Return a backend of ``aot_autograd`` with other compilers. Public: none.

    change: is called as ``change(compiler, graph, inputs, is_backward=...)``.
    """
    options = dict(backend.kwargs)
    forward = options["fw_compiler"]
    backward = options.get("bw_compiler") or forward
    inference = options.get("inference_compiler") or forward
    options["fw_compiler"] = partial(change, forward, is_backward=False)
    options["bw_compiler"] = partial(change, backward, is_backward=True)
    options["inference_compiler"] = partial(change, inference, is_backward=False)
    made: Callable[[fx.GraphModule, Any], Any] = type(backend)(**options)
    return made


def compile_with_inductor(
    graph: fx.GraphModule,
    example_inputs: Any,
    inner_compile: Callable[..., Any],
    config_patches: dict[str, Any] | None,
) -> Any:
    """Compile by inductor, which gives ``inner_compile`` the partitioned graphs. Public: none."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(
        graph,
        example_inputs,
        inner_compile=inner_compile,  # type: ignore[arg-type]
        config_patches=config_patches,
    )


def keeping_records(options: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return inductor's options, under which nodes keep these entries of their meta.

    Where inductor removes a multiplication by 1, or an addition of 0, it gives the node before it
    the meta of what it removed (``remove_no_ops``, torch/_inductor/fx_passes/joint_graph.py), since
    torch 2.14 also if the number is a scalar. Nothing is kept beside passes of the user's own.
    Public: the two options.
    """
    from torch._inductor import config, custom_graph_pass

    names = "joint_custom_pre_pass", "joint_custom_post_pass"  # before that, and after it
    if any(options.get(name, getattr(config, name)) for name in names):
        return dict(options)
    kept: dict[fx.Node, dict[str, Any]] = {}

    class Pass(custom_graph_pass.CustomGraphPass):
        def __init__(self, run: Callable[[fx.Graph], None]) -> None:
            self._run = run

        def __call__(self, graph: fx.Graph) -> None:
            self._run(graph)

        def uuid(self) -> Any:
            return "dispatch_flops: meta alone"  # for inductor's cache of compiled graphs

    def keep(graph: fx.Graph) -> None:
        for node in graph.nodes:
            kept[node] = {key: node.meta[key] for key in keys if key in node.meta}

    def put_back(graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node in kept:
                for key in keys:
                    node.meta.pop(key, None)
                node.meta.update(kept[node])
        kept.clear()

    return {**options, **dict(zip(names, map(Pass, (keep, put_back)), strict=True))}


def compile_part(graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile one partitioned graph as inductor does by itself. Public: none."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(graph, inputs, **kwargs)


def options_of_mode(mode: str) -> dict[str, Any]:
    """Return the inductor options that torch.compile's ``mode`` stands for. Public: none."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return inductor's options as torch.compile passes them on; RuntimeError for another one.

    Public: none.
    """
    checked: dict[str, Any] = torch._TorchCompileInductorWrapper(None, dict(options), None).config
    return checked


def _traced_keys(op: OpOverload) -> list[DispatchKey]:
    """Return the keys of the kernels by which autograd and torch.func take ``op`` apart."""
    if has_kernel(op.name(), COMPOSITE.name):
        keys: Iterable[str] = (COMPOSITE.name, "FuncTorchBatchedDecomposition", *_OF_TRANSFORMS)
    else:
        keys = ("Autograd", *autograd_keys())
    return [getattr(DispatchKey, key) for key in keys if has_kernel(op.name(), key)]


@contextmanager
def kernels_in_traces(ops: Iterable[OpOverload], kernel: Callable[..., Any]) -> Iterator[None]:
    """Have ``kernel(op, run, *args, **kwargs)`` run these operators where AOTAutograd traces them.

    ops: operators that autograd takes apart. run: torch's own kernel.

    Nothing changes for code that is not traced. Public: ``OpOverload.py_impl``, which cannot be
    undone.
    """
    with ExitStack() as undo:
        for op in ops:
            undo.callback(op._dispatch_cache.clear)
            for key in _traced_keys(op):
                own = op.py_kernels.get(key)
                run = partial(op._op_dk, key) if own is None else own
                undo.callback(_restore_kernel, op, key, own)
                op.py_kernels[key] = partial(kernel, op, run)
            op._dispatch_cache.clear()
        yield


def _restore_kernel(op: OpOverload, key: DispatchKey, own: Callable[..., Any] | None) -> None:
    if own is None:
        del op.py_kernels[key]
    else:
        op.py_kernels[key] = own


def traced_graph() -> fx.Graph | None:
    """Return the graph in which operators are traced now, if there is one. Public: none."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


@contextmanager
def marking_nodes(mark: str, kind: type) -> Iterator[None]:
    """Give the nodes that are traced in the block an entry ``mark`` in ``nn_module_stack``.

    Public: ``torch.fx.traceback.annotate``, whose entries nodes of backward take over from those
    of forward.
    """
    from torch.fx import traceback

    before = traceback.current_meta
    stack = {**(before.get("nn_module_stack") or {}), mark: (mark, kind)}
    traceback.current_meta = {**before, "nn_module_stack": stack}
    try:
        yield
    finally:
        traceback.current_meta = before


def current_module_stack() -> Mapping[str, Any]:
    """Return what nodes that are traced now have in ``nn_module_stack``. Public: none."""
    from torch.fx.traceback import get_current_meta

    return get_current_meta().get("nn_module_stack") or {}


def interpreted_node() -> tuple[int, str]:
    """Return the id of torch.compile's graph and the name of its node that AOTAutograd traces now.

    ``(0, "")`` in a backward pass, and in what a compiler traces for itself. Public: none.
    """
    from torch.fx.traceback import get_current_meta

    sources = get_current_meta().get("from_node")
    return (sources[-1].graph_id, sources[-1].name) if sources else (0, "")


class TracedCallFollower(Protocol):
    """What ``follow_traced_calls`` calls."""

    def begin(
        self,
        module: torch.nn.Module,
        backend: Any,
        trace: Any,
        stack: dict[str, Any],
        inside: tuple[str, ...],
    ) -> str | None:
        """Note that a call begins; return a mark for the nodes that it makes, or None for none.

        backend: for which torch.compile traces, or one that stands before it. trace: what
            ``current_trace`` returns to the backend. stack: the module calls around this
            one, as in a node's ``nn_module_stack``. inside: names of the higher-order operators
            whose functions are being traced.
        """

    def end(self, mark: str, read: Callable[[], TracedValues], has_nodes: bool) -> None:
        """Note that the call has returned.

        read: returns ``(args, kwargs, result)``. has_nodes: False if the call made no node.
        """


_UNUSED = "an argument that the compiled code does not use may have another value in each run"


class UnknownValue:
    """Stands for a value that is not known; reading it raises TypeError with the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(self._reason)

    __getattr__ = __getitem__ = __call__ = __iter__ = __len__ = __contains__ = _refuse
    __bool__ = __int__ = __float__ = __index__ = __hash__ = __eq__ = __lt__ = __gt__ = _refuse
    __le__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __pow__ = _refuse


class TracedValues(NamedTuple):
    """Values that torch.compile traces, with fake tensors and symbolic sizes in them.

    leaves: ``(part of the value, the fake tensor or symbolic size that it is)`` of each.
    kept: objects of the program in it, and instances of UnknownValue.
    """

    value: Any
    leaves: list[tuple[Any, Any]]
    kept: list[Any]


def follow_traced_calls(follower: TracedCallFollower | None) -> None:
    """Have ``follower`` told of each module call that torch.compile traces; None: end it.

    A mark becomes an entry of ``nn_module_stack`` of the nodes. Public: none.
    """
    original = _traced_call()

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        assert follower is not None
        output, stack = tx.output, tx.nn_module_stack
        backend, trace = _unwrapped_backend(output.compiler_fn), output.tracing_context
        mark = follower.begin(self.value, backend, trace, dict(stack), _around(output))
        if mark is None:
            return original(self, tx, args, kwargs)
        known = len(output.graph.nodes)
        stack[mark] = type(self.value).__name__, type(self.value)
        try:
            out = original(self, tx, args, kwargs)
        finally:
            del stack[mark]
        read = partial(_read_traced, output, (list(args), dict(kwargs), out))
        follower.end(mark, read, len(output.graph.nodes) > known)
        return out

    _traced_module_class().call_function = original if follower is None else call_function


def _traced_module_class() -> Any:
    from torch._dynamo.variables import UnspecializedNNModuleVariable

    return UnspecializedNNModuleVariable


@functools.cache
def _traced_call() -> Callable[..., Any]:
    """Return torch's own function; asked before any follower is installed."""
    original: Callable[..., Any] = _traced_module_class().call_function
    return original


def _around(output: Any) -> tuple[str, ...]:
    names = []
    tracer = output.current_tracer
    while tracer is not None:
        operator = tracer.source_target
        if operator is not None:
            names.append(operator.name() if hasattr(operator, "name") else str(operator))
        tracer = tracer.parent
    return tuple(names)


# Begins the names of functions that go on after a graph break. Public: none.
RESUMING = "torch_dynamo_resume_in"


def current_trace() -> Any:
    """Return an object that stands for the trace whose function a backend compiles now.

    A function that is traced anew has another one. Public: none.
    """
    from torch._guards import TracingContext

    return TracingContext.try_get()


class CompiledFrame(NamedTuple):
    """Function that a backend compiles, as torch.compile traced it.

    variables: with which it was called. read: takes names of parameters and returns
        ``([their values], result)``; None if the function is compiled up to a graph break only.
    """

    code: CodeType
    variables: dict[str, Any]
    read: Callable[[Sequence[str]], TracedValues] | None


def compiled_frame() -> CompiledFrame | None:
    """Return the function that a backend compiles now; None outside. Public: none."""
    from torch._dynamo import output_graph, symbolic_convert

    frame, returning = sys._getframe(1), None
    while frame is not None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name == "compile_subgraph" and file == output_graph.__file__:
            returning = frame.f_back
            break
        frame = frame.f_back  # type: ignore[assignment]
    if returning is None:
        return None
    translator = frame.f_locals["self"].root_tx
    code, variables = translator.f_code, translator.f_locals
    if returning.f_code is not symbolic_convert.InstructionTranslator._return.__code__:
        return CompiledFrame(code, variables, None)
    inst = returning.f_locals["inst"]

    def read(names: Sequence[str]) -> TracedValues:
        from torch._dynamo.source import LocalSource
        from torch._dynamo.variables import ConstantVariable

        is_constant = inst.opname == "RETURN_CONST"
        out = ConstantVariable.create(inst.argval) if is_constant else translator.stack[-1]
        known = {
            source.local_name: found
            for source, found in translator.output.variable_tracker_cache.items()
            if isinstance(source, LocalSource) and source.is_input
        }
        reader = _TracedReader(translator.output)
        values = [
            reader.read(known[name]) if name in known else reader.unused(variables.get(name))
            for name in names
        ]
        return TracedValues((values, reader.read(out)), reader.leaves, reader.kept)

    return CompiledFrame(code, variables, read)


def _read_traced(output: Any, traced: Any) -> TracedValues:
    """Return the values of torch.compile's variables; raises TypeError for one of unknown kind."""
    reader = _TracedReader(output)
    return TracedValues(reader.read(traced), reader.leaves, reader.kept)


def _snapshot(value: Any) -> Any:
    """Return an object with the attributes of now, for which torch.compile guards them."""
    is_plain = "__dict__" in dir(value) and not isinstance(value, (type, torch.nn.Module))
    return copy.copy(value) if is_plain else value


def _is_below(source: Any, other: Any) -> bool:
    """Return True if torch.compile reads a value through another one."""
    while source is not None and source != other:
        source = getattr(source, "base", None)
    return source is not None


class _TracedReader:
    def __init__(self, output: Any) -> None:
        self._output = output
        self.leaves: list[tuple[Any, Any]] = []
        self.kept: list[Any] = []

    def read(self, variable: Any) -> Any:
        from torch._dynamo import variables
        from torch._dynamo.variables.lists import BaseListVariable, RangeVariable
        from torch._dynamo.variables.tensor import UnspecializedPythonVariable

        if isinstance(variable, (list, tuple)):
            return type(variable)(map(self.read, variable))
        if isinstance(variable, dict):
            return {key: self.read(value) for key, value in variable.items()}
        if isinstance(variable, variables.LazyVariableTracker):
            if not variable.is_realized():
                return self.unused(variable.original_value())
            variable = variable.unwrap()
        if isinstance(variable, UnspecializedPythonVariable):
            raise TypeError("a number that is not fixed at compilation")
        if isinstance(variable, variables.TensorVariable):
            return self._leaf(variable.as_proxy().node.meta["example_value"])
        if isinstance(variable, variables.SymNodeVariable):
            return self._leaf(variable.sym_num)
        if isinstance(variable, variables.UserDefinedObjectVariable):
            return self._object(variable)
        if isinstance(variable, variables.ConstDictVariable):
            return self._pairs(variable.items)
        if isinstance(variable, BaseListVariable) and not isinstance(variable, RangeVariable):
            items = list(map(self.read, variable.items))
            return items if variable.python_type() is list else tuple(items)
        try:
            return self._program_value(variable.as_python_constant())
        except NotImplementedError:
            raise TypeError(f"a {variable.python_type_name()}") from None

    def _object(self, variable: Any) -> Any:
        """Return an object of the program, or one like that which the function makes."""
        from torch._dynamo.variables.base import AttributeMutationNew

        cls = variable.value_type
        elements = getattr(variable, "items", None)
        if isinstance(elements, (list, tuple)) and issubclass(cls, tuple):
            values = list(map(self.read, elements))
            return cls._make(values) if hasattr(cls, "_make") else tuple.__new__(cls, values)
        changes = self._output.side_effects.store_attr_mutations.get(variable, {})
        if not isinstance(variable.mutation_type, AttributeMutationNew):
            if changes:
                raise TypeError(f"a {cls.__name__} that the program changes")
            return self._program_object(variable)
        made = cls.__new__(cls)
        items = self._content(variable)
        if isinstance(made, dict):  # not by its own methods, which may refuse
            base = OrderedDict if isinstance(made, OrderedDict) else dict
            for key, value in items.items():
                base.__setitem__(made, key, value)
        elif isinstance(made, list):
            list.extend(made, items)
        fields = getattr(variable, "fields", None)  # of a frozen dataclass
        for name, value in {**(fields if isinstance(fields, dict) else {}), **changes}.items():
            object.__setattr__(made, name, self.read(value))
        return made

    def _content(self, variable: Any) -> Any:
        """Return what an object of a subclass of dict or list holds; () for another object.

        In torch 2.13 one attribute has it, before several, and since 2.15 the object itself.
        """
        for name in ("_base_vt", "_dict_vt", "_list_vt"):
            found = getattr(variable, name, None)
            if found is not None:
                return self.read(found)
        own = getattr(variable, "items", ())
        return self._pairs(own) if isinstance(own, dict) else [self.read(item) for item in own]

    def _pairs(self, items: dict[Any, Any]) -> dict[Any, Any]:
        return {key.vt.as_python_constant(): self.read(value) for key, value in items.items()}

    def _program_object(self, variable: Any) -> Any:
        """Return an object of the program; a dataclass with the values that are known."""
        value, source = variable.value, variable.source
        if not dataclasses.is_dataclass(value):
            for attribute, known in self._output.variable_tracker_cache.items():
                if _is_below(attribute, source) and self._is_symbolic(known):
                    raise TypeError(f"a {type(value).__name__} with a number that varies")
            return self._program_value(_snapshot(value))
        made = object.__new__(type(value))
        attributes = {
            attribute.member: known
            for attribute, known in self._output.variable_tracker_cache.items()
            if getattr(attribute, "base", None) == source and hasattr(attribute, "member")
        }
        for field in dataclasses.fields(value):
            known = attributes.get(field.name)
            given = getattr(value, field.name, None)
            part = self.unused(given) if known is None else self.read(known)
            object.__setattr__(made, field.name, part)
        return made

    def _is_symbolic(self, variable: Any) -> bool:
        from torch._dynamo import variables

        if isinstance(variable, variables.LazyVariableTracker):
            if not variable.is_realized():
                return False
            variable = variable.unwrap()
        return isinstance(variable, variables.SymNodeVariable)

    def unused(self, value: Any) -> Any:
        """Return what stands for a value that nothing has used: torch.compile does not guard it."""
        return None if value is None else self._program_value(UnknownValue(_UNUSED))

    def _program_value(self, value: Any) -> Any:
        """Return a value of the program as it is."""
        if not isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
            self.kept.append(value)
        return value

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and is_batched(value):
            raise TypeError("a sample of torch.vmap")
        self.leaves.append((value, value))
        return value


# -- torch.distributed ------------------------------------------------------------------------


def process_group(argument: Any) -> Any:
    """Return the process group that a communication operator was given. Public: none.

    c10d's operators take it as a script object, functional ones by name or as itself.
    """
    from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group

    if isinstance(argument, str):
        return _resolve_process_group(argument)  # type: ignore[arg-type]
    if isinstance(argument, ProcessGroup):
        return argument
    return ProcessGroup.unbox(argument)


def ranks_of_group(group: Any) -> tuple[int, ...]:
    """Return the global ranks in a group, in its order.

    Public: ``get_process_group_ranks``, which knows only groups that torch.distributed has made.
    """
    from torch.distributed import distributed_c10d

    known = distributed_c10d._world.pg_group_ranks
    return tuple(known[group]) if group in known else tuple(range(group.size()))


def whole_mesh(mesh: Any) -> Any:
    """Return the device mesh that this one is a slice of, or the mesh itself. Public: none."""
    return mesh._get_root_mesh()


def data_parallel_model(
    module: torch.nn.Module,
) -> torch.nn.parallel.DistributedDataParallel | None:
    """Return the model that averages the gradients of a module: itself, or that of ``replicate``.

    ``replicate`` makes one when the module is called first. Public: none.
    """
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return module
    composable: Any = sys.modules.get(REPLICATE)
    if composable is None or not isinstance(module, composable.DDP):
        return None
    return getattr(composable.replicate.state(module), "_ddp", None)


# Modules of torch.distributed, in sys.modules once the program uses them.
REPLICATE = "torch.distributed._composable.replicate"
FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
FSDP1 = ("torch.distributed.fsdp._flat_param", "torch.distributed.fsdp._runtime_utils")
PIPELINES = "torch.distributed.pipelining.schedules"
FLAT_PARAMETER = "_flat_param"  # the name under which a module holds FSDP1's flat parameter

# -- simulated ranks --------------------------------------------------------------------------

# Leaves a fake tensor mode for a block: a DeviceMesh reads the values of tensors of its own.
# Public: none.
without_fake_mode: Callable[[], AbstractContextManager[Any]] = (
    torch._subclasses.fake_tensor.unset_fake_temporarily
)


def default_store() -> torch.distributed.Store:
    """Return the store by which the default process group was initialised. Public: none."""
    return torch.distributed.distributed_c10d._get_default_store()


def join_fake_group(rank: int, world_size: int) -> None:
    """Make this process one rank of a default process group without other processes.

    Public: ``init_process_group("fake")`` once torch.testing._internal has registered it.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group(
        "fake", rank=rank, world_size=world_size, store=FakeStore()
    )


def clear_sharding_caches() -> None:
    """Drop what DTensor remembers of meshes: equal meshes of other ranks have other groups.

    Public: none. ``torch.distributed.tensor.debug`` clears the first two as well, but its import
    needs numpy. What a later torch renames is skipped.
    """
    from torch.distributed.tensor import DTensor, _redistribute, _sharding_prop

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute._gen_transform_infos.cache_clear()
    clear_planners = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    if clear_planners is not None:
        clear_planners()
    cached = getattr(_sharding_prop.ShardingPropagator, "_propagate_tensor_meta_cached", None)
    if cached is not None:
        cached.cache_clear()


# What of DeviceMesh reads values of tensors of its own, besides its constructor. Public: none.
MESH_METHODS = ("__getitem__", "mesh", "_flatten", "_unflatten", "_get_all_submeshes")

# The argument of DeviceMesh's constructor in which ``init_device_mesh`` passes the ranks, in order.
# Public: none.
RANK_MAP = "_rank_map"


# Modules that ask whether a program is traced, and the question. Under a fake tensor mode the
# answer is yes: collectives are then waited for at once, and shards are always padded.
# Public: none.
ARE_WE_TRACING = "_are_we_tracing"
_ASKING = (
    "torch.distributed._functional_collectives",
    "torch.distributed.tensor._collective_utils",
    "torch.distributed.tensor._decompositions",
    "torch.distributed.tensor._dispatch",
    "torch.distributed.tensor._redistribute",
    "torch.distributed.tensor._sharding_prop",
)


def modules_that_ask_for_tracing() -> list[Any]:
    """Return the modules that hold the question; later ones would keep a replaced one."""
    found = []
    for name in _ASKING:
        with suppress(ModuleNotFoundError):  # in another release of torch
            module = importlib.import_module(name)
            if hasattr(module, ARE_WE_TRACING):
                found.append(module)
    return found


# What functional collectives return is waited for at its first use. These operators return their
# argument, as it is or wrapped; their fake kernels return a new tensor. Public: none.
_WAIT = "_c10d_functional::wait_tensor"
_WRAP = "_c10d_functional::_wrap_tensor_autograd"
RESULT_OPERATORS = frozenset((_WAIT, _WRAP))


def collective_result(func: OpOverload, tensor: torch.Tensor) -> torch.Tensor:
    """Return what one of RESULT_OPERATORS returns on a real tensor."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(tensor) if func.name() == _WRAP else tensor


def fsdp_param_class() -> type[Any]:
    """Return FSDP2's class of a sharded parameter. Public: none.

    Its ``reset_sharded_param`` pads a shard that was not padded before. It compares addresses of
    storages, which are all 0 on fake tensors.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    found: type[Any] = _fsdp_param.FSDPParam
    return found


# Modules that hold the question whether the storage of FSDP1's flat parameter is allocated, which
# asks for its address: 0 on fake tensors. Public: none.
ALLOCATED = "_data_ptr_allocated"
ASKING_FOR_ALLOCATION = ("torch.distributed.utils", FSDP1[0])

# Modules that hold the function by which FSDP2 makes the mesh of ``reshard_after_forward=<int>``
# from the values of another mesh's tensor. Public: none.
RESHARDING_MESH = "_get_post_forward_mesh_info"
MAKING_RESHARDING_MESH = tuple(
    f"torch.distributed.fsdp._fully_shard.{name}" for name in ("_fully_shard", "_fsdp_init")
)

# Classes of the tensors that ``clip_grad_norm_`` and optimizers pass to _foreach operators, in a
# list of this module. Public: none.
FOREACH_MODULE, FOREACH_TYPES = "torch.utils._foreach_utils", "_foreach_supported_types"


def are_taken_in_lists(params: Iterable[torch.Tensor]) -> bool:
    """Return True if an optimizer takes lists of such parameters by default, on CUDA.

    Those that are fake stand for plain ones. Public: none.
    """
    from torch.optim.optimizer import _foreach_supported_types

    classes = (*_foreach_supported_types, FakeTensor)
    return all(type(param) in classes for param in params)


# Where DDP compares the shapes of parameters between ranks, in C++, on their data. Public: none.
DDP_MODULE = "torch.nn.parallel.distributed"
DDP_VERIFY = "_verify_param_shape_across_processes"


# Methods of DDP's reducer that read integers from tensors of its own: the order in which gradients
# came, by which they are arranged anew, and the parameters that were used. Public: none.
REDUCER_METHODS = ("__init__", "_rebuild_buckets", "_set_static_graph")


def reducer_class() -> type[Any]:
    """Return the class of DDP's reducer, in C++. Public: none."""
    found: type[Any] = torch._C._distributed_c10d.Reducer
    return found


# Methods of pipeline schedules, called with ``(stages, has_backward, ...)``, by which the stages
# agree whether they exchange metadata: by flags that they send to each other since torch 2.12, by
# an all_reduce since 2.15. Public: none.
PIPELINE_VOTES = ("_warmup_p2p", "_initialize_pipeline_distributed_state")


def pipeline_schedule_class() -> type[Any]:
    """Return the base of all pipeline schedules. Public: none."""
    from torch.distributed.pipelining import schedules

    found: type[Any] = schedules._PipelineSchedule
    return found


# Whether a stage of a pipeline may drop an output once it is sent, since torch 2.15. Its class must
# be ``torch.Tensor`` itself, which a fake tensor's is not. Public: none.
STAGE_RELEASES = "_output_slot_is_releasable"


def pipeline_stage_class() -> type[Any]:
    """Return the base of all stages of pipelines. Public: none."""
    from torch.distributed.pipelining import stage

    found: type[Any] = stage._PipelineStageBase
    return found


def set_inference_modes(stages: Sequence[Any], has_backward: bool) -> None:
    """Have pipeline stages exchange metadata where one of these stages needs it.

    Stages of a traced model exchange none: the trace has the shapes.
    Public: none; a stage with ``input_args`` and ``output_args`` needs none.
    """
    from torch.distributed.pipelining import stage

    if not all(isinstance(one, stage.PipelineStage) for one in stages):
        return
    modes = stage.InferenceMode
    needed = any(modes.needs_dynamic(one._user_meta, has_backward) for one in stages)
    for one in stages:
        one._inference_mode = modes.DYNAMIC if needed else modes.STATIC


def forget_conversions(mode: Any) -> None:
    """Drop a FakeTensorMode's weak references to the tensors that it made. Public: none.

    Only conversions of tensors with data are looked up there. Where a module is converted, torch
    swaps its fake parameters, and refuses those that have weak references.
    """
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


# The operators whose future DDP or one of its communication hooks waits for.
_WITH_FUTURE = ("c10d::allreduce_", "c10d::allgather_")
_BETWEEN_TWO = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")


def completed_communication(func: OpOverload, args: Sequence[Any], works: CompletedWorks) -> Any:
    """Return the results of a c10d operator whose communication is done.

    The operators return their first argument, the outputs, and a handle, or the handle alone. The
    future of torch's own FakeWork has the value None, which DDP and its hooks do not accept. A
    handle of what is sent or received holds the tensors, as gloo's and NCCL's do.
    Public: none.

    works: keeps the handles that this makes in Python as long as no one else does.
    """
    returns = len(func._schema.returns)
    if not returns:
        return None
    name = func.name()
    if name in _WITH_FUTURE or name in _BETWEEN_TWO:
        work = _completed_work_class()(args, works)
        works.keep(work, until_asked=name in _WITH_FUTURE)
    else:
        work = torch._C._distributed_c10d.FakeWork()
    handle = torch._C._distributed_c10d.Work.boxed(work)
    return (args[0], handle) if returns == 2 else handle


class CompletedWorks:
    """Handles whose Python part must outlive the call that returns them, for C++ holds the rest.

    DDP's reducer asks for the future of its handles in C++: these are kept until then, or until
    Python code waits for them. Others belong to the Python code that receives them, which has them
    when the next operator runs.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        self._last: Any = None

    def keep(self, work: Any, *, until_asked: bool) -> None:
        if until_asked:
            self._kept[id(work)] = work
        else:
            self._last = work

    def release(self, work: Any) -> None:
        """Leave a handle to those that hold it."""
        self._kept.pop(id(work), None)

    def hand_over(self) -> None:
        """Release the last handle: the Python code has received it."""
        self._last = None


@functools.cache
def _completed_work_class() -> Any:
    class CompletedWork(torch._C._distributed_c10d.Work):
        def __init__(self, args: Sequence[Any], works: CompletedWorks) -> None:
            super().__init__()
            self._result, self._group = args[0], args[1]
            self._works = works

        def wait(self, timeout: Any = None) -> bool:
            self._works.release(self)
            return True

        def is_completed(self) -> bool:
            return True

        def _source_rank(self) -> int:
            """Who sent to any: the first of the others."""
            return int(process_group(self._group).rank() == 0)

        def get_future(self) -> Any:
            self._works.release(self)
            future: Any = torch.futures.Future()
            future.set_result(self._result)
            return future

    return CompletedWork


# -- what cannot be moved here ----------------------------------------------------------------
#
# Attributes of objects that torch hands out, names of Python frames, keys: asked where they are
# needed, each with its test in tests/torch_contract. By room and file:
#
# counting/node_owners        node._sequence_nr(), at every operator of a backward pass
# counting/python_frames      names of nodes (TBackward0, ...), variable of AccumulateGrad;
#                             torch.nn.utils.clip_grad, torch.amp.grad_scaler, FSDP1's
#                             clip_grad_norm_, torch.distributed.fsdp.sharded_grad_scaler and
#                             torch.distributed.pipelining._backward as callers; the frame that
#                             calls a step's hook; self, args and kwargs in frames of
#                             MODULE_CALL_CODE
# counting/meta_rms_norm      _local_tensor of a DTensor
# counting/checkpoints        frames of torch.utils.checkpoint called unpack_hook (frame, gid) and
#                             backward; the closure (frame) of _checkpoint_hook's pack_hook
# counting/communication_causes  in frames of FSDP2: self.modules, self._training_state; of FSDP1:
#                             FlatParamHandle's _fully_sharded_module and _training_state; of
#                             pipelines: _batch_p2p (desc), action, stage, self._stage, and the
#                             functions that initialise stages; variable of AccumulateGrad
# operators/communication     groups' group_desc and group_name
# counting/sharded_parameters FSDP1's _handle.flat_param and its _param_infos,
#                             _shard_param_infos, _shared_param_infos, _numels and _params
# counting/tensor_subclasses  DTensor's frame _propagate_tensor_meta_non_cached
# counting/dispatch_mode      _should_skip_dynamo, ignore_compile_internals and
#                             supports_higher_order_operators, overridden; the first likewise in
#                             counting/torch_functions
# counting/strategies         _is_zerotensor(); likewise memory/storages
# counting/eager_stance       the attributes of a stance; the text of a warning
# counting/higher_order       names of higher-order operators, py_kernels, _boxed_call
# counting/module_tree        modules' _modules, _parameters, _buffers (conventional); likewise
#                             counting/parameters, counting/placement, profilers/isolation,
#                             compile/attribution
# counting/wrappers           _orig_mod, _fsdp_wrapped_module and _checkpoint_wrapped_module in
#                             _modules
# timing/idle_modules         names of the tables _global_forward_hooks, ...; _call_impl, set
# operators/tensors           tensors' _nested_tensor_size(), _values(), _indices(); in formulas
#                             _nnz(), _is_zerotensor()
# operators/torch_formulas    _get_raw of torch's formulas
# compile/attribution         node.meta: is_gradient_acc, partitioner_tag, stack_trace, grapharg
#                             (source, example); the graph's dynamo_compile_id; source_fn_stack
# compile/node_stacks         node.meta: nn_module_stack, fwd_nn_module_stack, stack_trace, seq_nr,
#                             from_node
# compile/contractions        node.meta: original_aten
# compile/opaque_regions      node.meta: nn_module_stack
# compile/instances           node.meta: desc; variable of AccumulateGrad
# compile/eager_parts         reason, user_stack of a graph break; fail_type, fail_reason, co_name,
#                             co_filename, co_firstlineno of a compilation; texts of reasons
# compile/templates           node.meta: val; SymInt.node.expr
# compile/compilers           _boxed_call, asked and set
