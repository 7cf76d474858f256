"""A user's program as type checkers see it. Never run: `check_user_code.py` holds mypy and pyright to the marked lines.

A line with the mark "wrong" in a comment must be an error for both, every other line for neither.
"""

from __future__ import annotations

from typing import assert_type

import numpy as np

import scanfield
from scanfield import pinn, plots
from scanfield.layers import LanguageModel, MambaBlock
from scanfield.optimize import Adam

a = b = np.ones((1, 5, 3))
query = key = value = np.ones((1, 6, 2, 4))
log_decay = beta = np.zeros((1, 6, 2))

# -- scans -------------------------------------------------------------------------------------------------

result = scanfield.linear_scan(a, b)
assert_type(result, scanfield.ScanResult)
output, state = scanfield.linear_scan(a, b, initial_state=None, reverse=True, cu_seqlens=[0, 2, 5])
scanfield.linear_scan(a)  # wrong: an array is missing
scanfield.linear_scan(a, b, initial_stat=a)  # wrong: a misspelt keyword
scanfield.linear_scan(a, b, reverse="yes")  # wrong: a flag is a bool
scanfield.linear_scan(a, b, chunk_size=1.5)  # wrong: a chunk has a whole number of tokens
scanfield.linear_scan(a, b, method=3)  # wrong: a method is a name

scanfield.gdn2(query, key, value, log_decay, scale=0.5, qk_l2norm=True)
scanfield.gdn2(query, key)  # wrong: value is missing
scanfield.gdn2(query, key, value, decay=log_decay)  # wrong: it is called log_decay
scanfield.kda(query, key, value, log_decay)  # wrong: beta is missing
scanfield.delta_rule(query, key, value, beta, log_decay=log_decay)  # wrong: this rule has no decay
scanfield.selective_scan(a, a, a, a, a, delta_softplus=True)
scanfield.selective_scan(a, a, a, a)  # wrong: C is missing
scanfield.ssd(a, a, a, a, a, dt_limit=(0.0, 1.0))
scanfield.ssd(a, a, a, a, a, dt_limit=0.1)  # wrong: two numbers

# -- verbs -------------------------------------------------------------------------------------------------

found, pullback = scanfield.vjp(scanfield.linear_scan, a, b)
assert_type(found, scanfield.ScanResult)
gradients = pullback(d_output=a)
gradients["a"]
pullback(d_outputs=a)  # wrong: d_output
token, carried = scanfield.linear_scan.step(state, a[:, 0], b[:, 0])
scanfield.linear_scan.steps(state, a, b)  # wrong: no such verb
scanfield.associative_scan(lambda left, right: left, (a,), axes=1)  # wrong: axis
scanfield.relevance(scanfield.linear_scan, a, a, b).value
scanfield.relevance(scanfield.linear_scan, a, a, b).values  # wrong: value
piece = scanfield.summarise(scanfield.linear_scan, a, b)
assert_type(scanfield.compose(piece, piece), scanfield.Affine)
scanfield.compose(piece, a)  # wrong: two maps
scanfield.check_gradients(scanfield.linear_scan, a, b).worst
with scanfield.use(method="generic"):
    pass
with scanfield.use("generic", 3):  # wrong: one name
    pass
scanfield.set_num_threads("2")  # wrong: a number
scanfield.linear_skan(a, b)  # wrong: no such operation

# -- layers, optimisers, plots --------------------------------------------------------------------------------

model = LanguageModel(vocabulary=8, width=16, mixers=[MambaBlock(16, state_size=4)]).init(
    seed=0, xp=np, dtype="float32"
)
logits, carried_state = model(a)
LanguageModel(vocabulary=8, width=16)  # wrong: mixers are missing
MambaBlock(16, states=4)  # wrong: state_size
adam = Adam(learning_rate=1e-2)
Adam(learning_rate="fast")  # wrong: a number or a schedule
plots.relevance(a[0], ["a", "b", "c", "d", "e"], path="map.png")
plots.relevance(a[0], words=["a"])  # wrong: tokens

# -- Helmholtz ---------------------------------------------------------------------------------------------

problem = pinn.Helmholtz(pinn.Interval(0, 1), wavenumber=3.0, boundary=[pinn.Dirichlet(0.0)])
pinn.Helmholtz(pinn.Interval(0, 1))  # wrong: the wavenumber is missing
pinn.Helmholtz(pinn.Interval(0, 1), wavenumbers=3.0)  # wrong: wavenumber
network = pinn.Network.create(pinn.FourierFeatures(1, 8, wavenumber=3.0), hidden=[8])
fit = pinn.train(problem, network, points=50)
assert_type(fit, pinn.Fit)
pinn.train(problem, network, point=50)  # wrong: points
pinn.train(network, problem)  # wrong: the other way round
fit.errors(a)  # wrong: error
