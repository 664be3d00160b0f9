"""Averages sparse gradients (``Embedding(sparse=True)``): everyone's rows are gathered and added.

The sum is taken in rank order on every worker, so replicas agree to the bit. Collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.base import Comm

_ABSENT, _SPARSE, _DENSE = 0, 1, 2


def reduce_sparse(comm: Comm, param: Tensor, grad: Tensor | None, scale: float, what: str) -> Tensor | None:
    """The mean of every rank's gradient, or None where no rank has one.

    A rank that has a dense gradient (the weight is tied to a dense layer there) makes it dense for all.
    """
    if grad is not None and grad.is_sparse:
        grad = grad.coalesce()
    kind = _ABSENT if grad is None else _SPARSE if grad.is_sparse else _DENSE
    rows = grad._nnz() if grad is not None and grad.is_sparse else 0
    heads = torch.zeros(comm.size, 2, dtype=torch.int64)
    comm.all_gather(heads, torch.tensor([kind, rows]), f"{what} (sizes)").wait()
    kinds = heads[:, 0].tolist()
    if max(kinds) == _ABSENT:
        return None
    if max(kinds) == _DENSE:
        total = torch.zeros_like(param) if grad is None else grad.to_dense().mul(scale) if grad.is_sparse else grad.mul(scale)
        total = total.contiguous()
        comm.reduce(total, "sum", what).wait()
        return total
    indices = torch.zeros(0, dtype=torch.int64, device=param.device) if grad is None else grad.indices()[0]
    values = param.new_zeros(0, *param.shape[1:]) if grad is None else grad.values() * scale
    return _gather_rows(comm, param, indices, values, heads[:, 1].tolist(), what)


def fold_sparse(comm: Comm, param: Tensor, lanes: Sequence[Tensor], scale: float, what: str) -> Tensor:
    """The sum over all lanes of all ranks, times ``scale``: bit-equal for every assignment of lanes.

    ``lanes``: this rank's gradients, already weighted, in lane order. LaneBucket travel unsummed and are
    added in lane order, the same list on every rank whoever brought it. A dense gradient in some
    lane (the weight is tied to a dense layer there) makes it dense for all.
    """
    parts = [grad.coalesce() if grad.is_sparse else grad.to_sparse(1) for grad in lanes]
    is_dense = any(not grad.is_sparse for grad in lanes)
    indices = torch.cat([part.indices()[0] for part in parts]) if parts else torch.zeros(0, dtype=torch.int64, device=param.device)
    values = torch.cat([part.values() for part in parts]) if parts else param.new_zeros(0, *param.shape[1:])
    heads = torch.zeros(comm.size, 2, dtype=torch.int64)
    comm.all_gather(heads, torch.tensor([int(is_dense), len(indices)]), f"{what} (sizes)").wait()
    total = _gather_rows(comm, param, indices, values, heads[:, 1].tolist(), what)
    total = total.to_dense() if bool(heads[:, 0].any()) else total
    return total if scale == 1 else total.mul_(scale)


def _gather_rows(comm: Comm, param: Tensor, mine: Tensor, rows_of_mine: Tensor, rows: list[int], what: str) -> Tensor:
    """Everybody's rows, added in rank order."""
    most = max(1, max(rows))
    indices = torch.zeros(most, dtype=torch.int64, device=param.device)
    values = torch.zeros(most, *param.shape[1:], dtype=param.dtype, device=param.device)
    indices[: len(mine)] = mine
    values[: len(mine)] = rows_of_mine
    all_indices = indices.new_zeros(comm.size, *indices.shape)
    all_values = values.new_zeros(comm.size, *values.shape)
    first = comm.all_gather(all_indices, indices, f"{what} (rows)")
    second = comm.all_gather(all_values, values, what)
    first.wait()
    second.wait()
    kept_indices = torch.cat([all_indices[r, :n] for r, n in enumerate(rows)])
    kept_values = torch.cat([all_values[r, :n] for r, n in enumerate(rows)])
    return torch.sparse_coo_tensor(kept_indices.unsqueeze(0), kept_values, param.shape, check_invariants=False).coalesce()
