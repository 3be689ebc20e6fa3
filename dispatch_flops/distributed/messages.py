"""Python objects that simulated ranks send to each other.

A fake process group moves no data. Pipeline stages exchange the shapes of their activations as
objects, so these messages are delivered: the sender is simulated up to the message first.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from dispatch_flops import _torch
from dispatch_flops._torch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Channel:
    """Who sends to whom. receivers: one rank, or the ranks of the group that one sends to."""

    sender: int
    receivers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MessageKey:
    """A message: its channel, and how many came before it."""

    channel: Channel
    number: int


class MissingMessageError(Exception):
    """A rank waits for a message whose sender was not simulated so far."""

    def __init__(self, key: MessageKey) -> None:
        super().__init__(f"a message of rank {key.channel.sender} is missing")
        self.key = key


class MessageSent(BaseException):
    """The rank has sent the message that it was simulated for; a job must not catch this."""


class Mailbox:
    """Messages of all simulated ranks; they outlive the simulation of each."""

    def __init__(self) -> None:
        self._messages: dict[MessageKey, list[torch.Tensor]] = {}
        self._sent: Counter[Channel] = Counter()
        self._received: Counter[Channel] = Counter()
        self._awaited: MessageKey | None = None

    def start_rank(self, awaited: MessageKey | None) -> None:
        """Start a rank, whose messages are numbered from 0.

        awaited: the message after which the rank is interrupted by MessageSent; None for none.
        """
        self._sent.clear()
        self._received.clear()
        self._awaited = awaited

    def put(self, channel: Channel, tensors: list[torch.Tensor]) -> None:
        """Store the next message; raises MessageSent if it is the awaited one."""
        key = MessageKey(channel, self._sent[channel])
        self._sent[channel] += 1
        self._messages[key] = tensors
        if key == self._awaited:
            raise MessageSent

    def get(self, channel: Channel) -> list[torch.Tensor]:
        """Return the next message; raises MissingMessageError if it was not sent so far."""
        key = MessageKey(channel, self._received[channel])
        if key not in self._messages:
            raise MissingMessageError(key)
        self._received[channel] += 1
        return self._messages[key]


_SCATTER = "c10d::scatter_"
_FROM_ONE = ("broadcast_object_list", "scatter_object_list")  # to all ranks of a group, from rank 0


class _Sending(TorchDispatchMode):
    """Keeps the tensors that are sent, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        with _torch.modes_disabled():
            if func.name() in ("c10d::send", "c10d::broadcast_"):
                self.tensors += [tensor.clone() for tensor in args[0]]
            elif func.name() == _SCATTER:
                self.tensors.append(torch.stack(args[1][0]))
                _take_part(args, self.tensors[-1])
        return out


class _Receiving(TorchDispatchMode):
    """Fills the tensors that are received, in order."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waiting = iter(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        with _torch.modes_disabled():
            if func.name() in ("c10d::recv_", "c10d::broadcast_"):
                for tensor in args[0]:
                    tensor.copy_(next(self._waiting))
            elif func.name() == _SCATTER:
                _take_part(args, next(self._waiting))
        return out


def _take_part(args: Any, parts: torch.Tensor) -> None:
    """Fill the output of a scatter with this rank's part; ``parts`` has those of all ranks."""
    (output,), _, group, *_ = args
    output.copy_(parts[_torch.process_group(group).rank()])


def delivering(function: Callable[..., Any], mailbox: Mailbox) -> Callable[..., Any]:
    """Return a function that sends or receives lists of objects, delivering them.

    The operators that the function runs are those that it runs on a real rank.
    """
    signature = inspect.signature(function)
    name = function.__name__

    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        group = given.get("group") or distributed.group.WORLD
        own = distributed.get_rank()
        peer = _peer(given, group, "dst" if name.startswith("send") else "src", name)
        if name in _FROM_ONE:
            channel = Channel(peer, tuple(distributed.get_process_group_ranks(group)))
        else:
            channel = Channel(own, (peer,)) if name.startswith("send") else Channel(peer, (own,))
        with _torch.without_fake_mode():
            if channel.sender != own:
                with _Receiving(mailbox.get(channel)):
                    return function(*args, **kwargs)
            with _Sending() as sending:
                result = function(*args, **kwargs)
        mailbox.put(channel, sending.tensors)
        return result

    return run


def outside_fake_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function so that it runs on tensors with data."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _torch.without_fake_mode():
            return function(*args, **kwargs)

    return run


def _peer(given: dict[str, Any], group: Any, side: str, name: str) -> int:
    """Return the global rank that the call names, as ``dst`` or as ``group_dst``."""
    in_group = given.get(f"group_{side}")
    if in_group is not None:
        return distributed.get_global_rank(group, in_group)
    found = given.get(side)
    if found is None and name in _FROM_ONE:
        return 0
    if found is None:
        raise ValueError(f"{name} needs {side}: the rank of the peer")
    return int(found)
