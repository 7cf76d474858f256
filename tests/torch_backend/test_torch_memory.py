"""Training a long sequence takes little memory: O(time / chunk) beside inputs, results and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import python

pytestmark = pytest.mark.backend("torch")

pytest.importorskip("torch")

TRAINED = """
    import sys
    from pathlib import Path

    import torch
    import scanfield

    torch.set_num_threads(2)
    time, heads, size = map(int, sys.argv[1:])

    def peak():    # of this program: what getrusage tells counts the parent's memory too
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024

    def trained(time, heads, size):
        given = [torch.rand(1, time, heads, size) for _ in range(6)]
        given[1] = torch.nn.functional.normalize(given[1], dim=-1)
        given[3].neg_()
        for x in given:
            x.requires_grad_()
        scanfield.gdn2(*given).output.sum().backward()
        assert all(x.grad is not None for x in given)

    trained(8, 1, size)    # what is compiled or read from disk takes memory of its own
    before = peak()
    trained(time, heads, size)
    print(peak() - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").is_file(), reason="only Linux tells the peak of a program here"
)
def test_long_training_fits_two_gigabytes():
    """The whole of it, inputs, outputs and gradients too: those alone are 0.83 GiB."""
    pytest.importorskip("numba")
    taken = int(python(TRAINED, 4096, 32, 128))
    least = 13 * 4096 * 32 * 128 * 4  # six inputs, their gradients, the output
    assert least <= taken <= 2 * 2**30
