"""Threads: workers that join the counter, and workers that do not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
)
from torch.utils.data import DataLoader, TensorDataset

from dispatch_flops import FlopCounterMode, FlopsProfiler, Profile
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.thread_state import UNATTRIBUTED, ThreadState
from dispatch_flops.errors import WrongThreadError
from dispatch_flops.timing.calibrated import ModulePass
from tests.helpers.attributing import plain, rows, train, work_of
from tests.helpers.profiling import profile_of
from tests.helpers.threads import in_new_thread

FORWARD = {"0": 2 * 3 * 5, "1": 2 * 5 * 7}
TRAINED = {
    "0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
    "1": {"forward": 2 * 5 * 7, "backward": 2 * 2 * 5 * 7},
}


@pytest.fixture
def model() -> nn.Sequential:
    return plain(3, 5, 7)


def test_worker_that_did_not_join_is_not_counted(model: nn.Module) -> None:
    profile = profile_of(in_new_thread, train, model, rows(2, 3), model=model)
    assert work_of(profile) == {}
    assert profile.root.calls == 0


def test_worker_that_joined_is_counted_until_it_leaves(model: nn.Module) -> None:
    with FlopCounterMode(model, display=False) as counter:

        def run() -> None:
            with counter.in_thread():
                train(model, rows(2, 3))
            train(model, rows(2, 3))  # after leaving: not counted

        in_new_thread(run)
    assert work_of(counter.profile) == TRAINED
    assert counter.profile.root.calls == 1


def test_worker_that_joins_twice_is_counted_both_times(model: nn.Module) -> None:
    with FlopCounterMode(model, display=False) as counter:

        def run() -> None:
            for _ in range(2):
                with counter.in_thread():
                    train(model, rows(2, 3))

        in_new_thread(run)
    assert work_of(counter.profile)["1"] == {"forward": 2 * 70, "backward": 2 * 140}


def test_thread_of_the_block_may_join_without_effect(model: nn.Module) -> None:
    with FlopCounterMode(model, display=False) as counter:
        with counter.in_thread():
            train(model, rows(2, 3))
        train(model, rows(2, 3))
    assert work_of(counter.profile)["1"] == {"forward": 2 * 70, "backward": 2 * 140}


def test_backward_of_a_worker_belongs_to_the_modules_that_it_called(model: nn.Module) -> None:
    """The nodes of new threads have the same numbers."""
    first, second = model.children()

    def run() -> Profile:
        with FlopCounterMode(model, display=False) as counter:

            def work() -> None:
                with counter.in_thread():
                    train(second, rows(2, 5))

            for _ in range(3):
                first(rows(2, 3))
            in_new_thread(work)
        return counter.profile

    # The worker's input needs no gradient.
    assert work_of(in_new_thread(run)) == {
        "0": {"forward": 3 * 2 * 3 * 5}, "1": {"forward": 2 * 5 * 7, "backward": 2 * 5 * 7}
    }  # fmt: skip


def test_concurrent_workers_are_all_counted(model: nn.Module) -> None:
    workers, times = 4, 25
    barrier = threading.Barrier(workers)
    with FlopCounterMode(model, display=False) as counter:

        def run() -> None:
            with counter.in_thread():
                barrier.wait()
                for _ in range(times):
                    train(model, rows(2, 3))
                    _ = counter.profile  # reading a profile does not change the counts

        with ThreadPoolExecutor(workers) as pool:
            for future in [pool.submit(run) for _ in range(workers)]:
                future.result()
    n = workers * times
    assert work_of(counter.profile) == {
        fqn: {phase: n * macs for phase, macs in phases.items()} for fqn, phases in TRAINED.items()
    }
    assert counter.profile.root.calls == n


def test_counters_of_two_threads_count_their_own_threads_only() -> None:
    barrier = threading.Barrier(2)

    def run(times: int) -> tuple[int, int]:
        model = plain(3, 5, 7)
        with FlopCounterMode(model, display=False) as counter:
            barrier.wait()
            for _ in range(times):
                train(model, rows(2, 3))
            barrier.wait()
        return counter.profile.root.calls, counter.profile.total().macs

    with ThreadPoolExecutor(2) as pool:
        counted = list(pool.map(run, [3, 11]))
    once = sum(sum(phases.values()) for phases in TRAINED.values())
    assert counted == [(3, 3 * once), (11, 11 * once)]


def test_mark_with_an_equal_or_lower_number_replaces_the_last_entry() -> None:
    thread = ThreadState(2, is_entered=True)
    thread.mark(5, "a")
    thread.mark(5, "b")
    assert [thread.owner_of(n) for n in (1, 2, 4, 5, 9)] == [
        UNATTRIBUTED, "<outside>", "<outside>", "b", "b",
    ]  # fmt: skip
    assert len(thread.seqs) == 3
    thread.mark(4, "c")  # no node has the number 5
    assert thread.owner_of(5) == "c"


def test_workers_of_a_data_loader_are_not_counted(model: nn.Module) -> None:
    """Workers are processes, which the counter does not see."""
    data = DataLoader(TensorDataset(torch.randn(4, 3)), batch_size=2, num_workers=1)

    def epoch() -> None:
        for (x,) in data:
            train(model, x)

    found = work_of(profile_of(epoch, model=model))
    assert found["1"] == {"forward": 2 * 70, "backward": 2 * 140}


def test_worker_that_joins_in_a_pause_is_not_counted(model: nn.Module) -> None:
    with FlopCounterMode(model, display=False) as counter:
        counter.pause()
        with counter.in_thread():
            train(model, rows(2, 3))

        def run() -> None:
            with counter.in_thread():
                train(model, rows(2, 3))

        in_new_thread(run)
        counter.resume()
    assert counter.profile.total().macs == 0


# -- modules of other threads --------------------------------------------------------------------

B, IN, OUT = 5, 4, 3


class Meeting(nn.Module):
    """Module whose forward runs a function in another thread."""

    def __init__(self, other: Callable[[], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, OUT)
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=self.other)
        thread.start()
        thread.join()
        return self.layer(x)


@pytest.mark.parametrize("given", [True, False])
def test_modules_of_a_thread_that_did_not_join_are_not_named(given: bool) -> None:
    stranger = nn.Sequential(nn.Linear(10, 10), nn.ReLU())
    model = Meeting(lambda: stranger(torch.ones(1, 10)))
    mods = model if given else None
    with FlopCounterMode(mods, display=False, latency=True) as counter:
        model(torch.ones(B, IN))
    profile = counter.profile
    assert [node.fqn for node in profile.root.walk()] == ["", "layer"]
    assert profile.total_params == IN * OUT + OUT
    assert all(node.latency_s is not None for node in profile.root.walk())


def test_module_pass_times_the_modules_of_its_own_thread() -> None:
    stranger = nn.Sequential(nn.Linear(10, 10), nn.ReLU())
    model = Meeting(lambda: stranger(torch.ones(1, 10)))
    with ModulePass(ModuleNames([model])) as latency:
        model(torch.ones(B, IN))
    assert set(latency.seconds()) == {"", "layer"}


def test_stop_profile_in_another_thread_is_refused() -> None:
    profiler = FlopsProfiler(nn.Linear(IN, OUT))
    profiler.start_profile()
    refused: list[str] = []

    def stop() -> None:
        try:
            profiler.stop_profile()
        except WrongThreadError as error:
            refused.append(str(error))

    thread = threading.Thread(target=stop)
    thread.start()
    thread.join()
    assert "another thread" in refused[0]
    profiler.model(torch.ones(B, IN))
    profiler.stop_profile()
    assert profiler.get_total_macs() == B * IN * OUT
    assert _get_current_dispatch_mode_stack() == []
