"""The user's own calls on CuPy arrays, without a card: kernels run on the emulator, in two orders of their threads.

Fixtures   card   the stand-in for CuPy as an `arrays.Library`, in CuPy's place while a module's tests run
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import arrays
import emulator
import numpy as np
import pytest
import standin

# The draws of the PINN's tests and of Hypothesis' are plain modules beside those tests.
sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("pinn", "scans")]


class Card(arrays.Library):
    """Arrays of the stand-in."""

    name = "cupy"

    def __init__(self, cupy: Any) -> None:
        super().__init__()
        self.cupy = cupy

    def _from_numpy(self, x: np.ndarray) -> Any:
        return self.cupy.asarray(x)

    def raw(self, x: Any) -> np.ndarray:
        return self.cupy.asnumpy(x)

    def is_array(self, x: Any) -> bool:
        return isinstance(x, self.cupy.ndarray)


@pytest.fixture(scope="module")
def card() -> Iterator[Card]:
    reason = emulator.missing()
    if reason:
        pytest.skip(reason)
    with standin.installed() as cupy:
        yield Card(cupy)
