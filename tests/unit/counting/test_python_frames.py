"""Reading the variables of running frames."""

from __future__ import annotations

import sys
import weakref

import torch

from dispatch_flops.counting.python_frames import variables_of


def test_function_lets_go_of_a_variable_that_was_read() -> None:
    def function() -> bool:
        tensor = torch.ones(3)
        released = weakref.ref(tensor)
        was_read = variables_of(sys._getframe())["tensor"] is tensor
        del tensor
        return was_read and released() is None

    assert function()


def test_variables_of_a_module_stay() -> None:
    namespace = {"variables_of": variables_of, "sys": sys, "x": 7}
    exec("found = variables_of(sys._getframe())['x']", namespace)
    assert namespace["x"] == namespace["found"] == 7
