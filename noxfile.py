# /// script
# dependencies = ["nox>=2026.8.10", "packaging"]
# ///
"""Every check of the project, a session each.

    nox -l                                    the menu
    nox -j 2                                  what CI runs, two sessions at a time
    nox -s "tests(jax)"                       one session
    nox -s "tests(torch)" -- -k gdn2 -x       what stands after -- goes to the tool
    nox -R -s lint                            once more, without installing once more
    nox -t cpu                                the tests on every array library that needs no GPU

Everything is installed in the versions of constraints/tested.txt. The environments are made by virtualenv and
filled by pip, whatever else is on the machine: only pip finds the CPU build of torch that constraints/tested.txt
speaks of. They take 12 GB of disk in all; with SCANFIELD_DROP_ENVIRONMENTS set each goes when its session has ended.
"""

from __future__ import annotations

import atexit
import email
import os
import secrets
import shutil
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

nox.needs_version = ">=2026.8.10"  # the first with --parallel
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.allow_parallel = True
# What CI runs. Not here: tests(cupy), which needs a GPU; the other Python versions, which may not be installed; bench.
# What fails soonest comes first, then the longest, so that two sessions at a time end at about the same time.
nox.options.sessions = [
    "lint",
    "typing",
    "tests(jax)",
    "agree",
    "tests(torch)",
    "tests(numpy)",
    "cuda",
    "tests(dask)",
    "tests(strict)",
    "demo",
    "minimums",
    "docs",
    "build",
]

PROJECT = nox.project.load_toml("pyproject.toml")
TESTED = "constraints/tested.txt"

# The extras, and the dependency-groups beside `test`, of a run of the tests on each array library. Each library comes
# alone, so that an import of another one cannot go unnoticed; numba with those whose arrays its kernels take.
LIBRARIES: dict[str, tuple[list[str], list[str]]] = {
    "numpy": (["numba", "pinn", "plot", "cli"], ["peers", "namespaces", "mpi"]),
    "strict": (["pinn"], ["strict"]),
    "torch": (["torch", "numba", "pinn"], ["peers-torch"]),
    "jax": (["jax", "numba", "pinn"], []),
    "dask": (["dask", "numba", "pinn"], ["distributed", "strict"]),
    "cupy": (["cupy-cuda12", "pinn"], []),
}

# Of what tests(cupy) runs on a card, that which meets the kernels: these tests run without one too, on CuPy's stand-in.
ON_STANDIN = [
    *(
        f"tests/scans/test_{name}.py"
        for name in ("properties", "vjp", "affine", "step_and_states", "dtypes", "edges")
    ),
    *(
        f"tests/field/test_field_{name}.py"
        for name in ("layout", "shapes", "dtypes", "packing", "reproducibility", "state")
    ),
    *(f"tests/pinn/test_pinn_{name}.py" for name in ("loss", "workspace")),
    "tests/lrp/test_lrp_scans.py",
]
# transformers' models run with the version of constraints/tested.txt and with an older one, whose constraints are these.
OLDER = {"5.9.0": "constraints/transformers-5.9.txt"}
MODELS = ["tests/compat/test_compat_transformers.py", "tests/compat/test_compat_explain.py"]


COVERED = ("python", "-m", "coverage", "run", "-m", "pytest")


@nox.session
def demo(session: nox.Session) -> None:
    """The main job: libraries found, their agreement, a forecast, a Helmholtz problem; some minutes."""
    install(session, ["numba", "torch", "jax", "pinn", "cli", "plot"], ["demo"])
    session.run("scanfield", "demo", *session.posargs, env=environment(session))


@nox.session
@nox.parametrize("library", [nox.param(x, id=x, tags=["gpu" if x == "cupy" else "cpu"]) for x in LIBRARIES])
def tests(session: nox.Session, library: str) -> None:
    """The tests on one array library, the only one installed; tests(cupy) needs a GPU."""
    extras, groups = LIBRARIES[library]
    install(session, extras, ["test", *groups])
    if library == "torch":
        install_sources(session)
    run_tests(session, library)
    if library == "torch" and not session.posargs:
        for version in OLDER:
            run_with_transformers(session, version)


@nox.session(default=False)
@nox.parametrize("version", [nox.param(x, id=x) for x in (*OLDER, "5.24.0")])
def transformers(session: nox.Session, version: str) -> None:
    """transformers' models alone, with one of its versions; tests(torch) has both."""
    install(session, ["torch", "numba"], ["test", "peers-torch"])
    run_with_transformers(session, version)


@nox.session(name="tests-numpy", python=["3.12", "3.13"], default=False)
def tests_numpy(session: nox.Session) -> None:
    """The tests on NumPy under another Python version."""
    extras, groups = LIBRARIES["numpy"]
    install(session, extras, ["test", *groups])
    run_tests(session, "numpy")


@nox.session(name="tests-latest", python="3.13", default=False)
@nox.parametrize("library", [nox.param(x, id=x) for x in LIBRARIES if x != "cupy"])
def tests_latest(session: nox.Session, library: str) -> None:
    """The tests with the newest releases that install here; torch alone stays at its version of constraints/tested.txt.

    transformers stays at the one that pyproject.toml names. On the newest Python that scanfield claims: NumPy and JAX
    no longer make new releases for the oldest.
    """
    extras, groups = LIBRARIES[library]
    install(session, extras, ["test", *groups], newest=True)
    if library == "torch":
        install_sources(session)
    session.run("python", "-m", "pip", "list", "--format=freeze", "--exclude-editable")
    run_tests(session, library)


@nox.session(name="tests-slow", default=False)
@nox.parametrize("library", [nox.param(x, id=x) for x in ("numpy", "torch", "jax")])
def tests_slow(session: nox.Session, library: str) -> None:
    """What takes minutes a test: limits a hundred times over, the numerical contract, golden cases by inductor."""
    extras, groups = LIBRARIES[library]
    install(session, extras, ["test", *groups])
    if library == "torch":
        install_sources(session)
    run_tests(session, library, "tests", "--slow", "-m=slow")


@nox.session(default=False)
@nox.parametrize("library", [nox.param(x, id=x) for x in LIBRARIES if x != "cupy"])
def fuzz(session: nox.Session, library: str) -> None:
    """Random calls of every operation and verb: 10,000 each on NumPy, 1,000 elsewhere; the seed is printed.

    SCANFIELD_FUZZ_SEED and SCANFIELD_FUZZ_DRAWS repeat a run or make it shorter.
    """
    extras, groups = LIBRARIES[library]
    install(session, extras, ["test", *groups])
    seed = os.environ.get("SCANFIELD_FUZZ_SEED", str(secrets.randbelow(2**31)))
    draws = os.environ.get("SCANFIELD_FUZZ_DRAWS", "10000" if library == "numpy" else "1000")
    session.log(f"SCANFIELD_FUZZ_SEED={seed} SCANFIELD_FUZZ_DRAWS={draws}")
    session.env.update(SCANFIELD_FUZZ_SEED=seed, SCANFIELD_FUZZ_DRAWS=draws)
    # Files are read on the host: their tests run on NumPy alone.
    files = ["tests/pinn/test_pinn_untrusted.py", "tests/layers/test_layers_untrusted.py"]
    run_tests(session, library, "tests/fuzz", *(files if library == "numpy" else []))


@nox.session(default=False)
@nox.parametrize("library", [nox.param(x, id=x) for x in (*LIBRARIES, "cuda") if x != "cupy"])
def coverage(session: nox.Session, library: str) -> None:
    """The tests on one array library, or the emulated CUDA kernels, with every line and branch counted; a report.

    The counts of a library stay until its next run, and the report is of all libraries that have any.
    """
    extras, groups = (["torch"], ["kernels"]) if library == "cuda" else LIBRARIES[library]
    install(session, extras, ["test", "coverage", *groups])
    if library == "torch":
        install_sources(session)
    counts = session.cache_dir.resolve() / "coverage"
    counts.mkdir(exist_ok=True)
    for old in counts.glob(f"{library}.*"):
        old.unlink()
    session.env["COVERAGE_FILE"] = str(counts / library)
    # What writes machine code runs only where no kernel is kept from an earlier run.
    kept = Path(session.create_tmp()).resolve() / "cache"
    shutil.rmtree(kept, ignore_errors=True)
    under = (*COVERED, f"--override-ini=cache_dir={kept}")
    places = ["tests/cuda"] if library == "cuda" else []
    run_tests(session, "numpy" if library == "cuda" else library, *places, under=under)
    if library == "torch" and not session.posargs:
        for version in OLDER:
            run_with_transformers(session, version, under)
    session.env["COVERAGE_FILE"] = ".coverage"
    session.run("coverage", "combine", "--keep", "--quiet", *map(str, sorted(counts.iterdir())))
    session.run("coverage", "report")


@nox.session(default=False)
def mutation(session: nox.Session) -> None:
    """Whether the tests notice small faults: the first of 400 drawn mutants; `-- --first 40 --seed 1`, again to resume."""
    install(session, LIBRARIES["numpy"][0], ["test", "coverage", *LIBRARIES["numpy"][1]])
    session.run("python", "tests/mutation/run.py", *session.posargs, env=environment(session))


@nox.session
def cuda(session: nox.Session) -> None:
    """The CUDA kernels without a card: run on the CPU by an emulator (needs g++), compiled by NVRTC for three of them."""
    install(session, ["torch", "pinn"], ["test", "kernels"])  # torch: its tensors go to the same kernels
    run_tests(session, "numpy", "tests/cuda")
    if not session.posargs:
        run_tests(session, "cupy", "--standin", *ON_STANDIN)


@nox.session
def agree(session: nox.Session) -> None:
    """Every implementation against every other, all libraries at once; a planted wrong one must be caught.

    The CUDA kernels too, without a card: on a CuPy made of NumPy arrays, by an emulator (which needs g++).
    """
    install(session, ["numba", "torch", "jax", "dask", "cli"], ["test", "strict"])
    command = ["python", "tests/cuda/on_standin.py", "check", "--full", f"--jobs={processes(session)}"]
    session.run(*command, *session.posargs, env=environment(session))
    session.run("pytest", "tests/agree", env=environment(session))


@nox.session
def minimums(session: nox.Session) -> None:
    """The tests with the lowest versions that pyproject.toml claims for the core, numba and jax."""
    project = PROJECT["project"]
    claimed = [
        *project["dependencies"],
        *project["optional-dependencies"]["numba"],
        *project["optional-dependencies"]["jax"],
    ]
    tools = nox.project.dependency_groups(PROJECT, "test")
    may_be_dropped(session)
    session.install("--no-compile", "-e", ".", *map(lowest, claimed), *map(tested, tools))
    # What an old version of a library can change: the values, options, dtypes and shapes of the scans, and the dispatch.
    scans = [
        f"tests/scans/test_{name}.py" for name in ("golden", "options", "dtypes", "edges", "vjp", "lazy")
    ]
    run_tests(session, "numpy", *scans, "tests/dispatch")
    run_tests(session, "jax", "tests/scans/test_vjp.py")


@nox.session
def lint(session: nox.Session) -> None:
    """Style (ruff), import rules (import-linter), spelling (codespell), the whole (sp-repo-review); `-- --fix` mends."""
    install_tools(session, ["lint"])
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", *([] if "--fix" in session.posargs else ["--check"]))
    # The packages are found, not imported: they need not be installed.
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(["src", "backends"])})
    session.run("codespell")
    session.run("repo-review", ".")


@nox.session
def typing(session: nox.Session) -> None:
    """Static types: mypy, strict, over src and backends; then what mypy and pyright say of a user's wrong calls."""
    install(session, ["numba", "torch", "jax", "pinn", "cli", "plot"], ["typing"])
    session.run("mypy", *session.posargs)
    session.run("python", "tests/typing/check_user_code.py")


@nox.session
def build(session: nox.Session) -> None:
    """Wheel and sdist, each installed alone, read-only and in a zip; the example projects run on the wheel."""
    may_be_dropped(session)
    session.install("-c", TESTED, "build")
    scratch = Path(session.create_tmp()).resolve()
    shutil.rmtree(scratch)
    dist = scratch / "dist"
    session.run("python", "-m", "build", "--outdir", str(dist))  # the wheel is built from the sdist
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    check_contents(session, wheel, sdist)

    for archive in (sdist, wheel):
        python = scratch / archive.suffix[1:] / ("Scripts" if os.name == "nt" else "bin") / "python"
        session.run("python", "-m", "venv", str(python.parent.parent))
        session.run(str(python), "-m", "pip", "install", "--quiet", "-c", TESTED, str(archive), external=True)
        session.log(f"importing what {archive.name} installed")
        session.run(str(python), "-I", "-W", "error", "-c", IMPORTS, external=True, log=False)

    # `python` is the wheel's environment now: core dependencies and nothing else.
    session.run(str(python), "-I", "-W", "error", "-c", READ_ONLY, external=True, log=False)
    for name in ("downstream_numpy", "downstream_cupy"):
        example = shutil.copytree(Path("examples") / name, scratch / name)
        install = ("-m", "pip", "install", "--quiet", "-c", TESTED, f"{example}[test]")
        session.run(str(python), *install, external=True)
        # A stand-in takes CuPy's place where there is no card; it compiles the kernels for the CPU.
        if name == "downstream_cupy" and not (shutil.which("g++") and os.name == "posix"):
            session.log("downstream_cupy is built and not run: the emulator of CUDA kernels needs g++")
            continue
        standin = {"CUPY_STANDIN": str(Path("tests/cuda").resolve())}
        with session.chdir(example):
            session.run(str(python), "-m", "pytest", external=True, env=standin)

    session.run(str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "scanfield", external=True)
    session.run(
        str(python), "-I", "-W", "error", "-c", FROM_ZIP + IMPORTS, str(wheel), external=True, log=False
    )


@nox.session
def docs(session: nox.Session) -> None:
    """The manual and its notebooks, warnings as errors; the examples of docstrings, README and pages on NumPy are run."""
    install(session, ["pinn", "plot"], ["docs", "test"])
    # The matrices of examples are small: two threads of BLAS would mostly wait for each other.
    variables = environment(session) | {"OPENBLAS_NUM_THREADS": "1"}
    session.run(
        "sphinx-build", "-W", "--keep-going", *session.posargs, "docs", "docs/_build/html", env=variables
    )
    session.run("pytest", "--doctest-modules", "src/scanfield", env=variables)
    # Pages on tensors and JAX arrays run in those libraries' tests, the one on CuPy in `cuda`: tests/docs, tests/cuda.
    session.run("python", "docs/run_examples.py", env=variables)


# Scripts of benchmarks/ whose figures stand in docs/performance.md, and where these are kept.
KEPT = {
    "scans_numpy": "docs/performance.json",
    "pinn": "docs/performance-pinn.json",
    "helmholtz": "docs/performance-helmholtz.json",
    "models": "docs/performance-models.json",
}


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Timings and memory beside plain loops and peers; `-- overhead --quick` runs one script of benchmarks/.

    Without options it also writes docs/performance*.json and, from them, docs/performance.md.
    """
    install(session, ["numba", "torch", "jax", "pinn"], ["bench", "peers-torch"])
    scripts = sorted(path.stem for path in Path("benchmarks").glob("[!_]*.py"))
    options = [word for word in session.posargs if word not in scripts]
    for name in [word for word in session.posargs if word in scripts] or [x for x in scripts if x != "gpu"]:
        keeps = name in KEPT and not options
        more = ["--output", KEPT[name]] if keeps else options
        session.run("python", f"benchmarks/{name}.py", *more, env=environment(session))
        if keeps:
            session.run("python", "benchmarks/_page.py", "docs/performance.json", "docs/performance.md")


# What a fresh environment says of an installed distribution.
IMPORTS = """
import importlib.metadata, importlib.resources, sys
import scanfield
heavy = {"torch", "jax", "cupy", "dask", "numba"} & set(sys.modules)
assert not heavy, f"import scanfield imported {heavy}"
assert scanfield.__version__ == importlib.metadata.version("scanfield")
points = importlib.metadata.entry_points(group="scanfield.backends")
assert points, "the distribution has no scanfield.backends entry points"
for point in points:
    point.load()  # a manifest is light: it loads without its library
    assert importlib.resources.files(point.module).joinpath("py.typed").is_file()
assert importlib.resources.files("scanfield").joinpath("py.typed").is_file()
print("scanfield", scanfield.__version__, "from", scanfield.__path__[0], "with", [point.name for point in points])
"""

# A call and a command leave every file of an installation as it is, and make none.
READ_ONLY = """
import contextlib, importlib.metadata, io, os
folder = importlib.metadata.distribution("scanfield").locate_file("scanfield")
def state():
    found = {}
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = os.path.join(root, name)
            found[path] = os.stat(path).st_mtime_ns
            os.chmod(path, os.stat(path).st_mode & ~0o222)
    return found
before = state()
import numpy, scanfield
from scanfield.cli import main
a = numpy.full((1, 5, 2), 0.5)
result, pullback = scanfield.vjp(scanfield.linear_scan, a, a)
pullback(result.output)
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["info"]) == 0 and main(["check", "--operation", "linear_scan"]) == 0
assert state() == before, "files of the installation were written"
for path in before:
    os.chmod(path, os.stat(path).st_mode | 0o200)
print("scanfield runs from a read-only folder")
"""

# The wheel is a zip that Python imports from, its entry points and data files included.
FROM_ZIP = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy, scanfield
assert scanfield.__path__[0].startswith(sys.argv[1]), scanfield.__path__
a = numpy.full((1, 5, 2), 0.5)
assert scanfield.linear_scan(a, a).output.shape == a.shape
from scanfield.pinn import files
assert "square-1-4" in files.shipped() and "[problem]" in files.source("square-1-4")
"""


def install(session: nox.Session, extras: list[str], groups: list[str], *, newest: bool = False) -> None:
    """Install scanfield, editable, with these extras and the tools of these dependency-groups.

    In the versions that were tested, or ``newest``: in those of today, torch excepted.
    """
    may_be_dropped(session)
    tools = nox.project.dependency_groups(PROJECT, *groups)
    # pip would compile every file of a package; Python compiles what it imports. For torch and jax that is 25 seconds.
    project = f".[{','.join(extras)}]" if extras else "."
    versions = ["-c", TESTED]
    if newest:
        versions = [
            "--upgrade",
            "--upgrade-strategy=eager",
            *([tested("torch")] if "torch" in extras else []),
        ]
    session.install("--no-compile", *versions, "-e", project, *tools)


def may_be_dropped(session: nox.Session) -> None:
    """Where SCANFIELD_DROP_ENVIRONMENTS says so, remove the session's environment when nox ends.

    Under `nox -j` each session is a nox of its own, so that no more than two environments lie on the disk at a time.
    """
    if os.environ.get("SCANFIELD_DROP_ENVIRONMENTS"):
        atexit.register(shutil.rmtree, Path(session.virtualenv.location).resolve(), ignore_errors=True)


def install_tools(session: nox.Session, groups: list[str]) -> None:
    """Install the tools of these dependency-groups alone."""
    may_be_dropped(session)
    session.install("-c", TESTED, *nox.project.dependency_groups(PROJECT, *groups))


def install_sources(session: nox.Session) -> None:
    """Install peers of which the tests read plain PyTorch files: without dependencies and without kernels.

    What they depend on would bring Triton, torchvision and a second torch. The kernels of mamba-ssm would need a CUDA
    compiler, and without the second variable its build looks for a compiled wheel on the web.
    """
    no_kernels = {"MAMBA_SKIP_CUDA_BUILD": "TRUE", "MAMBA_FORCE_BUILD": "TRUE"}
    alone = ["--no-compile", "--no-deps", "--no-build-isolation"]
    session.install(*alone, "-c", TESTED, "fla-core", "mamba-ssm", "zennit", "lxt", env=no_kernels)


def run_with_transformers(session: nox.Session, version: str, under: Sequence[str] = ("pytest",)) -> None:
    """Run the tests of transformers' models with this version; an older one lies in a folder before the installed one."""
    variables = environment(session)
    if version in OLDER:
        folder = session.cache_dir.resolve() / f"transformers-{version}"
        if not folder.is_dir():
            session.install("--no-compile", "--no-deps", "--target", str(folder), "-r", OLDER[version])
        variables["PYTHONPATH"] = str(folder)
    session.run(*under, "--backend=torch", *MODELS, *session.posargs, env=variables)


def run_tests(session: nox.Session, library: str, *places: str, under: Sequence[str] = ("pytest",)) -> None:
    """Run pytest on one array library: these places (all but those with sessions of their own), unless posargs choose."""
    everything = [
        *(places or ["--ignore=tests/agree", "--ignore=tests/cuda"]),
        f"--numprocesses={processes(session)}",
        "--dist=worksteal",
    ]
    session.run(*under, f"--backend={library}", *(session.posargs or everything), env=environment(session))


def processes(session: nox.Session) -> int:
    """How many of its own a session may run at a time: most of what it waits for is compilers of one thread."""
    return 1 if session.parallel else 2


def environment(session: nox.Session) -> dict[str, str]:
    """Variables for a run: bytecode is kept (see `install`), plots need no screen, nothing asks a network.

    What JAX compiles is kept for the next process and session: a test on JAX mostly waits for its compiler.
    """
    return {
        "PYTHONDONTWRITEBYTECODE": "",
        "MPLBACKEND": "agg",
        "HF_HUB_OFFLINE": "1",
        # Of this torch alone: headers that another version has compiled do not fit.
        "TORCHINDUCTOR_CACHE_DIR": str(session.cache_dir.resolve() / "inductor"),
        "JAX_COMPILATION_CACHE_DIR": str(session.cache_dir.resolve() / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def lowest(requirement: str) -> str:
    """The requirement at the lowest version that it admits."""
    parsed = Requirement(requirement)
    (bound,) = [s.version for s in parsed.specifier if s.operator == ">="]
    return f"{parsed.name}=={bound}"


def tested(requirement: str) -> str:
    """The requirement at its version in the constraints file."""
    pins = [Requirement(line) for line in Path(TESTED).read_text().splitlines() if line and line[0] != "#"]
    name = canonicalize_name(Requirement(requirement).name)
    (pin,) = [pin for pin in pins if canonicalize_name(pin.name) == name]
    return str(pin)


def check_contents(session: nox.Session, wheel: Path, sdist: Path) -> None:
    """Stop unless both archives hold what they should, and the wheel nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        inside = archive.namelist()
        (facts,) = [name for name in inside if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(facts))
    strangers = {top for top in tops if top.split("-")[0].split("_")[0] != "scanfield"}
    if strangers or "scanfield" not in tops:
        session.error(
            f"{wheel.name} holds {sorted(tops)}: packages of scanfield and nothing else should be there"
        )
    if tests := [name for name in inside if "test" in name.lower().split("/")[-1] or "/tests/" in name]:
        session.error(f"{wheel.name} holds tests: {tests[:5]}")
    wanted = (
        "Name",
        "Version",
        "Summary",
        "License-Expression",
        "Requires-Python",
        "Description-Content-Type",
    )
    lacking = [field for field in wanted if not metadata[field]]
    if lacking or metadata["Description-Content-Type"] != "text/markdown":
        session.error(f"the metadata of {wheel.name} lack {lacking or 'markdown'}")
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    missing = {"src", "backends", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} - tops
    if missing:
        session.error(f"{sdist.name} lacks {sorted(missing)}")


if __name__ == "__main__":
    nox.main()
