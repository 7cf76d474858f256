"""Mutation check: break the library in small ways, one at a time, and see whether the tests notice.

    python tests/mutation/run.py --first 80             the first 80 of the 400 drawn mutants; again: resumes
    python tests/mutation/run.py --again tests/lrp      the survivors against these tests alone, say new ones
    python tests/mutation/run.py --table                what is known so far

All happens in a copy of the working tree. There the tests run once under coverage, which tells the tests that reach
each line (reach.py). Then each mutant is written into the copy and meets the tests that reach its line, the quick ones
first and one of each function before the second of any, up to a budget of CPU time, until one fails. A mutant is
"killed" by a failing test or import, "timeout" if its tests burn ten times their CPU time, else "survived". Needs
coverage and a system that forks: the children share the imports of NumPy, SciPy, Numba and pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from mutants import PACKAGES, Mutant, draw

TOTAL = 400
# What is measured for its reach, a coverage run each. Left out: trainings, the compiled kernels' own rows of the tests of
# scans (they hardly touch src/), and the second dtype and the read-only arrays, which reach the same lines.
MEASURED = {
    "dispatch": ["tests/dispatch", "tests/lrp"],
    "cli": ["tests/cli/test_info.py", "tests/cli/test_helmholtz_files.py", "-k=not readonly"],
    "pinn": ["tests/pinn", "--ignore=tests/pinn/test_pinn_solves.py", "-k=not readonly"],
    "scans": ["tests/scans", "-k=not numba and not readonly and not float32"],
    "shards": ["tests/parallel/test_reduce.py"],
}
# These start processes of their own, in which no line is measured: what breaks their package meets them last.
APART = {"dispatch": ["tests/dispatch/test_dispatch_plugins.py"]}
QUIET = ["-q", "-n0", "--backend=numpy", "--tb=line"]
# What was imported before the fork cannot have its asserts rewritten, and need not.
FORKED = [*QUIET, "-x", "-Wignore::pytest.PytestAssertRewriteWarning"]
PRELOADED = (
    "numpy",
    "scipy.optimize",
    "scipy.special",
    "scipy.linalg",
    "numba",
    "array_api_compat.numpy",
    "pytest",
    "hypothesis.strategies",
    "jaxtyping",
)


@dataclass
class Reach:
    """Which tests reach a line of the library, and their CPU seconds under coverage."""

    tree: Path
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, set[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(set))
    )
    imported: set[tuple[str, int]] = field(default_factory=set)  # lines that ran before any test

    def add(self, data: Path, times: Path) -> None:
        from coverage import CoverageData

        self.seconds |= json.loads(times.read_text())
        measured = CoverageData(str(data))
        measured.read()
        for file in measured.measured_files():
            for line, tests in measured.contexts_by_lineno(file).items():
                name = str(Path(file).relative_to(self.tree))
                self.lines[name][line] |= {test for test in tests if test in self.seconds}
                if "" in tests:
                    self.imported.add((name, line))

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that reach the mutant, in the order in which they run."""
        lines = self.lines[mutant.file]
        tests = lines.get(mutant.line) or lines.get(mutant.statement) or set()
        if mutant.at_import or (not tests and (mutant.file, mutant.line) in self.imported):
            # Every test of the file meets it.
            tests = set().union(*lines.values())
        functions: dict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            functions[test.split("[")[0]].append(test)
        rounds = itertools.zip_longest(*functions.values())
        return [test for one in rounds for test in one if test is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description="mutation check of scans, pinn, dispatch and lrp")
    parser.add_argument(
        "--first", type=int, default=TOTAL, help=f"how many of the {TOTAL} mutants (default: all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--seconds", type=float, default=30.0, help="CPU budget of a mutant (default: 30)")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "scanfield-mutation")
    parser.add_argument("--output", type=Path, default=Path("mutation.json"))
    parser.add_argument("--again", nargs="+", metavar="TESTS", help="the survivors against these tests alone")
    parser.add_argument("--table", action="store_true", help="only show what --output holds")
    options = parser.parse_args()
    known = json.loads(options.output.read_text()) if options.output.exists() else {}
    drawn = draw(options.seed, TOTAL)[: options.first]
    if not options.table:
        tree = copy_tree(options.scratch)
        for module in PRELOADED:
            importlib.import_module(module)
        reach = None if options.again else measure(options.scratch, tree)
        for count, mutant in enumerate(drawn, 1):
            if options.again:
                if known.get(mutant.name, {}).get("status") != "survived":
                    continue
                row = judge(mutant, tree, options.again, 0, options.seconds)
            elif reach is not None and mutant.name not in known:
                row = judge(mutant, tree, *chosen(reach, mutant, options.seconds))
            else:
                continue
            if options.again and row["status"] == "survived":
                row["tests"] = known[mutant.name]["tests"]
            known[mutant.name] = row
            options.output.write_text(json.dumps(known, indent=1) + "\n")
            print(
                f"{count:3} {row['status']:8} {row['seconds']:5.1f}s {row['where']} {row['change']}",
                flush=True,
            )
    table([known[mutant.name] | {"file": mutant.file} for mutant in drawn if mutant.name in known])


def copy_tree(scratch: Path) -> Path:
    """The working tree's files as they are now, copied; what an earlier run compiled and measured stays."""
    tree = scratch / "tree"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and Path(name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, tree / name)
    return tree


def surroundings(tree: Path) -> dict[str, str]:
    """Variables under which a process tests the copy, whatever scanfield is installed."""
    paths = [str(tree / "src"), str(tree / "backends"), str(tree / "tests" / "mutation")]
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    return {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}


def measure(scratch: Path, tree: Path) -> Reach:
    """Run the tests once under coverage, a context each; a measurement that is there already is kept."""
    reach = Reach(tree)
    for name, places in MEASURED.items():
        data, times = scratch / f"reach-{name}", scratch / f"times-{name}.json"
        if not (data.exists() and times.exists()):
            print(f"measuring which lines the tests of {name} reach", flush=True)
            more = {"COVERAGE_FILE": str(data), "SCANFIELD_MUTATION_TIMES": str(times)}
            covered = [sys.executable, "-m", "coverage", "run", "--rcfile=/dev/null", "--branch"]
            covered += ["--source=src/scanfield", "-m", "pytest", "-p", "reach", *QUIET, *places]
            done = subprocess.run(covered, cwd=tree, env=os.environ | surroundings(tree) | more, check=False)
            if done.returncode not in (0, 1) or not (data.exists() and times.exists()):
                raise SystemExit(
                    f"the tests of {name} do not run under coverage: it ended with {done.returncode}"
                )
            if done.returncode:
                print(f"tests of {name} fail without any mutant: these are left out", flush=True)
        reach.add(data, times)
    return reach


def chosen(reach: Reach, mutant: Mutant, budget: float) -> tuple[list[str], int, float]:
    """The tests of a mutant within the budget, how many that leaves out, and their seconds."""
    tests, spent = [], 0.0
    reaching = reach.tests(mutant)
    for test in reaching:
        if tests and (spent + reach.seconds[test] > budget or len(tests) >= 100):
            continue
        tests.append(test)
        spent += reach.seconds[test]
    left_out = len(reaching) - len(tests)
    return [*tests, *APART.get(Path(mutant.file).parts[2], ())], left_out, spent


def judge(mutant: Mutant, tree: Path, tests: list[str], left_out: int, seconds: float) -> dict[str, object]:
    """Run these tests on the copy with this mutant in it."""
    path = tree / mutant.file
    text, times = path.read_text(), path.stat()
    began = time.monotonic()
    status, killer = "survived", ""
    if tests:
        try:
            path.write_text(mutant.applied(text))
            os.utime(
                path, ns=(times.st_atime_ns, time.time_ns() + 10**9 * 10**4)
            )  # no older bytecode is taken for it
            cpu = 30 + round(10 * seconds)
            status, killer = child(tree, [*FORKED, *tests], cpu)
            if status == "lost":  # the mutant renamed parameters of tests
                functions = dict.fromkeys(test.split("[")[0] for test in tests)
                status, killer = child(tree, [*FORKED, *functions], cpu)
            if status == "lost":
                raise SystemExit(f"{mutant.file}:{mutant.line}: pytest finds no tests to run: {killer}")
        finally:
            path.write_text(text)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    old = " ".join(text[mutant.start : mutant.stop].split())
    line = text.splitlines()[mutant.line - 1].strip()
    return {
        "status": status,
        "where": f"{mutant.file}:{mutant.line}",
        "kind": mutant.kind,
        "change": f"{old} -> {mutant.new.strip() or 'nothing'}",
        "line": line,
        "killer": killer,
        "tests": len(tests),
        "left_out": left_out,
        "seconds": round(time.monotonic() - began, 1),
    }


def child(tree: Path, arguments: list[str], cpu: int) -> tuple[str, str]:
    """Fork a process that runs pytest in the tree: what became of the mutant, and the test that failed."""
    log = tree.parent / "log"
    process = os.fork()
    if process == 0:
        code = 70
        try:
            os.setsid()
            os.chdir(tree)
            os.environ.update(surroundings(tree))
            sys.path[:1] = os.environ["PYTHONPATH"].split(os.pathsep)
            sys.dont_write_bytecode = True
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 5))
            written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(written, 1)
            os.dup2(written, 2)
            code = sys.modules["pytest"].main(arguments)
        finally:
            sys.stdout.flush()
            os._exit(int(code))
    deadline = time.monotonic() + 20 * cpu  # one that waits for ever burns nothing
    ended, status = os.waitpid(process, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)
        ended, status = os.waitpid(process, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # whatever its tests started, too
    if not ended:
        os.waitpid(process, 0)
        return "timeout", "waits"
    if os.WIFSIGNALED(status):
        timeout = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
        return ("timeout", "burns") if timeout else ("killed", f"signal {os.WTERMSIG(status)}")
    code = os.WEXITSTATUS(status)
    if code == 0:
        return "survived", ""
    text = log.read_text(errors="replace")
    named = [line.split(" - ")[0] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if code == 5 or (code == 4 and "ImportError while loading" not in text and "no match in any of" in text):
        return "lost", text[-1000:]
    return "killed", named[0] if named else f"exit status {code}"


def table(rows: list[dict[str, object]]) -> None:
    """The counts of each package, then every survivor."""
    print(f"\n{'package':10} {'run':>4} {'killed':>7} {'timeout':>8} {'survived':>9} {'not survived':>13}")
    for package in (*PACKAGES, "all"):
        few = [row for row in rows if package in ("all", Path(str(row["file"])).parts[2])]
        count = Counter(row["status"] for row in few)
        share = f"{1 - count['survived'] / len(few):.1%}" if few else "-"
        print(
            f"{package:10} {len(few):4} {count['killed']:7} {count['timeout']:8} {count['survived']:9} {share:>13}"
        )
    for row in rows:
        if row["status"] == "survived":
            print(f"\n{row['where']}  {row['change']}  ({row['tests']} tests, {row['left_out']} left out)")
            print(f"    {row['line']}")


if __name__ == "__main__":
    main()
