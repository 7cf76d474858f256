"""PyTorch tensors: on the CPU the scans that numba compiles, in torch's own autograd and compiler."""

from scanfield.dispatch import Candidate, Manifest

_OPERATIONS = ("linear_scan", "selective_scan", "gdn2")
_REAL = ("float16", "bfloat16", "float32", "float64")
_ALL = (*_REAL, "complex64", "complex128")


def _compiled(device: str, needs: str, *, default: bool) -> Candidate:
    return Candidate(
        name="torch.compile",
        operations=_OPERATIONS,
        device=device,
        target="scanfield_torch.unrolled:implementation",
        dtypes=_REAL,
        transforms=frozenset({"grad", "double grad"}),
        note=f"compiles for some seconds at the first call of each kind and shape, and needs {needs}",
        default=default,
    )


def _generic(device: str) -> Candidate:
    return Candidate(
        name="torch.generic",
        operations=_OPERATIONS,
        device=device,
        target="scanfield_torch.generic_scans:implementation",
        dtypes=_ALL,
        transforms=frozenset({"grad", "double grad", "torch.func", "vmap", "compile", "export"}),
        note="the generic forms; under one node of autograd, where memory grows as time / chunk_size",
    )


MANIFEST = Manifest(
    library="torch",
    requires="torch",
    install="pip install 'scanfield[torch,numba]'",
    candidates=(
        Candidate(
            name="torch.numba",
            operations=_OPERATIONS,
            device="cpu",
            target="scanfield_torch.numba_scans:implementation",
            requires=("numba",),
            dtypes=_ALL,
            transforms=frozenset({"grad", "double grad", "compile", "export"}),
            note="torch.func and forward-mode derivatives go through the generic forms",
        ),
        _compiled("cpu", "a C++ compiler", default=False),
        # What stands before it on CUDA are kernels of our own; without them a loop over time would be one in Python.
        _compiled("cuda", "triton", default=True),
        _generic("cpu"),
        _generic("cuda"),
        *(
            Candidate(
                name="torch.out",
                operations=("pinn",),
                device=device,
                target="scanfield_torch.pinn_jets:kernels",
                note="every step writes into buffers; nothing is recorded by autograd",
            )
            for device in ("cpu", "cuda")
        ),
        *(
            Candidate(
                name="torch.compile",
                operations=("pinn",),
                device=device,
                target="scanfield_torch.pinn_compiled:kernels",
                note="compiles for some seconds for each kind of term; on the CPU it needs a C++ compiler",
                default=False,
            )
            for device in ("cpu", "cuda")
        ),
    ),
)
