"""Names of the optimizers that step: their class, and what tells two of one class apart."""

from __future__ import annotations

import weakref
from typing import Any

from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.profile import OUTSIDE


class OptimizerNames:
    """Names of optimizers, as parts of the outside.

    An optimizer is named by its class: ``<outside>.AdamW``. If the models have names, that of the
    model follows whose parameters it holds: ``<outside>.AdamW.G``. A further optimizer has a
    number: ``<outside>.AdamW.1``. A name is used again once its optimizer is gone, as in a program
    that makes an optimizer for every step.
    """

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._fqns: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._owners: dict[str, weakref.ref[Any]] = {}

    def fqn_of(self, optimizer: Any) -> str:
        """Return the name of an optimizer, and give it one at its first step."""
        fqn = self._fqns.get(optimizer)
        if fqn is None:
            fqn = self._fqns[optimizer] = self._new_fqn(optimizer)
            self._owners[fqn] = weakref.ref(optimizer)
        return fqn

    def forget(self) -> None:
        """Forget all optimizers."""
        self._fqns.clear()

    def _new_fqn(self, optimizer: Any) -> str:
        fqn = f"{OUTSIDE}.{type(optimizer).__name__}"
        if self._names.are_given and (model := self._model_of(optimizer)):
            fqn = f"{fqn}.{model}"
        number, candidate = 0, fqn
        while candidate in self._owners and self._owners[candidate]() is not None:
            number += 1
            candidate = f"{fqn}.{number}"
        return candidate

    def _model_of(self, optimizer: Any) -> str | None:
        """Return the name of the only model whose parameters the optimizer holds; else None."""
        owners = self._names.owners_of_parameters()
        held = (id(p) for group in optimizer.param_groups for p in group["params"])
        models = {owners.get(key, OUTSIDE).partition(".")[0] for key in held}
        return models.pop() if len(models) == 1 and OUTSIDE not in models else None
