"""The number of threads: the process's affinity unless set, the same for every thread of the caller."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import scanfield

pytestmark = pytest.mark.backend("numpy")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    scanfield.set_num_threads(None)


def test_what_is_set_is_what_counts():
    for count in (1, 7, np.int64(3)):
        scanfield.set_num_threads(count)
        assert scanfield.get_num_threads() == count
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(scanfield.get_num_threads).result() == count
    assert type(scanfield.get_num_threads()) is int


def test_none_is_the_affinity_at_that_moment():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system knows no affinity")
    scanfield.set_num_threads(100)
    scanfield.set_num_threads(None)
    before = os.sched_getaffinity(0)
    assert scanfield.get_num_threads() == len(before)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert scanfield.get_num_threads() == 1
        scanfield.set_num_threads(2)
        assert scanfield.get_num_threads() == 2
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "2", np.float64(2)], ids=repr)
def test_what_is_no_number_of_threads(wrong: object):
    scanfield.set_num_threads(5)
    with pytest.raises(scanfield.ArgumentError, match=r"count: .*at least 1, or None"):
        scanfield.set_num_threads(wrong)
    assert scanfield.get_num_threads() == 5


@pytest.mark.parametrize(("cpus", "threads"), [(6, 6), (None, 1)])
def test_a_system_that_tells_no_affinity_tells_its_processors(monkeypatch, cpus, threads):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    assert scanfield.get_num_threads() == threads
