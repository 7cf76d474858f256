"""One sequence, and the points of a Helmholtz problem, over two processes with torch.distributed (gloo).

    torchrun --nproc-per-node 2 examples/torch_parallel.py

Each rank trains on its own slice of time; DDP adds the gradients up. Then both train a PINN on half of the points each.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import scanfield
from scanfield import pinn
from scanfield.layers import MambaBlock
from scanfield_torch.parallel import GroupReducer, layer_parallel, sequence_parallel


class Sharded(torch.nn.Module):
    """A Mamba block whose sequence lies on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.block = MambaBlock(8, 4).init(0, torch)
        weights = self.block.named_parameters().items()
        self.weights = torch.nn.ParameterDict(
            {name.replace(".", "_"): torch.nn.Parameter(array.detach().clone()) for name, array in weights}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens of this rank."""
        named = {name: self.weights[name.replace(".", "_")] for name in self.block.named_parameters()}
        return layer_parallel(self.block, x, named, timeout=60.0)


def scan_of_shards(here: slice) -> None:
    """A scan of this rank's tokens beside one call on the whole."""
    a, b = torch.rand(1, 100, 4, dtype=torch.float64), torch.randn(1, 100, 4, dtype=torch.float64)
    part = sequence_parallel(scanfield.linear_scan, a[:, here], b[:, here])
    whole = scanfield.linear_scan(a, b)
    assert torch.allclose(part.output, whole.output[:, here], atol=1e-12)
    assert torch.allclose(part.final_state, whole.final_state, atol=1e-12)


def train_block(here: slice) -> list[float]:
    """The losses of a block whose sequence lies on all ranks, the same on each."""
    x = torch.randn(1, 100, 8)
    target = torch.cumsum(x, dim=1) / 10
    model = torch.nn.parallel.DistributedDataParallel(Sharded())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        # A mean over the whole; times the ranks, since DDP divides by them.
        loss = ((model(x[:, here]) - target[:, here]) ** 2).sum() / x.numel()
        (loss * dist.get_world_size()).backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    assert losses[-1] < 0.8 * losses[0]
    return losses


def train_pinn() -> float:
    """The loss of a Helmholtz problem of which each rank has half of the points."""
    problem = pinn.Helmholtz(pinn.Interval(0, 1), 5.0, source=1.0, boundary=pinn.Dirichlet(0.0))
    features = pinn.FourierFeatures(1, 12, scale=1.0, trainable=False)
    network = pinn.Network.create(features, hidden=[], outputs=1, xp=torch, dtype="float64")
    fit = pinn.train(
        problem,
        network,
        points=64,
        sampling="uniform",
        iterations=10,
        held_out=16,
        reducer=GroupReducer(timeout=60.0),
    )
    return float(fit.loss)


def main() -> None:
    """Compare a scan with one call on the whole; train a block; train a PINN."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    here = slice(100 * rank // size, 100 * (rank + 1) // size)
    scan_of_shards(here)
    losses, loss = train_block(here), train_pinn()
    if rank == 0:
        print(f"{size} ranks: block {losses[0]:.3f} -> {losses[-1]:.3f}, PINN {loss:.1e}")  # noqa: T201
    # The rank that keeps the group's store must not be the first to go. Not `barrier`: DDP keeps gloo's threads running
    # until Python ends, and one that lets go of that barrier's tensor then would abort the process (torch 2.13).
    dist.monitored_barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
