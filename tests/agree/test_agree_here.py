"""Every form of every operation agrees with every other, on NumPy and on PyTorch.

All libraries at once, JAX and Dask too, are compared by `nox -s agree`, which runs `scanfield check --full`.
"""

from __future__ import annotations

import pytest

import scanfield
from scanfield.cli import agree
from scanfield.cli.check import as_text
from scanfield.cli.places import places


@pytest.mark.backend("numpy", "torch")
@pytest.mark.parametrize("operation", [*(record.name for record in scanfield.operations()), "pinn", "layers"])
def test_all_forms_agree(request, operation):
    backend = request.config.getoption("--backend")
    here = places(dict.fromkeys(["numpy", backend]))
    report = agree.compare(agree.operations([operation]), here, full=True)
    assert report.agree, as_text(report)
    if not report.pairs:
        pytest.skip(
            f"{operation} has a single form on {backend}, so there is nothing to compare it with here"
        )
