"""torch.compile(fullgraph=True) traces through dispatch, also when that is the first call of the process."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import announce, python

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.backend("torch")

FIRST_CALL = """
    import sys
    import torch
    import scanfield
    from small_calls import EXAMPLES

    operation, backend = sys.argv[1:3]
    inputs, options, _ = EXAMPLES[operation]
    names = list(inputs)
    function = getattr(scanfield, operation)
    given = [torch.tensor(x) for x in inputs.values()]

    def run(*arrays):
        result, pullback = scanfield.vjp(function, **dict(zip(names, arrays)), **options)
        gradients = pullback(result.output, result.final_state)
        return (*function(**dict(zip(names, arrays)), **options), *result, *(gradients[name] for name in names))

    compiled = torch.compile(run, fullgraph=True, backend=backend)(*given)   # the first call of this process
    eager = run(*given)
    assert len(compiled) == len(eager) == 4 + len(names)
    for one, other in zip(compiled, eager):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
"""


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("operation", ["linear_scan", "selective_scan", "gdn2", "kda"])
def test_the_first_call_may_be_a_compiled_one(operation, backend):
    python(FIRST_CALL, operation, backend, path=(HERE,))


def test_logging_does_not_break_the_graph():
    python(FIRST_CALL, "linear_scan", "eager", path=(HERE,), SCANFIELD_LOG="1")


def test_a_plugin_is_chosen_while_tracing(tmp_path):
    announce(tmp_path, "dummy", "dummy_backend:TORCH")
    quiet = FIRST_CALL.replace(
        "    operation, backend = sys.argv[1:3]",
        "    import dummy_backend\n"
        "    dummy_backend.Loopback.note = lambda self, verb: None   # a list of notes is no part of a graph\n"
        "    operation, backend = sys.argv[1:3]",
    )
    python(
        quiet + "    assert dummy_backend.MADE == [('numpy.loopback', operation)], dummy_backend.MADE\n",
        "linear_scan", "eager", path=(HERE, tmp_path),
    )  # fmt: skip


METHODS = """
    import torch
    import scanfield
    from small_calls import EXAMPLES

    inputs, options, _ = EXAMPLES["gdn2"]
    given = [torch.tensor(x) for x in inputs.values()]
    names = list(inputs)

    def run(*arrays):
        return scanfield.gdn2(**dict(zip(names, arrays)), chunk_size=2)

    def forced(*arrays):
        return scanfield.gdn2(**dict(zip(names, arrays)), chunk_size=2, method="generic.chunk")

    def inside(*arrays):
        with scanfield.use(method="generic.chunk"):
            return scanfield.gdn2(**dict(zip(names, arrays)), chunk_size=2)

    def names_of_ops(function, *arrays):
        seen = []
        def backend(graph, _):
            seen.extend(str(node.target) for node in graph.graph.nodes)
            return graph.forward
        torch._dynamo.reset()
        torch.compile(function, fullgraph=True, backend=backend)(*arrays)
        return seen

    recurrent = names_of_ops(run, *given)
    chunked = names_of_ops(forced, *given)
    assert recurrent != chunked   # four tokens are recurrent by default; forced, the graph is another
    assert names_of_ops(inside, *given) == chunked
    with scanfield.use(method="generic.chunk"):
        assert names_of_ops(run, *given) == chunked
    assert names_of_ops(run, *given) == recurrent
"""


def test_a_forced_method_is_seen_while_tracing():
    python(METHODS, path=(HERE,))
