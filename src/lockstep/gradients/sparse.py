"""Averages sparse gradients (``Embedding(sparse=True)``): gathers the rows of all ranks and adds them.

Every rank adds the rows in rank order, so that replicas are equal to the bit. Everything here is collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.base import Comm

_ABSENT, _SPARSE, _DENSE = 0, 1, 2


def reduce_sparse(comm: Comm, param: Tensor, grad: Tensor | None, scale: float, what: str) -> Tensor | None:
    """Returns the sum of all ranks' gradients times ``scale``, or None if no rank has a gradient.

    If one rank has a dense gradient (the weight is tied to a dense layer), the result is dense on all ranks.
    """
    if grad is not None and grad.is_sparse:
        grad = grad.coalesce()
    kind = _ABSENT if grad is None else _SPARSE if grad.is_sparse else _DENSE
    rows = grad._nnz() if grad is not None and grad.is_sparse else 0
    kinds_and_rows = torch.zeros(comm.size, 2, dtype=torch.int64)
    comm.all_gather(kinds_and_rows, torch.tensor([kind, rows]), f"{what} (sizes)").wait()
    kinds = kinds_and_rows[:, 0].tolist()
    if max(kinds) == _ABSENT:
        return None
    if max(kinds) == _DENSE:
        total = torch.zeros_like(param) if grad is None else grad.to_dense().mul(scale) if grad.is_sparse else grad.mul(scale)
        total = total.contiguous()
        comm.reduce(total, "sum", what).wait()
        return total
    indices = torch.zeros(0, dtype=torch.int64, device=param.device) if grad is None else grad.indices()[0]
    values = param.new_zeros(0, *param.shape[1:]) if grad is None else grad.values() * scale
    return _gather_rows(comm, param, indices, values, kinds_and_rows[:, 1].tolist(), what)


def fold_sparse(
    comm: Comm, param: Tensor, lanes: Sequence[Tensor], scale: float, what: str, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the sum over all lanes of all ranks, times ``scale``: equal to the bit for every assignment of lanes.

    ``lanes``: this rank's gradients in ``dtype`` (default: that of ``param``), already multiplied by their shares, in lane order.
    A rank sends the rows of its lanes without adding them up; every rank then adds the same list of rows, in lane order. If the
    gradient of one lane is dense (the weight is tied to a dense layer), the result is dense on all ranks.
    """
    parts = [grad.coalesce() if grad.is_sparse else grad.to_sparse(1) for grad in lanes]
    is_dense = any(not grad.is_sparse for grad in lanes)
    indices = torch.cat([part.indices()[0] for part in parts]) if parts else torch.zeros(0, dtype=torch.int64, device=param.device)
    values = torch.cat([part.values() for part in parts]) if parts else param.new_zeros(0, *param.shape[1:], dtype=dtype)
    kinds_and_rows = torch.zeros(comm.size, 2, dtype=torch.int64)
    comm.all_gather(kinds_and_rows, torch.tensor([int(is_dense), len(indices)]), f"{what} (sizes)").wait()
    total = _gather_rows(comm, param, indices, values, kinds_and_rows[:, 1].tolist(), what)
    total = total.to_dense() if bool(kinds_and_rows[:, 0].any()) else total
    return total if scale == 1 else total.mul_(scale)


def _gather_rows(comm: Comm, param: Tensor, my_indices: Tensor, my_values: Tensor, rows: list[int], what: str) -> Tensor:
    """Returns the rows of all ranks, added in rank order. ``rows``: how many rows each rank has."""
    most = max(1, max(rows))
    indices = torch.zeros(most, dtype=torch.int64, device=param.device)
    values = torch.zeros(most, *param.shape[1:], dtype=my_values.dtype, device=param.device)
    indices[: len(my_indices)] = my_indices
    values[: len(my_indices)] = my_values
    all_indices = indices.new_zeros(comm.size, *indices.shape)
    all_values = values.new_zeros(comm.size, *values.shape)
    indices_pending = comm.all_gather(all_indices, indices, f"{what} (rows)")
    values_pending = comm.all_gather(all_values, values, what)
    indices_pending.wait()
    values_pending.wait()
    kept_indices = torch.cat([all_indices[r, :n] for r, n in enumerate(rows)])
    kept_values = torch.cat([all_values[r, :n] for r, n in enumerate(rows)])
    return torch.sparse_coo_tensor(kept_indices.unsqueeze(0), kept_values, param.shape, check_invariants=False).coalesce()
