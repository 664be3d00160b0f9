"""Sources load every sample once, the same samples on any number of workers, with and without loader processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from lockstep.data.map_source import MapSource
from lockstep.data.open_source import open_source
from lockstep.data.seeding import SavedRandomness, preserved_randomness, seed_everything
from lockstep.data.source import LoaderOptions, MicroBatch, Source
from lockstep.data.stream_source import StreamSource
from lockstep.errors import InvariantError, UsageError
from lockstep.plan.lanes import assign_lanes

Opener = Callable[..., Any]
processes = pytest.mark.parametrize("num_workers", [0, 2])


@pytest.fixture
def opened() -> Iterator[Opener]:
    """open_source, with every source closed at the end and no process left behind."""
    sources: list[Source] = []

    def opener(dataset: Any, **arguments: Any) -> Any:
        source = open_source(dataset, LoaderOptions(**{"lanes": 4, "global_batch": 8, "seed": 3, **arguments}))
        sources.append(source)
        return source

    yield opener
    for source in sources:
        source.close()
        source.close()
    assert multiprocessing.active_children() == []


def noise() -> list[float]:
    return [torch.rand(()).item(), random.random(), numpy.random.rand()]


class Lengthless:
    """A sampler without a length."""

    def __init__(self, indices: Any) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)


class Noisy(Dataset[Any]):
    """Each sample is its index and a draw from each generator."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> list[float]:
        return [index, *noise()]


class Batched(Noisy):
    def __getitem__(self, index: int) -> list[float]:
        raise NotImplementedError

    def __getitems__(self, indices: list[int]) -> list[list[float]]:
        return [[index, *noise()] for index in indices]


class Stream(IterableDataset[Any]):
    """Elements in an order, and with noise, drawn as they are read: a shuffle buffer."""

    def __init__(self, n: int, first: int = 0) -> None:
        self.n, self.first, self.epoch = n, first, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[float]]:
        # as torch's documentation advises: if a loader process saw its worker info, half of the elements would be lost
        info = get_worker_info()
        ahead = list(range(self.first, self.first + self.n))[info.id if info else 0 :: info.num_workers if info else 1]
        while ahead:
            yield [ahead.pop(random.randrange(min(3, len(ahead)))) + 1000 * self.epoch, *noise()]


class Sharded(Stream):
    def shard(self, num_shards: int, index: int) -> Stream:
        first, last = self.n * index // num_shards, self.n * (index + 1) // num_shards
        part = Stream(last - first, first)
        part.set_epoch(self.epoch)
        return part


def listed(samples: list[Any]) -> list[Any]:
    return [list(sample) for sample in samples]


def with_noise(samples: list[Any]) -> tuple[list[Any], list[float]]:
    return listed(samples), noise()


def drain(source: Source) -> Iterator[MicroBatch]:
    while True:
        try:
            yield source.take()
        except StopIteration:
            return


def epoch_of(source: Source, workers: int, lanes: int, epoch: int = 0, step: int = 0, steps: int | None = None) -> list[MicroBatch]:
    """What this many workers load, one after the other, sorted by (step, lane), without placeholder batches."""
    found = []
    for mine in assign_lanes(lanes, workers):
        source.seek(epoch, step, mine)
        for micro in drain(source):
            if micro.epoch != epoch or (steps is not None and micro.step >= step + steps):
                break
            found.append(micro)
    return sorted((micro for micro in found if micro.count), key=lambda micro: (micro.step, micro.lane))


def indices(micros: Iterable[MicroBatch]) -> list[int]:
    return [int(sample[0]) for micro in micros for sample in micro.batch]


# map-style datasets


@processes
@pytest.mark.parametrize("kind", [Noisy, Batched])
def test_samples_do_not_depend_on_the_number_of_workers_or_processes(opened: Opener, num_workers: int, kind: type) -> None:
    alone = epoch_of(opened(kind(45), shuffle=True, collate_fn=with_noise), workers=1, lanes=4)
    source = opened(kind(45), shuffle=True, collate_fn=with_noise, num_workers=num_workers)
    for workers in (1, 2, 3):
        assert epoch_of(source, workers, lanes=4) == alone
    assert sorted(int(sample[0]) for micro in alone for sample in micro.batch[0]) == list(range(45))


def test_an_augmentation_depends_on_seed_epoch_and_index_alone(opened: Opener) -> None:
    def samples(**arguments: Any) -> dict[int, Any]:
        source = opened(Noisy(20), collate_fn=listed, epochs=2, **arguments)
        return {sample[0]: sample for micro in epoch_of(source, 1, arguments.get("lanes", 4), epoch=1) for sample in micro.batch}

    assert samples() == samples(shuffle=True) == samples(lanes=3, global_batch=5)
    assert samples() != samples(seed=4)
    first = {sample[0]: sample for micro in epoch_of(opened(Noisy(20), collate_fn=listed), 1, 4) for sample in micro.batch}
    assert all(first[index] != sample for index, sample in samples().items())
    assert len({tuple(sample[1:]) for sample in first.values()}) == 20


@processes
def test_epochs_follow_each_other_in_new_orders_and_then_end(opened: Opener, num_workers: int) -> None:
    source = opened(Noisy(18), shuffle=True, epochs=3, collate_fn=listed, num_workers=num_workers)
    source.seek(0, 0, (0, 4))
    micros = list(drain(source))
    orders = [indices(micro for micro in micros if micro.epoch == epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(18)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert [(m.epoch, m.step, m.lane, m.count) for m in micros][8:13] == [
        (0, 2, 1, 1),
        (0, 2, 3, 1),
        (1, 0, 0, 2),
        (1, 0, 1, 2),
        (1, 0, 2, 2),
    ]
    with pytest.raises(StopIteration):
        source.take()
    source.seek(2, 2, (0, 4))  # the last step failed after everything was prefetched and the end was seen
    assert list(drain(source)) == micros[-2:]
    assert (source.steps_in_epoch, source.steps, source.length) == (3, 9, 18)
    assert [source.samples_in_step(step) for step in range(4)] == [8, 8, 2, 8]


@processes
def test_seeking_drops_what_was_prefetched_and_keeps_the_processes(opened: Opener, num_workers: int) -> None:
    source = opened(Noisy(64), shuffle=True, epochs=2, collate_fn=listed, num_workers=num_workers)
    whole = epoch_of(source, 1, 4)
    source.seek(0, 0, (0, 4))
    for expected in whole[:6]:
        assert source.take() == expected
    alive = {child.pid for child in multiprocessing.active_children()}
    assert len(alive) == num_workers
    source.seek(0, 1, (1, 3))
    rest = [micro for micro in whole if micro.step >= 1 and 1 <= micro.lane < 3]
    assert [source.take() for _ in rest] == rest
    assert source.take().epoch == 1
    assert {child.pid for child in multiprocessing.active_children()} == alive


@processes
def test_workers_that_change_in_mid_epoch_leave_no_sample_out(opened: Opener, num_workers: int) -> None:
    source = opened(Noisy(61), shuffle=True, collate_fn=listed, num_workers=num_workers)
    whole = epoch_of(source, 1, 4)
    before, after = epoch_of(source, 3, 4, steps=3), epoch_of(source, 2, 4, step=3)
    assert before + after == whole


def test_seeking_to_the_end_of_an_epoch_is_the_start_of_the_next(opened: Opener) -> None:
    source = opened(Noisy(16), epochs=2, collate_fn=listed)
    source.seek(0, 2, (0, 1))
    assert (source.take().epoch, source.take().step) == (1, 1)
    source.seek(2, 0, (0, 1))
    with pytest.raises(StopIteration):
        source.take()


@processes
def test_a_worker_without_samples_gets_a_placeholder_batch(opened: Opener, num_workers: int) -> None:
    source = opened(Noisy(9), collate_fn=listed, num_workers=num_workers)
    source.seek(0, 0, (0, 2))
    assert [(micro.step, micro.lane, micro.count, len(micro.batch)) for micro in drain(source)] == [
        (0, 0, 2, 2),
        (0, 1, 2, 2),
        (1, 0, 0, 1),
    ]
    source = opened(Noisy(11), collate_fn=listed, num_workers=num_workers)
    source.seek(0, 1, (0, 1))
    (placeholder,) = drain(source)
    assert (placeholder.count, [sample[0] for sample in placeholder.batch]) == (0, [8, 9])


def test_skipped_samples_are_not_touched(opened: Opener) -> None:
    touched = []

    class Watched(Noisy):
        def __getitem__(self, index: int) -> list[float]:
            touched.append(index)
            return [index]

    source = opened(Watched(20_000_000), shuffle=True, collate_fn=listed)
    source.seek(0, 2_000_000, (1, 2))
    assert source.take().count == len(touched) == 2


def test_the_last_batch_is_dropped_if_asked(opened: Opener) -> None:
    source = opened(Noisy(23), drop_last=True, collate_fn=listed)
    assert indices(epoch_of(source, 2, 4)) == list(range(16))
    assert source.steps_in_epoch == 2


@processes
def test_a_tensor_dataset_gives_what_torch_would(opened: Opener, num_workers: int) -> None:
    dataset = TensorDataset(torch.randn(21, 3), torch.arange(21), torch.rand(21, 2, 2).bool())
    source = opened(dataset, lanes=1, global_batch=4, num_workers=num_workers)
    source.seek(0, 0, (0, 1))
    batches = [micro.batch for micro in drain(source)]
    assert len(batches) == 6
    for ours, theirs in zip(batches, DataLoader(dataset, batch_size=4)):
        assert type(ours) is type(theirs)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs))
    one_by_one = epoch_of(opened(dataset, lanes=1, global_batch=4, collate_fn=default_collate), 1, 1)
    assert all(torch.equal(a, b) for m, ours in zip(one_by_one, batches) for a, b in zip(m.batch, ours))


def test_a_subset_works_as_it_does_in_torch(opened: Opener) -> None:
    micros = epoch_of(opened(Subset(Noisy(50), range(10, 40)), collate_fn=listed), 2, 4)
    assert indices(micros) == list(range(10, 40))


def test_the_default_collate_function_is_torchs(opened: Opener) -> None:
    source = opened([{"x": torch.full((2,), float(i)), "y": i} for i in range(8)])
    micro = epoch_of(source, 1, 4)[1]
    assert torch.equal(micro.batch["x"], torch.tensor([[2.0, 2.0], [3.0, 3.0]]))
    assert micro.batch["y"].tolist() == [2, 3]


@processes
def test_an_error_names_the_sample_and_loading_goes_on(opened: Opener, num_workers: int) -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> list[float]:
            if index == 5:
                raise KeyError("no such picture")
            return [index]

    source = opened(Broken(16), lanes=8, collate_fn=listed, num_workers=num_workers)
    source.seek(0, 0, (4, 8))
    source.take()
    with pytest.raises(KeyError) as caught:
        source.take()
    assert "sample 5 in epoch 0" in str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    assert source.take().batch == [[6]]
    source.seek(0, 1, (0, 1))
    assert source.take().batch == [[8]]


@processes
def test_a_dataset_that_raises_stop_iteration_does_not_end_the_run(opened: Opener, num_workers: int) -> None:
    class Stops(Noisy):
        def __getitem__(self, index: int) -> list[float]:
            raise StopIteration

    source = opened(Stops(16), num_workers=num_workers)
    source.seek(0, 0, (0, 4))
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        source.take()


def test_loader_processes_skip_requests_of_an_earlier_series(opened: Opener, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    class Slow(Noisy):
        def __getitem__(self, index: int) -> list[float]:
            (tmp_path / f"loaded{index}").touch()
            if index == 1:
                gate.read_bytes()  # until the test opens the other end
            return [index]

    source = opened(Slow(64), lanes=1, global_batch=1, num_workers=1, prefetch_factor=4, collate_fn=listed)
    source.seek(0, 0, (0, 1))
    assert source.take().step == 0  # steps 1 to 4 are being prefetched
    source.seek(0, 20, (0, 1))
    gate.write_bytes(b"")
    assert source.take().step == 20
    loaded = {int(path.name.removeprefix("loaded")) for path in tmp_path.glob("loaded*")}
    assert {0, 1, 20} <= loaded
    assert not loaded & {2, 3, 4}


# samplers


class Even:
    """A sampler without a length, with an order of its own in each epoch."""

    def __init__(self, n: int) -> None:
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(2 * i + 4 * self.epoch) % self.n for i in range(self.n // 2)])


@processes
def test_a_sampler_is_the_order_of_each_epoch(opened: Opener, num_workers: int) -> None:
    source = opened(Noisy(40), sampler=Even(40), epochs=3, collate_fn=listed, num_workers=num_workers)
    assert (source.length, source.steps_in_epoch) == (20, 3)
    for workers in (2, 1):
        for epoch in (0, 1, 0, 2):
            assert indices(epoch_of(source, workers, 4, epoch)) == [(2 * i + 4 * epoch) % 40 for i in range(20)]


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: RandomSampler(range(30)),
        lambda: RandomSampler(range(30), generator=torch.Generator()),
        lambda: WeightedRandomSampler([1.0] * 30, 30),
    ],
)
def test_a_random_sampler_gives_the_same_order_to_a_worker_that_comes_later(opened: Opener, sampler: Callable[[], Any]) -> None:
    first = opened(Noisy(30), sampler=sampler(), epochs=3, collate_fn=listed)
    orders = [indices(epoch_of(first, 1, 4, epoch)) for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
    torch.manual_seed(17)
    later = opened(Noisy(30), sampler=sampler(), epochs=3, collate_fn=listed)
    assert indices(epoch_of(later, 1, 4, 2)) == orders[2]


def test_the_seed_of_a_samplers_generator_decides_the_order(opened: Opener) -> None:
    def orders(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        before = generator.get_state()
        sampler = RandomSampler(range(30), generator=generator)
        first = opened(Noisy(30), sampler=sampler, epochs=2, collate_fn=listed)
        found = [indices(epoch_of(first, 1, 4, epoch)) for epoch in (0, 1)]
        again = opened(Noisy(30), sampler=sampler, epochs=2, collate_fn=listed)
        assert [indices(epoch_of(again, 1, 4, epoch)) for epoch in (1, 0)] == found[::-1]
        assert generator.get_state().equal(before)
        return found

    assert orders(1) == orders(1)
    first, other = orders(1), orders(2)
    assert len({*map(tuple, first + other)}) == 4


def test_running_a_sampler_leaves_the_generators_alone(opened: Opener) -> None:
    saved = SavedRandomness()
    expected = noise()
    saved.restore()
    opened(Noisy(30), sampler=Lengthless(RandomSampler(range(30))))
    assert noise() == expected


# streams


@processes
@pytest.mark.parametrize("kind", [Stream, Sharded])
def test_a_stream_does_not_depend_on_the_number_of_its_readers(opened: Opener, num_workers: int, kind: type[Stream]) -> None:
    alone = epoch_of(opened(kind(45), collate_fn=with_noise), 1, 4, steps=8)
    assert sorted(int(sample[0]) for micro in alone for sample in micro.batch[0]) == list(range(45))
    source = opened(kind(45), collate_fn=with_noise, num_workers=num_workers)
    assert isinstance(source, StreamSource)
    for workers in (1, 2, 3):
        assert epoch_of(source, workers, 4, steps=8) == alone


@processes
@pytest.mark.parametrize("kind", [Stream, Sharded])
def test_seeking_in_a_stream_reads_up_to_the_position(opened: Opener, num_workers: int, kind: type[Stream]) -> None:
    source = opened(kind(100), collate_fn=listed, num_workers=num_workers, epochs=2)
    whole = epoch_of(source, 1, 4, epoch=1, steps=13)
    assert sorted(indices(whole)) == list(range(1000, 1100))
    source.seek(1, 2, (0, 4))
    assert [source.take() for _ in range(5)] == whole[8:13]
    alive = {child.pid for child in multiprocessing.active_children()}
    source.seek(1, 5, (0, 4))  # on
    assert [source.take() for _ in range(5)] == whole[20:25]
    source.seek(1, 1, (2, 4))  # back, with other lanes, for which the same number of processes will do
    assert [source.take() for _ in range(4)] == [*whole[6:8], *whole[10:12]]
    assert {child.pid for child in multiprocessing.active_children()} == alive
    source.seek(1, 3, (1, 2))
    assert [source.take() for _ in range(2)] == [whole[13], whole[17]]
    source.seek(2, 0, (0, 4))
    with pytest.raises(StopIteration):
        source.take()


@pytest.mark.parametrize("global_batch", [8, 9, 11])
def test_a_stream_is_divided_like_a_map_style_dataset(opened: Opener, global_batch: int) -> None:
    def plain() -> Any:
        class Plain:
            def __iter__(self) -> Iterator[list[int]]:
                return iter([[i] for i in range(global_batch * 5)])

        return Plain()

    stream = epoch_of(opened(plain(), global_batch=global_batch, collate_fn=listed), 2, 4, steps=6)
    assert stream == epoch_of(opened([[i] for i in range(global_batch * 5)], global_batch=global_batch, collate_fn=listed), 3, 4)


@processes
def test_an_ended_stream_gives_placeholder_batches(opened: Opener, num_workers: int) -> None:
    source = opened(Stream(11), collate_fn=listed, num_workers=num_workers)
    source.seek(0, 1, (0, 4))
    micros = [source.take() for _ in range(12)]
    assert [(micro.step, micro.lane, micro.count) for micro in micros[:5]] == [
        (1, 0, 2),
        (1, 1, 1),
        (1, 2, 0),
        (1, 3, 0),
        (2, 0, 0),
    ]
    assert all(1 <= len(micro.batch) <= 2 for micro in micros)
    source.seek(0, 40, (2, 3))  # a newcomer, after the end of the stream
    assert source.take().count == 0
    assert source.take().batch


@processes
def test_lanes_of_a_sharded_stream_end_one_by_one(opened: Opener, num_workers: int) -> None:
    source = opened(Sharded(3), collate_fn=listed, num_workers=num_workers)  # lane 0 has nothing, the others one element each
    source.seek(0, 0, (0, 4))
    micros = [source.take() for _ in range(8)]
    assert [micro.count for micro in micros] == [0, 1, 1, 1, 0, 0, 0, 0]
    assert micros[0].batch is None
    assert all(len(micro.batch) == 1 for micro in micros[1:4])
    assert all(micro.batch for micro in micros[4:])


def test_a_stream_of_few_files_is_not_sharded_further(opened: Opener) -> None:
    class Few(Sharded):
        num_shards = 2

    assert epoch_of(opened(Few(20), collate_fn=listed), 2, 4, steps=3) == epoch_of(
        opened(Stream(20), collate_fn=listed), 1, 4, steps=3
    )


def test_a_broken_stream_is_not_taken_for_its_end(opened: Opener) -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            yield from range(4)
            raise OSError("connection lost")

    source = opened(Broken(), collate_fn=list)
    source.seek(0, 0, (0, 4))
    assert source.take().batch == [0, 1]
    assert source.take().batch == [2, 3]
    for _ in range(2):
        with pytest.raises(OSError, match="connection lost"):
            source.take()


def test_an_object_that_rewinds_itself_is_a_stream(opened: Opener) -> None:
    class Rewinds:
        def __iter__(self) -> Rewinds:
            self.left = 20
            return self

        def __next__(self) -> list[int]:
            if not self.left:
                raise StopIteration
            self.left -= 1
            return [self.left]

    source = opened(Rewinds(), collate_fn=listed)
    for workers in (1, 3):
        assert indices(epoch_of(source, workers, 4, steps=3)) == list(range(20))[::-1]


# both


@pytest.mark.parametrize("dataset", [Noisy(20), Stream(20)])
def test_a_source_needs_a_seek_first(opened: Opener, dataset: Any) -> None:
    source = opened(dataset)
    with pytest.raises(InvariantError, match="before its first"):
        source.take()


@pytest.mark.parametrize("dataset", [Noisy(20), Stream(20), TensorDataset(torch.rand(20, 1))])
def test_loader_processes_draw_nothing_from_this_process_generators(opened: Opener, dataset: Any) -> None:
    saved = SavedRandomness()
    expected = noise()
    saved.restore()
    source = opened(dataset, num_workers=1)
    source.seek(0, 0, (0, 4))
    source.take()
    assert noise() == expected


OK: dict[str, Any] = {"lanes": 8, "global_batch": 8}


@pytest.mark.parametrize(
    ("dataset", "arguments", "message"),
    [
        (Noisy(0), {}, r"len\(dataset\) is 0"),
        (Noisy(9), {"sampler": []}, "the sampler gives no samples"),
        (Noisy(9), {"global_batch": 0}, "global_batch=0: a step needs at least 1 sample"),
        (
            Noisy(9),
            {"global_batch": 4},
            "global_batch=4 is smaller than lanes=8: every lane needs at least one sample of a full batch. "
            "Pass global_batch>=8 or fewer lanes.",
        ),
        (Stream(9), {"global_batch": 4}, "global_batch=4 is smaller than lanes=8"),
        (Noisy(9), {"lanes": 0}, "lanes=0"),
        (Noisy(9), {"epochs": 0}, "epochs=0"),
        (Noisy(9), {"num_workers": -1}, "num_workers=-1"),
        (Noisy(9), {"global_batch": 10, "drop_last": True}, "9 samples do not fill one batch of global_batch=10"),
        (Noisy(9), {"sampler": iter(range(9))}, "which can be read only once"),
        (Noisy(9), {"sampler": BatchSampler(SequentialSampler(range(9)), 3, False)}, "BatchSampler gives batches"),
        (Noisy(9), {"sampler": Lengthless([[0, 1], [2, 3]])}, r"the sampler gives lists, .*\[0, 1\] at position 0"),
        (Noisy(9), {"sampler": DistributedSampler(range(9), 2, 0)}, "one worker's share"),  # type: ignore[arg-type]
        (Noisy(9), {"sampler": range(9), "shuffle": True}, "shuffle=True together with a sampler"),
        (DataLoader(Noisy(9)), {}, "Pass loader.dataset"),
        (Stream(9), {"shuffle": True}, "Shuffle in the dataset, or use a map-style one"),
        (Stream(9), {"sampler": range(9)}, "use a map-style one"),
        (Stream(9), {"drop_last": True}, "Pass drop_last=False"),
        ((i for i in range(9)), {}, "a generator can be read only once"),
        (iter([1, 2]), {}, "can be read only once"),
        (7, {}, "int is not a dataset"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(dataset: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_source(dataset, LoaderOptions(**{**OK, **arguments}))


def test_a_sampler_that_changes_its_length_is_refused(opened: Opener) -> None:
    shrinking = list(range(9))
    source = opened(Noisy(9), sampler=Lengthless(shrinking), epochs=2)
    shrinking.clear()
    source.seek(0, 1, (0, 4))
    with pytest.raises(UsageError, match="the sampler gives 0 samples in epoch 1, and 9 were expected"):
        list(drain(source))


def test_map_source_counts_its_steps() -> None:
    options = LoaderOptions(lanes=2, global_batch=8, epochs=2, shuffle=True)
    assert MapSource(Noisy(20), options).steps == 6
    assert MapSource(Noisy(20), replace(options, drop_last=True)).steps == 4


# seeding


def test_seeding_makes_every_generator_repeat_itself() -> None:
    with preserved_randomness():
        seed_everything(11)
        first = noise()
        noise()
        seed_everything(11)
        assert noise() == first
        seed_everything(12)
        assert all(a != b for a, b in zip(noise(), first))


@pytest.mark.parametrize("seed", [0, 11, 1 << 40])
def test_torch_and_numpy_do_not_draw_the_same_numbers(seed: int) -> None:
    with preserved_randomness():
        seed_everything(seed)
        drawn = torch.randint(1 << 32, (100,)).tolist()
        assert not set(drawn) & set(numpy.random.randint(0, 1 << 32, 100).tolist())


def test_randomness_is_restored_after_an_error() -> None:
    saved = SavedRandomness()
    expected = [noise(), random.gauss(0, 1), torch.randn(()).item(), numpy.random.randn()]
    saved.restore()
    with contextlib.suppress(ZeroDivisionError), preserved_randomness():
        seed_everything(5)
        noise()
        raise ZeroDivisionError
    assert [noise(), random.gauss(0, 1), torch.randn(()).item(), numpy.random.randn()] == expected
