"""PyTorch tensors: on the CPU the scans that numba compiles, in torch's own autograd and compiler."""

from scanfield.dispatch import Candidate, Manifest

MANIFEST = Manifest(
    library="torch",
    requires="torch",
    install="pip install 'scanfield[torch,numba]'",
    candidates=(
        Candidate(
            name="torch.numba",
            operations=("linear_scan", "selective_scan", "gdn2"),
            device="cpu",
            target="scanfield_torch.numba_scans:implementation",
            requires=("numba",),
            dtypes=("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
            transforms=frozenset({"grad", "double grad", "compile", "export"}),
            note="torch.func and forward-mode derivatives go through the generic forms",
        ),
        Candidate(
            name="torch.compile",
            operations=("linear_scan", "selective_scan", "gdn2"),
            device="cpu",
            target="scanfield_torch.unrolled:implementation",
            dtypes=("float16", "bfloat16", "float32", "float64"),
            transforms=frozenset({"grad", "double grad"}),
            note="compiles for some seconds at the first call of each kind and shape, and needs a C++ compiler",
            default=False,
        ),
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
