"""MemoryReads: what counts as memory of the function, and what as memory that was there before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.gradients.cuda_graph import CannotRecord
from lockstep.training.memory_reads import MemoryReads

HOST = torch.device("cpu")


def addresses(reads: MemoryReads, *known: Tensor) -> set[int]:
    return {storage.data_ptr() for storage in reads.outside(HOST, known)}


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_tensors_that_were_there_before_are_found_in_forward_and_backward() -> None:
    x, y, weight = torch.ones(4, 4), torch.ones(4), torch.ones(4, 4, requires_grad=True)
    with MemoryReads() as reads:
        torch.cat([(x[1:] @ weight.t()).sum(0), y]).exp().sum().backward()
    assert addresses(reads) == {address(x), address(y), address(weight)}
    assert addresses(reads, y) == {address(x), address(weight)}


def test_a_tensor_that_is_written_in_place_was_there_before() -> None:
    mean = torch.zeros(3)
    with MemoryReads() as reads:
        mean.mul_(0.9).add_(1)
    assert addresses(reads) == {address(mean)}


def test_tensors_of_the_function_are_its_own_even_if_they_outlive_it() -> None:
    x = torch.ones(3)
    with MemoryReads() as reads:
        kept = x + 1
        kept * 2
    assert addresses(reads) == {address(x)}


def test_a_tensor_that_nobody_has_seen_being_made_and_that_is_gone_is_not_kept() -> None:
    x = torch.ones(3)
    with MemoryReads() as reads:
        with torch.utils._python_dispatch._disable_current_modes():  # as a kernel of torch.compile makes it
            hidden = x + 1
        hidden * 2
        del hidden
    assert addresses(reads) == set()


def test_compiled_functions_are_not_compiled_anew() -> None:
    compiled = torch.compile(lambda x: x.sin() * 2, backend="eager")
    compiled(torch.ones(3))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with MemoryReads():
        compiled(torch.ones(3))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_a_gradient_may_be_read_in_a_backward_alone() -> None:
    weight = torch.ones(3, requires_grad=True)
    weight.sum().backward()
    assert weight.grad is not None
    with MemoryReads() as reads:
        reads.gradients = {address(weight.grad)}
        (weight * 2).sum().backward()
        with pytest.raises(CannotRecord, match=r"it reads or changes param.grad after backward\(\)"):
            weight.grad.norm()
    assert weight.grad.tolist() == [3, 3, 3]
