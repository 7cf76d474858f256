"""Dask arrays: each block is a task that runs on the fast path of its own library."""

from scanfield.dispatch import Candidate, Manifest

_OPERATIONS = ("linear_scan", "selective_scan", "gdn2")
_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def _candidate(name: str, target: str, note: str, *, default: bool) -> Candidate:
    return Candidate(
        name=name,
        operations=_OPERATIONS,
        device="cpu",  # of the graph; where its blocks live is for their own library to say
        target=f"scanfield_dask.implementations:{target}",
        requires=("dask.array",),
        dtypes=_DTYPES,
        note=note,
        default=default,
    )


MANIFEST = Manifest(
    library="dask",
    requires="dask",
    install="pip install 'scanfield[dask]'",
    candidates=(
        _candidate("dask.blocks", "blocks", "chooses one of the two forms below", default=True),
        _candidate("dask.sequential", "sequential", "the state goes from block to block", default=False),
        _candidate(
            "dask.parallel", "parallel", "blocks are summarised first, then run at once", default=False
        ),
    ),
)
