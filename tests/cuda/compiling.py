"""Compiles kernels for a card that is not there, with NVRTC as CuPy would and with nvcc, and reads what they cost.

``python tests/cuda/compiling.py`` prints the table of docs/cuda.md anew.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from scanfield_cupy.sources import source

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


class Case(NamedTuple):
    """A kernel file and its macros."""

    file: str
    macros: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return " ".join([self.file, *(f"{name}={value}" for name, value in self.macros)])

    @property
    def code(self) -> str:
        return source(self.file)

    def local_memory(self, kernel: str) -> bool:
        """Whether local memory is due: the sine and cosine of a large angle reduce it there."""
        sines = kernel.endswith("_sin") or kernel in ("embed", "frequency_gradient")
        return sines or "complex" in dict(self.macros).get("STATE", "")


class Usage(NamedTuple):
    """Of one kernel."""

    registers: int
    stack: int
    spilled: int


def case(file: str, **macros: str) -> Case:
    return Case(file, tuple(sorted(macros.items())))


def cases() -> list[Case]:
    """Every module that a call can ask for, half precision once for each file and kind."""
    made = [
        case("linear_scan.cu", STORED=x)
        for x in ("float", "double", "float16", "bfloat16", "complex64", "complex128")
    ]
    parts = {4: ((4, 1), (4, 4), (8, 8), (8, 32)), 8: ((2, 2), (4, 4), (4, 16), (4, 32))}
    parts[16] = ((2, 2), (2, 8), (2, 32))
    kinds = [
        ("float", "float", "float", 4),
        ("bfloat16", "bfloat16", "float", 4),
        ("float16", "float16", "float", 4),
    ]
    kinds += [("double", "double", "double", 8), ("float", "complex64", "complex64", 8)]
    kinds += [("double", "complex128", "complex128", 16)]
    for stored, vector, state, size in kinds:
        for part, share in parts[size] if stored not in ("float16", "bfloat16") else ((4, 4),):
            made.append(
                case(
                    "selective_scan.cu",
                    INPUT=stored,
                    VECTOR=vector,
                    STATE=state,
                    PART=str(part),
                    SHARE=str(share),
                )
            )
    forward = {
        4: ((4, 4, 4), (8, 8, 4), (8, 16, 4), (8, 32, 4)),
        8: ((4, 4, 2), (8, 8, 2), (8, 16, 2), (8, 32, 2)),
    }
    backward = {
        4: ((4, 4, 4), (4, 16, 4), (4, 32, 4), (8, 32, 2)),
        8: ((4, 4, 2), (4, 16, 2), (4, 32, 2), (8, 32, 1)),
    }
    for stored, size in (("float", 4), ("bfloat16", 4), ("float16", 4), ("double", 8)):
        for back, table in enumerate((forward, backward)):
            for part, share, cols in table[size] if stored in ("float", "double") else table[size][2:3]:
                made.append(
                    case(
                        "gated_delta.cu", STORED=stored, PART=str(part), SHARE=str(share), COLS=str(cols),
                        BACKWARD=str(back),
                    )
                )  # fmt: skip
    made += [
        case(file, REAL=real)
        for file in ("pinn_jets.cu", "pinn_embedding.cu", "pinn_steps.cu")
        for real in ("float", "double")
    ]
    return made + _chunk_cases()


def _chunk_cases() -> list[Case]:
    """The gated delta rule in chunks: without tensor cores, with them, keys and decays in types of their own."""
    made = []
    for stored, keys, tensor in (
        ("float", "float", 0),
        ("bfloat16", "bfloat16", 0),
        ("double", "double", 0),
        ("float16", "float16", 2),
        ("bfloat16", "float", 1),
        ("bfloat16", "bfloat16", 1),
    ):
        kinds = {"STORED": stored, "KEYS": keys, "DECAY": keys, "TENSOR": str(tensor)}
        every_size = stored in ("float", "double") or (keys, tensor) == ("bfloat16", 1)
        for back in ("0", "1"):
            made.append(case("gated_delta_inside.cu", BACKWARD=back, **kinds))
            made += [
                case("gated_delta_states.cu", BACKWARD=back, ROWS=rows, **kinds)
                for rows in (("64", "128", "256") if every_size else ("128",))
            ]
        made += [case(f"gated_delta_{step}.cu", **kinds) for step in ("output", "outer", "gradients")]
    return made


def _kind(each: Case) -> tuple[str, str]:
    macros = dict(each.macros)
    if (
        "TENSOR" in macros
    ):  # the first and the last with tensor cores and without: enough for every run of the tests
        return each.file, f"chunks {macros['TENSOR'] != '0'} {macros.get('BACKWARD')}"
    number = next((macros[name] for name in ("STATE", "STORED", "REAL") if name in macros), "")
    return each.file, number + macros.get("BACKWARD", "")


def representative() -> list[Case]:
    """The smallest module of each file and kind of number."""
    found = {_kind(each): each for each in reversed(cases())}
    return [each for each in found.values() if dict(each.macros).get("TENSOR", "0") == "0"][::-1]


def demanding() -> list[Case]:
    """The largest module of each file and kind of number: those that run out of registers first."""
    return list({_kind(each): each for each in cases()}.values())


@cache
def nvrtc() -> ctypes.CDLL | None:
    """NVIDIA's run-time compiler, from its wheel; it needs no card and no driver."""
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found is not None else ():
        builtins, libraries = (
            sorted(path for path in Path(folder).rglob(name) if ".alt." not in path.name)
            for name in ("libnvrtc-builtins.so*", "libnvrtc.so*")
        )
        if builtins and libraries:
            ctypes.CDLL(str(builtins[0]), mode=ctypes.RTLD_GLOBAL)  # NVRTC looks for it by name
            return ctypes.CDLL(str(libraries[0]))
    return None


def with_nvrtc(case: Case, architecture: str) -> tuple[int, str]:
    """Size of the machine code, and what the compiler said; under the options that CuPy gives it."""
    library = nvrtc()
    assert library is not None
    program = ctypes.c_void_p()
    given = [
        "-std=c++17", f"--gpu-architecture={architecture}", "--device-as-default-execution-space",
        "--ptxas-options=-v", *(f"-D{name}={value}" for name, value in case.macros),
    ]  # fmt: skip
    assert (
        library.nvrtcCreateProgram(ctypes.byref(program), case.code.encode(), b"kernels.cu", 0, None, None)
        == 0
    )
    failed = library.nvrtcCompileProgram(
        program, len(given), (ctypes.c_char_p * len(given))(*map(str.encode, given))
    )
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    said = log.value.decode()
    if failed:
        raise RuntimeError(f"NVRTC refuses {case}:\n{said}")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return size.value, said


def with_nvcc(case: Case, architecture: str) -> str:
    """What nvcc said, warnings as errors."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernels.cu"
        source.write_text(case.code)
        command = [
            shutil.which("nvcc") or "nvcc", "-std=c++17", f"-arch={architecture}", "-cubin", "-Xptxas", "-v,-warn-spills",
            "-Werror", "all-warnings", *(f"-D{name}={value}" for name, value in case.macros),
            "-o", str(Path(scratch) / "kernels.cubin"), str(source),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"nvcc refuses {case}:\n{done.stderr}")
        return done.stderr


def usage(said: str) -> dict[str, Usage]:
    """Registers, stack and spilled bytes of each kernel, from the assembler's words."""
    found = {}
    for part in said.split("Compiling entry function '")[1:]:
        name = part.split("'")[0]
        numbers = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", part)
        registers = re.search(r"Used (\d+) registers", part)
        assert numbers and registers, part
        found[name] = Usage(int(registers[1]), int(numbers[1]), int(numbers[2]))
    return found


def table(architecture: str = "sm_90") -> str:
    """Markdown: a row for each module, registers of each of its kernels."""
    lines = ["| module | kernels: registers | stack, bytes |", "|---|---|---|"]
    for each in cases():
        found = usage(with_nvrtc(each, architecture)[1])
        used = ", ".join(f"{name} {x.registers}" for name, x in sorted(found.items()))
        lines.append(f"| {each} | {used} | {max(x.stack for x in found.values())} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(*sys.argv[1:]))
