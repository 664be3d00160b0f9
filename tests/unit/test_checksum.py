"""Checksums are equal for equal bytes, and differ after any one change and any exchange of two bytes or words."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoint.checksum import CHUNK_BYTES, ROW_BYTES, Checksum, checksum, checksums

SIZES = [0, 1, 7, 8, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 9, 3 * ROW_BYTES, CHUNK_BYTES + 8, 2 * CHUNK_BYTES + 3]


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_tensors_of_zeros_with_different_lengths_differ() -> None:
    sums = checksums([torch.zeros(size, dtype=torch.uint8) for size in SIZES])
    assert len(set(sums)) == len(SIZES)


def test_pieces_views_and_strides_make_no_difference() -> None:
    for size in SIZES[1:]:
        whole = noise(size)
        one = Checksum()
        for begin in range(0, size, 2 * ROW_BYTES):
            one.add(whole[begin : begin + 2 * ROW_BYTES])
        assert one.digest() == checksum(whole)
        shifted = torch.empty(size + 3, dtype=torch.uint8)
        shifted[3:] = whole
        assert checksum(shifted[3:]) == checksum(whole)  # at an address that is not a multiple of 8
    matrix = torch.randn(65, 33)
    assert checksum(matrix.t()) == checksum(matrix.t().contiguous()) != checksum(matrix)
    assert checksum(torch.tensor(1.5)) == checksum(torch.tensor([1.5]))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SIZES[1:]), st.integers(0, 1 << 30), st.integers(0, 7))
def test_every_flipped_bit_is_detected(size: int, at: int, bit: int) -> None:
    before = noise(size)
    after = before.clone()
    after[at % size] ^= 1 << bit
    assert checksum(after) != checksum(before)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SIZES[3:]), st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.sampled_from([1, 8, 64, ROW_BYTES]))
def test_every_exchange_of_two_pieces_is_detected(size: int, one: int, other: int, length: int) -> None:
    before = noise(size)
    one, other = one % size, other % size
    length = min(length, abs(one - other), size - max(one, other))
    after = before.clone()
    after[one : one + length], after[other : other + length] = before[other : other + length], before[one : one + length]
    assert (checksum(after) == checksum(before)) == bool(torch.equal(after, before))


def test_an_exchange_within_a_column_or_a_row_is_detected() -> None:
    words = noise(4 * ROW_BYTES).view(torch.int64)
    for one, other in ((5, 5 + ROW_BYTES // 8), (5, 6), (5, 6 + ROW_BYTES // 8)):
        after = words.clone()
        after[one], after[other] = words[other], words[one]
        assert checksum(after) != checksum(words)
