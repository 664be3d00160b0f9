"""Captured loops on a GPU have the bits of the same loops without ``run.capture``, on any number of workers. As test_gpu.py."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import tempfile
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.gradients.cuda_graph import CannotRecord, CudaGraphs
from tests import shared_gpu
from tests.capture_jobs import JOBS, Result, adamw, job
from tests.captured_run import CapturedRun, require_survival
from tests.gpu.ranks import sizes_over_nccl, use_gpu, why_no_nccl
from tests.lane_jobs import Dropping, dataset
from tests.workers import run_workers

GPU = "cuda:0"


def every_job(rank: int, size: int, lanes: int) -> dict[str, tuple[Result, Result]]:
    device = str(use_gpu())
    return {name: job(rank, size, name, device, lanes) for name in JOBS}


def train(body: Any, *, capture: bool, steps: int = 10, lanes: int = 2) -> tuple[Any, str, str]:
    """Train a transformer with ``body(model, x, y)`` captured. Returns the captured function, the digest and what was printed."""
    torch.manual_seed(5)
    model = Dropping().to(GPU)
    opt = adamw(model)
    run = lockstep.Run(model, opt, lanes=lanes, seed=1)

    def forward_backward(x: Tensor, y: Tensor) -> Tensor:
        return body(model, x, y)

    function = run.capture(forward_backward) if capture else forward_backward
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        for x, y in run.shard(dataset(160), global_batch=16, epochs=steps // 10):
            function(x.to(GPU), y.to(GPU))
            opt.step()
            opt.zero_grad()
    digest = run.fingerprint()
    run.close()
    return function, digest, printed.getvalue()


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def waiting(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = plain(model, x, y)
    loss.item()  # a wait
    return loss


def waiting_unseen(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = plain(model, x, y)
    torch.cuda.synchronize()
    return loss


def drawing_on_the_host(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain(model, x * float(torch.rand(())), y)


def what_cannot_be_captured(rank: int, size: int) -> dict[str, tuple[int, list[str], str, bool]]:
    torch.cuda.set_device(0)
    found = {}
    for body in (waiting, waiting_unseen, drawing_on_the_host, plain):  # the last one must still be captured
        function, digest, printed = train(body, capture=True)
        found[body.__name__] = (function.replays, function.reasons, printed, digest == train(body, capture=False)[1])
    return found


def memory_of_shapes(rank: int, size: int) -> tuple[list[int], int, int]:
    """Train with ever new lengths. Returns the memory that is reserved after each round of lengths, and captures kept and made."""
    torch.cuda.set_device(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Dropout(0.1), nn.ReLU(), nn.Linear(512, 64)).to(GPU)
    opt = adamw(model)
    reserved = []
    with lockstep.Run(model, opt, lanes=1) as run:

        def forward_backward(x: Tensor, repeat: int) -> Tensor:
            loss = model(x.repeat(repeat, 1)).square().mean()
            loss.backward()
            return loss

        captured = run.capture(forward_backward, shapes=2)
        lengths = [100 * (1 + k // 12 % 3) for k in range(108)]  # 12 steps with each of three lengths, three times
        data = torch.utils.data.TensorDataset(torch.randn(108 * 8, 64))
        for (x,), length in zip(run.shard(data, global_batch=8), lengths, strict=False):
            captured(x, length)
            opt.step()
            opt.zero_grad()
            if run.step % 36 == 0:
                torch.cuda.synchronize()
                reserved.append(torch.cuda.memory_reserved())
        made = captured._recordings.dropped + captured.recordings
        return reserved, captured.recordings, made


def replaced_attribute(rank: int, size: int) -> tuple[list[float], list[float], int]:
    """Replace a tensor that a recording reads, and use all memory of its size. Returns losses of a model that does not learn."""
    torch.cuda.set_device(0)
    model, weight = nn.Linear(12, 4).to(GPU), torch.rand(4, device=GPU)
    criterion = nn.CrossEntropyLoss(weight=weight.clone())
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    found, want = [], []
    with lockstep.Run(model, opt, lanes=1) as run:

        @run.capture
        def forward_backward(x: Tensor, y: Tensor) -> Tensor:
            loss = criterion(model(x), y)
            loss.backward()
            return loss

        for x, y in run.shard(dataset(160), global_batch=16):
            if run.step == 6:
                criterion.weight = torch.rand(4, device=GPU)
                kept = [torch.full((4,), 77.0, device=GPU) for _ in range(10_000)]
            found.append(forward_backward(x, y).item())
            want.append(F.cross_entropy(model(x.to(GPU)), y.to(GPU), weight).item())
            opt.step()
            opt.zero_grad()
        del kept
    return found[6:], want[6:], forward_backward.replays


def raise_error(x: Tensor) -> None:
    raise ValueError("of the user")


def wait_unseen_by_torch(x: Tensor) -> None:
    names = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart.so" in line]
    ctypes.CDLL(names[0]).cudaDeviceSynchronize()


def wait_for_an_event(x: Tensor) -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


FAILING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "event": wait_for_an_event,
    "query": lambda x: torch.cuda.current_stream().query(),
    "unseen": wait_unseen_by_torch,
    "raises": raise_error,
    "pageable": lambda x: torch.tensor([1.0, 2.0], device=GPU),
    "out of memory": lambda x: torch.empty(1 << 40, device=GPU),
}
MB = 1 << 20


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() // MB


def fail_four_times(body: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Record something, fail four times, and record again. Returns the reasons, what still works, and the memory in MB."""
    recorder = CudaGraphs(torch.device(GPU))
    ones, given, weight = (torch.ones(size, device=GPU) for size in (1000, 25 * MB, (512, 512)))  # given: 100 MB
    torch.cuda.manual_seed(7)
    expected = F.dropout(ones, 0.5)
    older = recorder.record(lambda: [F.dropout(ones, 0.5)])
    memory = [reserved()]

    def failing() -> list[Tensor | None]:
        kept = [given * k for k in range(3)]
        F.dropout(ones, 0.5)
        weight @ weight
        body(kept[1])
        return [*kept]

    reasons = []
    for _ in range(4):
        try:
            recorder.record(failing).close()
            reasons.append("recorded")
        except CannotRecord as error:
            reasons.append(str(error))
        memory.append(reserved())
    newer = recorder.record(lambda: [F.dropout(ones, 0.5), weight @ weight])
    is_right = []
    for recording in (older, newer, older):
        torch.cuda.manual_seed(7)
        recording.replay()
        assert recording.results[0] is not None
        is_right.append(torch.equal(recording.results[0], expected))
    torch.cuda.manual_seed(7)
    is_right.append(torch.equal(F.dropout(ones, 0.5), expected))
    pinned = torch.ones(1000).pin_memory().to(GPU, non_blocking=True).sum().item()
    older.close()
    newer.close()
    recorder.record(lambda: [F.dropout(ones, 0.5)]).close()  # after the end of all pools
    memory.append(reserved())
    return {
        "reasons": reasons,
        "is_right": [*is_right, pinned == 1000],
        "generator": recorder.generator,
        "memory": memory,
    }


def failed_recordings(rank: int, size: int) -> dict[str, Any]:
    torch.cuda.set_device(0)
    found: dict[str, Any] = {}
    for name, body in FAILING.items():
        try:
            found[name] = fail_four_times(body)
        except Exception as error:  # noqa: BLE001 - one failure must not hide the rest
            found[name] = f"{type(error).__name__}: {error}"
    return found


@unittest.skipUnless(torch.cuda.is_available(), "needs an NVIDIA GPU")
class Captured(unittest.TestCase):
    def test_a_captured_loop_has_the_bits_of_the_loop(self) -> None:
        for lanes in (1, 4):
            (results,) = run_workers(every_job, 1, lanes, deadline_s=120)
            for name, (loop, captured) in results.items():
                with self.subTest(f"{name}, {lanes} lanes: {captured}"):
                    self.assertEqual(captured.digest, loop.digest)
                    self.assertGreater(min(captured.replays.values()), 0)

    def compare_with_one(self, carrier: str, sizes: Sequence[int]) -> None:
        (alone,) = run_workers(every_job, 1, 4, deadline_s=120)
        for size in sizes:
            for results in run_workers(every_job, size, 4, deadline_s=180, env={"LOCKSTEP_COMM": carrier}):
                for name, (_, captured) in results.items():
                    with self.subTest(f"{name} on {size}: {captured}"):
                        self.assertEqual(captured.digest, alone[name][0].digest)
                        self.assertGreater(min(captured.replays.values()), 0)

    def test_workers_over_gloo_have_the_bits_of_one(self) -> None:
        self.compare_with_one("gloo", (2, 4))

    def test_workers_over_nccl_have_the_bits_of_one(self) -> None:
        if reason := why_no_nccl(2):
            self.skipTest(reason)
        self.compare_with_one("nccl", sizes_over_nccl())

    def survive_a_kill(self, carrier: str, gap: str) -> None:
        with tempfile.TemporaryDirectory(prefix="lockstep-captured-", ignore_cleanup_errors=True) as folder:
            env = {"LOCKSTEP_COMM": carrier, **(shared_gpu.environment() if carrier == "nccl" else {})}
            want = CapturedRun(Path(folder, "plain"), 0, captured=False, device="cuda").result()
            run = CapturedRun(Path(folder, "run"), 3, captured=True, env=env, device="cuda", die_in=gap, hold_at=40)
            try:
                require_survival(run, want)
            finally:
                run.stop()

    def test_a_worker_killed_before_a_replay_costs_nothing_over_gloo(self) -> None:
        self.survive_a_kill("gloo", "replay")

    def test_a_worker_killed_before_a_replay_or_with_averages_costs_nothing_over_nccl(self) -> None:
        if reason := why_no_nccl(3):
            self.skipTest(reason)
        for gap in ("replay", "averaged"):
            with self.subTest(gap):
                self.survive_a_kill("nccl", gap)

    def test_memory_that_is_read_through_an_attribute_is_not_used_again(self) -> None:
        ((found, want, replays),) = run_workers(replaced_attribute, 1, deadline_s=60)
        self.assertEqual(found, want)
        self.assertGreater(replays, 0)

    def test_what_cannot_be_captured_runs_as_it_is_and_one_line_says_why(self) -> None:
        (found,) = run_workers(what_cannot_be_captured, 1, deadline_s=120)
        for name, words in {
            "waiting": ["waits for the GPU", "test_capture.py", "loss.item()"],
            "waiting_unseen": ["test_capture.py", "torch.cuda.synchronize()"],
            "drawing_on_the_host": ["random"],
        }.items():
            replays, reasons, printed, is_equal = found[name]
            with self.subTest(f"{name}: {reasons}"):
                self.assertEqual((replays, len(reasons), is_equal), (0, 1, True))
                self.assertEqual(printed.count("\n"), 1)
                for word in words:
                    self.assertIn(word, printed)
        replays, reasons, printed, is_equal = found["plain"]
        self.assertEqual((reasons, printed, is_equal), ([], "", True))
        self.assertGreater(replays, 0)

    def test_recordings_that_fail_leave_older_and_newer_ones_right_and_keep_no_memory(self) -> None:
        (found,) = run_workers(failed_recordings, 1, deadline_s=60)
        for name, result in found.items():
            with self.subTest(f"{name}: {result}"):
                self.assertEqual(len({reason[:40] for reason in result["reasons"]}), 1, "each time for the same reason")
                self.assertNotIn("recorded", result["reasons"])
                if name != "unseen":
                    self.assertIn("(test_capture.py:", result["reasons"][0])
                self.assertEqual((result["is_right"], result["generator"]), ([True] * 5, 0))
                before, first, *_, fourth, closed = result["memory"]
                self.assertLessEqual(fourth, first + 8, "only the first one shares the pool of an older recording")
                self.assertLessEqual(closed, before + 8)

    def test_the_memory_of_dropped_captures_is_used_again(self) -> None:
        ((reserved, kept, made),) = run_workers(memory_of_shapes, 1, deadline_s=120)
        self.assertEqual(kept, 2)
        self.assertGreater(made, 2)
        self.assertLessEqual(reserved[-1], reserved[0] * 1.1 + (4 << 20), reserved)


if __name__ == "__main__":
    unittest.main()
