"""NumPy arrays on the CPU: the scans compiled by numba, one vector register wide."""

from scanfield.dispatch import Candidate, Manifest

MANIFEST = Manifest(
    library="numpy",
    requires="numpy",
    install="pip install 'scanfield[numba]'",
    candidates=(
        Candidate(
            name="numpy.numba",
            operations=("linear_scan", "selective_scan", "gdn2"),
            device="cpu",
            target="scanfield_numpy.implementations:implementation",
            requires=("numba",),
            dtypes=("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
            note="compiled on the first call of each operation, verb and dtype",
        ),
        Candidate(
            name="numpy.numba",
            operations=("pinn",),
            device="cpu",
            target="scanfield_numpy.pinn_jets:kernels",
            requires=("numba",),
            note="compiled on the first use of each activation and dtype",
        ),
    ),
)
