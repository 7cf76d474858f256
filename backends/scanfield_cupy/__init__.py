"""CuPy arrays on CUDA devices: kernels written in CUDA C++, compiled for the card at their first use."""

from scanfield.dispatch import Candidate, Manifest

_HALF = ("float16", "bfloat16")
_REAL = (*_HALF, "float32", "float64")
_ALL = (*_REAL, "complex64", "complex128")

MANIFEST = Manifest(
    library="cupy",
    requires="cupy",
    install="pip install 'scanfield[cupy-cuda13]' (or cupy-cuda12)",
    candidates=(
        Candidate(
            name="cupy.rawkernel",
            operations=("linear_scan", "selective_scan", "gdn2"),
            device="cuda",
            target="scanfield_cupy.implementations:implementation",
            requires=("cupy",),
            dtypes=_ALL,
            note="compiled on the first call of each operation and dtype; gdn2 in chunks where sequences are long",
        ),
        Candidate(
            name="cupy.rawkernel.recurrent",
            operations=("gdn2",),
            device="cuda",
            target="scanfield_cupy.implementations:recurrent",
            requires=("cupy",),
            dtypes=_REAL,
            note="token by token at any length: exact with growth, what is not finite stays behind its token",
            default=False,
        ),
        Candidate(
            name="cupy.rawkernel.chunk",
            operations=("gdn2",),
            device="cuda",
            target="scanfield_cupy.implementations:chunk",
            requires=("cupy",),
            dtypes=_REAL,
            note="in chunks of 64 tokens at any length, for log decays <= 0",
            default=False,
        ),
        Candidate(
            name="cupy.rawkernel.tensor",
            operations=("gdn2",),
            device="cuda",
            target="scanfield_cupy.implementations:tensor",
            requires=("cupy",),
            dtypes=_HALF,
            note="chunks on tensor cores: products of bfloat16 summed in float32; by name until it was timed on a card",
            default=False,
        ),
        Candidate(
            name="cupy.rawkernel",
            operations=("pinn",),
            device="cuda",
            target="scanfield_cupy.pinn_jets:kernels",
            requires=("cupy",),
            note="compiled on the first use of each dtype",
        ),
    ),
)

# CUDA tensors of PyTorch on the same kernels.
TORCH = Manifest(
    library="torch",
    requires="torch",
    install="pip install 'scanfield[torch,cupy-cuda13]' (or cupy-cuda12)",
    candidates=(
        Candidate(
            name="torch.cuda",
            operations=("linear_scan", "selective_scan", "gdn2"),
            device="cuda",
            target="scanfield_cupy.torch_bridge:implementation",
            requires=("torch", "cupy"),
            dtypes=_ALL,
            transforms=frozenset({"grad", "double grad"}),
            note="the kernels for CuPy arrays on torch's device, stream and memory; by name until it was timed on a card",
            default=False,
        ),
        *(
            Candidate(
                name=f"torch.cuda.{form}",
                operations=("gdn2",),
                device="cuda",
                target=f"scanfield_cupy.torch_bridge:{form}",
                requires=("torch", "cupy"),
                dtypes=dtypes,
                transforms=frozenset({"grad", "double grad"}),
                note=f"as cupy.rawkernel.{form}, on torch's device, stream and memory",
                default=False,
            )
            for form, dtypes in (("recurrent", _REAL), ("chunk", _REAL), ("tensor", _HALF))
        ),
    ),
)
