"""Run: a training run whose result depends neither on the number of workers nor on which of them died. The public API.

The parts that do the work are in run_parts.py.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch import nn

from lockstep.comm.base import Comm
from lockstep.comm.plain_state import digest, flatten
from lockstep.data.shard import Shard
from lockstep.data.source import LoaderOptions
from lockstep.data.steps import Steps
from lockstep.errors import UsageError
from lockstep.observe.log import Sink
from lockstep.observe.trackers import Tracker
from lockstep.recording.records import CHECKPOINT, EVALUATE
from lockstep.training.argument_names import BATCH_SIZE, explain_unknown
from lockstep.training.captured_function import CapturedFunction
from lockstep.training.run_arguments import RunArguments, one_module
from lockstep.training.run_parts import RunParts
from lockstep.training.value_exchange import broadcast_value, gather_values, mean_of_values

P = ParamSpec("P")
T = TypeVar("T")


class Run:
    """A training run: everything that must be identical on every worker.

    All workers must construct it, with the same arguments. The model is hooked in place: there is no wrapper and no ``module.``
    prefix. Rank 0's parameters, buffers, optimizer and scheduler states are copied to all workers.

    Args:
        model: The model to train. If it is on a GPU, that GPU becomes the current CUDA device of the process. Several models: a
            list or a dict of them, as in ``lockstep.Run([generator, critic], opt_g, opt_c)``. Their parameters are then named
            "0.weight", or after the keys of the dict.
        *optimizers_and_schedulers: The optimizers of the model, their schedulers, and a ``GradScaler`` if there is one.
        lanes: Into how many slices every global batch is cut. Lanes define the arithmetic: with the same ``lanes`` and ``seed``
            the result has the same bits on any number of workers up to ``lanes``. Default: the number of workers.
        exact: If False, lanes and data stay as they are, but the backend sums gradients in the order it likes.
        seed: Seeds the order of the samples and everything random in training.
        threads: Intra-op threads per worker on the CPU. Sums depend on it, so the default is 1 if ``lanes`` is given.
        comm: What carries gradients: "auto", "shm", "twolevel", "gloo", "nccl", or a Comm. Default: chosen by device and machine.
        bucket_mb: The size of a gradient bucket in MiB.
        reduce_dtype: ``torch.float32`` (or ``torch.float64``): gradients of a less precise dtype are added in this one, over
            the lanes and over the workers, and the average is rounded once. Default: each gradient is added in its own dtype.
        timeout_s: How long a worker waits for another one before it raises a ``PeerError``.
        log_every: Logged values are averaged over all workers every ``log_every`` steps.
        on_log: Called on rank 0 as ``on_log(step, values)`` with the averages of what ``run.log`` was given.
        track: Where these averages go: names out of "csv", "tensorboard", "wandb" and "mlflow", trackers of ``lockstep.track``,
            such as ``lockstep.track.Csv("metrics.csv")``, and objects with ``log(step, values)``. Each step arrives exactly once,
            whichever worker dies and however often the run is resumed (the page "Log values" says what it needs for that).
        checkpoint: A folder, or any URL that fsspec can write to. The whole state is saved there, and the run resumes from
            the newest complete checkpoint that it finds there.
        every: How often a checkpoint is saved: "10min", "500 steps" or "1 epoch". One is also saved at the end of each loop and on
            SIGTERM.
        keep: How many checkpoints are kept.
        resume: Whether the run begins from a checkpoint: "auto" (from the newest one in ``checkpoint``, if there is one), "must"
            (the same, but a ``UsageError`` if there is none), "never" (it begins anew, and saves next to the checkpoints that are
            there), or the folder of one checkpoint, such as "checkpoints/step-000000500-01a1e4fd0da4e3df".
        override: Names of optimizers' hyperparameters, such as ``("lr",)``, for which a resumed run uses the script's value. For
            all others it uses the checkpoint's, and names those that differ from the script's.
        verify_every: Replicas are compared every ``verify_every`` steps, and a replica that differs is restored. 0: never.

    Raises:
        UsageError: An argument cannot work, or the workers have different models or settings, or a script under ``lockstep run``
            has constructed a ``Run`` before.
        PeerError: Another worker was lost and there is no agent to recover with.

    Example:
        >>> run = lockstep.Run(model, optimizer, scheduler, lanes=8)
        >>> for x, y in run.shard(dataset, global_batch=256, shuffle=True):
        ...     loss = F.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    @explain_unknown("lockstep.Run")
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        *optimizers_and_schedulers: Any,
        lanes: int | None = None,
        exact: bool = True,
        seed: int = 0,
        threads: int | None = None,
        comm: Comm | str | None = None,
        bucket_mb: float = 25,
        reduce_dtype: torch.dtype | None = None,
        timeout_s: float = 600.0,
        log_every: int = 10,
        on_log: Sink | None = None,
        track: Sequence[str | Tracker] = (),
        checkpoint: str | os.PathLike[str] | None = None,
        every: str = "10min",
        keep: int = 3,
        resume: str | os.PathLike[str] = "auto",
        override: Sequence[str] = (),
        verify_every: int = 100,
    ) -> None:
        given = RunArguments(
            model=one_module(model),
            objects=optimizers_and_schedulers,
            lanes=lanes,
            exact=exact,
            seed=seed,
            threads=threads,
            comm=comm,
            bucket_mb=bucket_mb,
            reduce_dtype=reduce_dtype,
            timeout_s=timeout_s,
            log_every=log_every,
            on_log=on_log,
            track=track,
            checkpoint=checkpoint,
            every=every,
            keep=keep,
            resume=resume,
            override=override,
            verify_every=verify_every,
        )
        self.model: nn.Module = given.model
        self.seed, self.exact = seed, exact
        parts = self._parts = RunParts(given)
        self.device, self.lanes = parts.device, parts.lanes
        self._workers, self._progress, self._engine, self._log = parts.workers, parts.progress, parts.engine, parts.log
        self._state, self._checkpoints, self._recovery = parts.state, parts.checkpoints, parts.recovery
        self._replay, self._loop = parts.replay, parts.loop

    # -- to read -----------------------------------------------------------------------------

    @property
    def comm(self) -> Comm:
        """What carries bytes between the workers of this generation."""
        return self._workers.comm

    @property
    def generation(self) -> int:
        """The number of the current set of workers. It grows by one whenever a worker is lost, joins or leaves."""
        return self._workers.generation

    @property
    def rank(self) -> int:
        """The number of this worker in the current generation, from 0."""
        return self._workers.rank

    @property
    def size(self) -> int:
        """The number of workers in the current generation."""
        return self._workers.size

    @property
    def is_main(self) -> bool:
        """Whether this worker is rank 0."""
        return self.rank == 0

    @property
    def lanes_here(self) -> tuple[int, int]:
        """The lanes of this worker, as (first, last + 1)."""
        return self._engine.my_lanes

    @property
    def step(self) -> int:
        """The number of steps committed so far."""
        return self._progress.step

    @property
    def epoch(self) -> int:
        """The epoch of ``run.epochs``, from 0; outside it, the epoch of the current loop over ``run.shard``."""
        return self._progress.epoch

    @property
    def committed(self) -> bool:
        """Whether the step of this iteration is committed: true once per step, on every worker alike.

        In a loop over ``run.shard`` that is so after ``opt.step()`` in the last micro-batch; in a loop over ``run.steps``, after a
        loop over the lanes.
        """
        return self._progress.committed

    @property
    def averaged(self) -> bool:
        """Whether ``param.grad`` holds the averages: true from the last lane's ``backward()`` to the end of the iteration."""
        loop = self._progress.loop
        return loop is not None and not loop.in_phase and self._engine.is_averaged

    @property
    def stands_in(self) -> bool:
        """Whether this iteration's batch is a placeholder that does not count, because this worker has no samples in the step."""
        loop = self._progress.loop
        return loop is not None and loop.step is not None and loop.lane >= 0 and loop.step.counts[loop.lane] == 0

    @property
    def logged(self) -> dict[str, float]:
        """The latest averages of what was logged."""
        return self._log.latest

    @property
    def epoch_means(self) -> dict[str, float]:
        """The averages over the current epoch of what was logged, with the same bits on any number of workers.

        Each step counts by its weight: its number of samples, or what ``run.weigh`` was given. The epoch is that of
        ``run.epochs``; outside it, that of the loop over ``run.shard``. The averages are complete when that loop has ended. Until
        the first values of an epoch are exchanged, they are those of the epoch before.
        """
        return self._log.epoch_means()

    @property
    def state(self) -> MutableMapping[str, Any]:
        """Your own variables: a mapping from names to plain values and tensors, such as the best accuracy so far.

        It is saved in checkpoints, sent to replacement workers, and compared with the other replicas. A worker that replays the
        script finds in it what it held at that place. Change it between loops, or in a loop under ``if run.committed:``, on every
        worker alike, by assigning a value or in place (``run.state["history"].append(...)``). Assigning a value that is not plain
        is a ``UsageError``, and so is a change in a lane whose step is not committed.

        Example:
            >>> run.state["best"] = max(run.state.get("best", 0.0), 0.93)
        """
        return self._parts.user_state

    def every(self, period: int | Literal["epoch"]) -> bool:
        """Return True once per ``period`` steps, in the iteration that committed the step, on every worker alike.

        Args:
            period: A number of steps, or "epoch" for the last step of each epoch.

        Raises:
            UsageError: ``period`` is neither.

        Example:
            >>> if run.every(100):
            ...     accuracy = run.evaluate(count_correct, test_set, global_batch=256)["correct"] / len(test_set)
        """
        if period == "epoch":
            loop = self._progress.loop
            return self.committed and loop is not None and loop.step is not None and loop.step.ends_epoch
        if not isinstance(period, int) or period < 1:
            raise UsageError(f"run.every({period!r}): pass a number of steps, 1 or more, or 'epoch'.")
        loop = self._progress.loop
        completed = self.step + (loop is not None and loop.has_phases)  # the step of this iteration is counted at its end
        return self.committed and completed % period == 0

    # -- the loop ----------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the epochs of a run, from 0 to ``count`` - 1. All workers must call it alike.

        A run that is resumed, and a worker that joins, begin with the current epoch: nothing in the loop body is run again for
        earlier epochs. The body may hold any number of loops over ``run.shard``, ``run.evaluate``, ``run.save``, scheduler steps
        and plain code. The loop may be left by ``break``, by the same decision on every worker.

        Args:
            count: The number of epochs. A run that is resumed may have more than before.

        Returns:
            An iterator over the numbers of the epochs.

        Raises:
            UsageError: ``count`` is not a number, or the loop is inside another one.

        Example:
            >>> for epoch in run.epochs(2):
            ...     for x, y in run.shard(dataset, global_batch=32, shuffle=True):
            ...         F.cross_entropy(model(x), y).backward()
            ...         opt.step()
            ...         opt.zero_grad()
            ...     sched.step()
        """
        self._loop.require_open()
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise UsageError(f"run.epochs({count!r}): pass the number of epochs, a whole number of 0 or more.")
        return self._parts.epoch_loops.iterate(count)

    @explain_unknown("run.shard", {"batch_size": BATCH_SIZE})
    def shard(
        self,
        dataset: Any,
        *,
        global_batch: int,
        shuffle: bool = False,
        epochs: int = 1,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        sampler: Iterable[int] | None = None,
        prefetch_factor: int | None = None,
    ) -> Shard:
        """Return this worker's part of a dataset, to iterate over instead of a DataLoader. All workers must call it alike.

        Every sample of every epoch is used exactly once. A worker with several lanes sees several micro-batches per step, and
        ``opt.step()`` does nothing until the last one.

        Args:
            dataset: A map-style dataset, or an iterable one (a stream).
            global_batch: How many samples all workers together use in one step.
            shuffle: Whether to shuffle the samples anew in each epoch, by ``seed``.
            epochs: How often to pass over the dataset.
            drop_last: Whether to drop the last samples of an epoch if they do not fill a global batch.
            num_workers: How many loader processes each worker has; 0 loads in the worker's own process.
            collate_fn: Makes a batch from a list of samples, as in a DataLoader. A batch that it returns as None is skipped.
            pin_memory: As in a DataLoader. Default: True if the model is on a GPU.
            sampler: Yields the indices of an epoch's samples, instead of ``shuffle``. It must yield the same on every worker. The
                seed of its ``generator``, if it has one, and ``seed`` decide the order of each epoch.
            prefetch_factor: As in a DataLoader.

        Returns:
            An iterable over micro-batches. Its ``len()`` is the number of iterations on this worker, so that progress bars are
            right. It changes when the workers change; in a resumed run it is the number that remains.

        Raises:
            UsageError: An argument cannot work.
        """
        options = self._options(
            global_batch, shuffle, epochs, drop_last, num_workers, collate_fn, pin_memory, sampler, prefetch_factor
        )
        return Shard(self._loop, dataset, options)

    @explain_unknown("run.steps", {"batch_size": BATCH_SIZE})
    def steps(
        self,
        dataset: Any,
        *,
        global_batch: int,
        shuffle: bool = False,
        epochs: int = 1,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        sampler: Iterable[int] | None = None,
        prefetch_factor: int | None = None,
        overlap: bool = False,
    ) -> Steps:
        """Return the steps over a dataset: one iteration per optimizer step, on every worker alike. All workers must call it alike.

        Each step is an iterable over this worker's lanes. When the loop over the lanes has ended, ``param.grad`` holds the
        averages, and everything behind it (clipping, ``opt.step()``, a moving average) runs once per step on every worker. A
        second loop over the same step computes another set of gradients, for a second loss or a second model.

        Args:
            dataset: As in ``shard``, like all other arguments.
            global_batch: How many samples all workers together use in one step.
            shuffle: Whether to shuffle the samples anew in each epoch, by ``seed``.
            epochs: How often to pass over the dataset.
            drop_last: Whether to drop the last samples of an epoch if they do not fill a global batch.
            num_workers: How many loader processes each worker has; 0 loads in the worker's own process.
            collate_fn: Makes a batch from a list of samples, as in a DataLoader. A batch that it returns as None is skipped.
            pin_memory: As in a DataLoader. Default: True if the model is on a GPU.
            sampler: Yields the indices of an epoch's samples, instead of ``shuffle``. It must yield the same on every worker.
            prefetch_factor: As in a DataLoader.
            overlap: Whether gradients may leave while the backward of the last lane runs, as in ``shard``. Then each lane has one
                ``backward()`` at most, and ``param.grad`` must not be used in the loop over the lanes.

        Returns:
            An iterable over steps. Its ``len()`` is the number of steps.

        Raises:
            UsageError: An argument cannot work.

        Example:
            >>> for step in run.steps(dataset, global_batch=256, shuffle=True):
            ...     for x, y in step:
            ...         F.cross_entropy(model(x), y).backward()
            ...     torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        options = self._options(
            global_batch, shuffle, epochs, drop_last, num_workers, collate_fn, pin_memory, sampler, prefetch_factor
        )
        return Steps(self._loop, self._parts.phases, dataset, options, overlap)

    def _options(
        self,
        global_batch: int,
        shuffle: bool,
        epochs: int,
        drop_last: bool,
        num_workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        pin_memory: bool | None,
        sampler: Iterable[int] | None,
        prefetch_factor: int | None,
    ) -> LoaderOptions:
        """Return the arguments that ``shard`` and ``steps`` share, in the order of their signatures, as one value."""
        return LoaderOptions(
            lanes=self.lanes,
            seed=self.seed,
            global_batch=global_batch,
            shuffle=shuffle,
            epochs=epochs,
            drop_last=drop_last,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=self.device.type == "cuda" if pin_memory is None else pin_memory,
            sampler=sampler,
            prefetch_factor=prefetch_factor,
        )

    def capture(self, function: Callable[P, T], *, shapes: int = 4) -> CapturedFunction[P, T]:
        """Capture a function of the loop body as a CUDA graph: after a few steps, one launch replays all its kernels.

        Use it if the host cannot launch kernels as fast as the GPU runs them. Capture the function that computes the loss and
        calls ``backward()``, and another one that clips gradients and calls ``opt.step()``. The results have the same bits as
        without. What cannot be captured runs as it is, and one line says why. On the CPU every function runs as it is. Every worker
        captures for itself, also one that joins later: the exchange of gradients is no part of a capture.

        In its first two steps the function runs as it is. In the third one it is recorded, and replayed from then on. So it runs on
        the host only until it is captured. It may use its arguments, the model and the optimizers; numbers
        and tensors that it reads from variables by name may change, but then it is captured anew. It must not print, log or
        count: return tensors, and do that with them outside. A function that calls ``backward()`` must not touch ``param.grad``
        afterwards: the average of the step is there only after the call.

        Args:
            function: Its arguments are tensors, plain values, or tuples, lists and dicts of them, and so is what it returns.
                Tensors require no gradient, and are moved to ``run.device`` first.
            shapes: How many captures are kept, one for each combination of shapes and plain values. Each has gradients of its own.

        Returns:
            A function that is called like ``function``. It returns copies, which later calls do not change and which do not
            belong to autograd's graph. Its attribute ``replays`` counts the calls that were replayed, ``recordings`` says how many
            captures are kept now, and ``reasons`` lists why others were not made.

        Raises:
            UsageError: ``shapes`` is less than 1, ``function`` is not one, or the run is closed; when it is called: it calls
                ``run.log`` or ``run.weigh``.

        Example:
            >>> @run.capture
            ... def forward_backward(x, y):
            ...     loss = F.cross_entropy(model(x), y)
            ...     loss.backward()
            ...     return loss
            >>> @run.capture
            ... def update():
            ...     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            ...     optimizer.step()
            >>> for x, y in run.shard(dataset, global_batch=64, drop_last=True):
            ...     run.log(loss=forward_backward(x, y))
            ...     update()
            ...     optimizer.zero_grad()
        """
        self._loop.require_open()
        if not callable(function) or isinstance(function, nn.Module):
            raise UsageError(
                f"run.capture got a {type(function).__name__}. Pass a function that computes the loss and calls backward() on it."
            )
        if isinstance(shapes, bool) or not isinstance(shapes, int) or shapes < 1:
            raise UsageError(f"run.capture(..., shapes={shapes!r}): pass how many captures are kept, 1 or more.")
        return self._parts.captures.capture(function, shapes)

    def weigh(self, weight: float) -> None:
        """Set the weight of the current lane (its number of tokens, for example) instead of its number of samples.

        The step's gradient is sum(w * g) / sum(w) over all lanes. Call it before ``backward()``, in every iteration or never.
        ``run.weigh(0)`` skips a batch, in any iteration: its gradients count for nothing. If all lanes of a step are skipped, the
        step has no gradients (``param.grad`` is None), and the optimizer changes nothing.

        Raises:
            UsageError: It was called after ``backward()`` or outside the loop, or ``weight`` is negative or not finite.
        """
        self._parts.captures.require_outside("run.weigh()", "before the function is called")
        self._engine.weigh(float(weight))

    def log(self, **values: Any) -> None:
        """Log numbers of this lane. They are averaged over all lanes by weight, every ``log_every`` steps.

        A value that belongs to the step, not to a lane (the norm of the gradient, a learning rate), is logged under
        ``if run.committed``.

        Args:
            **values: Numbers, or tensors of one element. A tensor is not read before the average is taken, so that logging does not
                synchronise with the GPU.

        Raises:
            UsageError: It was called outside the loop, or a value is not one number.
        """
        self._parts.captures.require_outside("run.log()", "with what the function returns")
        loop = self._progress.loop
        if loop is None or loop.step is None:
            raise UsageError("run.log() was called outside the loop over run.shard(...). Call it in the loop body.")
        step = self.step if loop.committed and not loop.has_phases else self.step + 1
        if loop.has_phases and not loop.in_phase:
            self._log.note_of_step(step, values, phase=loop.phase)
        elif loop.step.counts[loop.lane]:
            self._log.note(step, loop.lane, values, phase=loop.phase)

    @explain_unknown("run.evaluate", {"batch_size": BATCH_SIZE})
    def evaluate(
        self,
        fn: Callable[[Any], Mapping[str, Any]],
        dataset: Any,
        *,
        global_batch: int,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, Any]:
        """Sum what ``fn`` returns over every sample of a dataset, with the same bits on any number of workers.

        All workers must call it: outside the loop, or in the loop under ``run.every(...)``. Meanwhile the model is in eval mode
        and gradients are off.

        Args:
            fn: Called with each batch; returns a dict of numbers or tensors to add up.
            dataset: A map-style dataset, or an iterable one.
            global_batch: How many samples all workers together take at a time.
            num_workers: How many loader processes each worker has.
            collate_fn: Makes a batch from a list of samples, as in a DataLoader.

        Returns:
            The sums, under the names that ``fn`` returned.

        Raises:
            UsageError: ``fn`` returned something else, or different names for different batches, or not all workers call it.

        Example:
            >>> def count_correct(batch):
            ...     x, y = batch
            ...     return {"correct": (model(x).argmax(1) == y).sum()}
            >>> accuracy = run.evaluate(count_correct, test_set, global_batch=256)["correct"] / len(test_set)
        """
        self._loop.require_open()
        self._loop.require_collective("run.evaluate(...)", "result = run.evaluate(...)")
        with self._parts.recorder.within(EVALUATE):
            return self._collective(
                lambda: self._parts.evaluations.evaluate(
                    fn, dataset, step=self.step, global_batch=global_batch, num_workers=num_workers, collate_fn=collate_fn
                )
            )

    # -- values of all workers -----------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers, by rank, on every worker.

        All workers must call it: outside the loop, or in the loop under ``run.every(...)`` or ``if run.committed:``. If a worker
        is lost meanwhile, the survivors' values are returned.

        Args:
            value: Plain values, tensors, or lists, tuples and dicts of them. It may differ between workers.

        Returns:
            One value for each worker. Tensors are on the host.

        Raises:
            UsageError: The value is not plain, or not all workers call it.

        Example:
            >>> seconds = run.gather(12.5)
        """
        return self._exchange("gather", lambda: gather_values(self.comm, value, "run.gather(...)"))

    def mean(self, value: Any) -> Any:
        """Return the mean of the values of all workers, on every worker. Each worker counts once, however many lanes it has.

        All workers must call it, as ``run.gather``. Use ``run.log`` or ``run.evaluate`` for means over samples.

        Args:
            value: A number, or a tensor of the same shape on every worker.

        Returns:
            A float, or a tensor on the host.

        Raises:
            UsageError: The value is something else, or not all workers call it.

        Example:
            >>> seconds = run.mean(12.5)
        """
        return self._exchange("mean", lambda: mean_of_values(self.comm, value))

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value of one worker, on every worker.

        All workers must call it, as ``run.gather``. If that worker is lost meanwhile, its successor's value is returned.

        Args:
            value: Plain values, tensors, or lists, tuples and dicts of them. Only the value of rank ``source`` is used.
            source: The rank whose value is returned.

        Returns:
            The value. Tensors are on the host.

        Raises:
            UsageError: The value is not plain, there is no such rank, or not all workers call it.

        Example:
            >>> words = run.broadcast(["a", "list", "that", "rank 0", "has", "read"] if run.is_main else None)
        """
        return self._exchange("broadcast", lambda: broadcast_value(self.comm, value, source))

    def _exchange(self, name: str, call: Callable[[], T]) -> T:
        self._loop.require_open()
        self._loop.require_collective(f"run.{name}(...)", f"result = run.{name}(...)")
        with self._parts.recorder.waiting():
            return self._collective(call)

    # -- the state ---------------------------------------------------------------------------

    def register(self, name: str, stateful: Any) -> None:
        """Add an object to the state of the run: it is saved, resumed, and sent to newcomers.

        Call it right after ``Run(...)``, on every worker.

        Args:
            name: A name that no other registered object has.
            stateful: An object with ``state_dict`` and ``load_state_dict``. Its state must consist of plain values and tensors, and
                be the same on every worker.

        Raises:
            UsageError: The name is taken, or the object lacks one of the two methods.
        """
        self._loop.require_open()
        self._state.register(name, stateful)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the model's parameters and persistent buffers, as 64 hexadecimal digits.

        Two runs with equal fingerprints have the same weights, bit for bit: compare runs by it. Any worker may call it alone, also
        after ``close()``; all workers have the same. It reads every parameter once.

        Example:
            >>> result = run.fingerprint()  # 3b03c75862afaba38876a1a602399d3b46cbecd333f906bc8bf51b5532ca4b3e, for example
        """
        weights = {name: tensor.detach().cpu() for name, tensor in sorted(self._state.weights().items())}
        return digest(*flatten(weights, "the model")).hex()

    def save(self) -> None:
        """Save a checkpoint. All workers must call it.

        Inside the loop call it under ``run.every(...)``: the checkpoint is begun at the end of the iteration, and written while
        training continues. Outside the loop the checkpoint is complete when ``save`` returns.

        Raises:
            UsageError: Run was given no ``checkpoint``, or not all workers call it.
        """
        self._loop.require_open()
        checkpoints = self._checkpoints
        if checkpoints is None:
            raise UsageError('run.save() has no place to save to. Name one: lockstep.Run(..., checkpoint="checkpoints").')
        self._loop.require_collective("run.save()", "run.save()")
        if self._progress.loop is not None:
            checkpoints.request_save()
        else:
            with self._parts.recorder.within(CHECKPOINT):
                self._collective(lambda: checkpoints.save(self.step))

    def alone(self, what: str, *, limit_s: float = 3600.0) -> AbstractContextManager[None]:
        """Announce work of this worker that may take longer than ``--hang-timeout`` while the others wait for it.

        Until the ``with`` block ends, the agent does not take this worker for hung, and the waits of the others do not time out.
        Any worker may use it, inside and outside loops. A worker that dies in the block is replaced as always. Without an agent
        (``python``, ``torchrun``) it does nothing: the others wait for ``timeout_s``.

        Args:
            what: What this worker does, for messages: "saving the best model".
            limit_s: For how many seconds the agent tolerates the work. If the block takes longer, and the others then wait for
                another ``--hang-timeout``, the agent kills this worker as hung.

        Returns:
            A context manager.

        Raises:
            UsageError: ``what`` is empty, or ``limit_s`` is not a positive number.

        Example:
            >>> if run.is_main:
            ...     with run.alone("saving the best model"):
            ...         torch.save(model.state_dict(), "best.pt")
        """
        return self._parts.alone_work.announce(what, limit_s)

    def _collective(self, call: Callable[[], T]) -> T:
        """Call ``call`` together with all workers. Between loops, a script that is replayed gets the recorded result."""
        if self._progress.loop is not None:
            return copy.deepcopy(self._recovery.together(call))
        recorded = self._replay.next_result()
        if recorded is not None:
            return cast(T, copy.deepcopy(recorded.value))
        result = self._recovery.together(call)
        self._replay.record(result)
        return copy.deepcopy(result)  # the script may change it

    def close(self) -> None:
        """Publish what was logged, wait for a checkpoint that is being written, unhook the model, and close the connections.

        All workers must call it, or none. The optimizers get their own ``step`` back. It may be called twice.
        """
        self._parts.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
