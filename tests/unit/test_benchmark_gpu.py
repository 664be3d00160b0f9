"""benchmarks.gpu: how rounds adapt, what meets a goal, and what the tables say. No process is started."""

from __future__ import annotations

import os
import shlex
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import spares
from benchmarks.figures import Result
from benchmarks.gpu import measuring, tables
from benchmarks.gpu.__main__ import command, not_asked_for, parse
from benchmarks.gpu.goals import Goal, goals, summary
from benchmarks.gpu.models import CNN, GPU_CASES, TINY_CASES
from benchmarks.gpu.variants import VARIANTS, variants_for

from tests import chaos_gpu, shared_gpu


def row(ranks: int = 1, large: bool = False, launch_bound: bool = False, **ms: float) -> dict[str, Any]:
    """A row of results in which each variant takes so many ms and as many MB."""
    names = {
        "bare": "bare",
        "torch": "torch DDP",
        "ddp": "Lockstep DDP",
        "bare_d": "bare, deterministic",
        "floor": "bare captured, deterministic",
        "torch_d": "torch DDP, deterministic",
        "run": "Lockstep Run",
        "captured": "Lockstep Run captured",
    }
    took = {"bare": 10, "torch": 11, "ddp": 10, "bare_d": 20, "floor": 2, "torch_d": 22, "run": 20, "captured": 2, **ms}
    return {
        "key": "k",
        "case": "a step",
        "ranks": ranks,
        "backend": "nccl",
        "shares_gpu": ranks > 1,
        "large": large,
        "launch_bound": launch_bound,
        "nccl": "2.30.7",
        "gpu": "a GPU",
        "complete": True,
        "variants": {
            names[key]: dict.fromkeys(("ms", "p25_ms", "p75_ms", "wall_ms", "peak_mb"), value) for key, value in took.items()
        },
    }


def verdict(found: dict[str, Any], what: str) -> bool | None:
    (goal,) = [goal for goal in goals([found]) if goal.what == what]
    return goal.is_met


def test_a_turn_lasts_about_as_long_for_every_variant() -> None:
    assert measuring.steps_of_turn(0.025) == 6
    assert measuring.steps_of_turn(0.005) == 30
    assert measuring.steps_of_turn(1.0) == measuring.LEAST_STEPS
    assert measuring.steps_of_turn(0.0) == measuring.MOST_STEPS


def test_rounds_fill_the_time_but_are_never_too_few_or_too_many() -> None:
    assert measuring.has_time(rounds=5, now=10.0, round_s=1.0, until=11.0)
    assert not measuring.has_time(rounds=5, now=10.0, round_s=1.1, until=11.0)
    assert measuring.has_time(rounds=measuring.LEAST_ROUNDS - 1, now=99.0, round_s=1.0, until=11.0)
    assert not measuring.has_time(rounds=measuring.MOST_ROUNDS, now=0.0, round_s=1.0, until=11.0)


def test_what_one_case_leaves_is_shared_by_the_next() -> None:
    assert measuring.share_of(100, 0, 4) == 25
    assert measuring.share_of(85, 1, 4) == pytest.approx(85 / 3)
    assert measuring.share_of(30, 3, 4) == 30


def test_every_variant_comes_first_equally_often() -> None:
    orders = [measuring.rotated(["a", "b", "c"], number) for number in range(6)]
    assert [order[0] for order in orders] == ["a", "b", "c", "a", "b", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_a_summary_has_medians_and_quartiles_in_milliseconds() -> None:
    found = measuring.summary([(0.003, 0.004), (0.001, 0.002), (0.002, 0.003)], steps=7)
    assert found == {
        "ms": pytest.approx(2.0),
        "p25_ms": pytest.approx(1.5),
        "p75_ms": pytest.approx(2.5),
        "wall_ms": pytest.approx(3.0),
        "turns": 3,
        "steps_per_turn": 7,
    }


def test_an_eager_step_may_take_as_long_as_that_of_torch_ddp() -> None:
    assert verdict(row(ddp=11), "Lockstep DDP / torch DDP") is True
    assert verdict(row(ddp=11.04), "Lockstep DDP / torch DDP") is True  # 1.00 as printed
    assert verdict(row(ddp=11.2), "Lockstep DDP / torch DDP") is False
    assert verdict(row(run=23), "Lockstep Run / torch DDP, deterministic") is False


def test_only_a_large_batch_on_one_rank_is_compared_with_the_bare_step() -> None:
    assert verdict(row(large=True, ddp=10.1), "Lockstep DDP / bare") is True
    assert verdict(row(large=True, ddp=10.2), "Lockstep DDP / bare") is False
    for other in (row(large=False), row(large=True, ranks=2)):
        assert not [goal for goal in goals([other]) if goal.what == "Lockstep DDP / bare"]


def test_a_captured_step_is_compared_with_the_captured_bare_step_and_if_launch_bound_with_torch_ddp() -> None:
    floor, faster = "Lockstep Run captured / bare captured, deterministic", "torch DDP, deterministic / Lockstep Run captured"
    assert verdict(row(captured=2.1), floor) is True
    assert verdict(row(captured=2.2), floor) is False
    assert verdict(row(launch_bound=True, captured=5.5), faster) is True
    assert verdict(row(launch_bound=True, captured=5.6), faster) is False
    assert not [goal for goal in goals([row(ranks=2, launch_bound=True)]) if goal.what in (floor, faster)]


def test_peak_memory_may_be_that_of_torch_ddp() -> None:
    what = "peak memory of Lockstep DDP, torch DDP being the limit"
    assert verdict(row(ddp=11), what) is True
    assert verdict(row(ddp=12), what) is False


def test_memory_that_the_group_of_torch_keeps_until_its_next_collectives_is_not_that_of_a_variant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocated, mb = [485, 1000], 2**20  # what an earlier variant has left, and what lives
    fakes: dict[str, Callable[[], Any]] = {
        "memory_allocated": lambda: sum(allocated) * mb,
        "max_memory_allocated": lambda: sum(allocated) * mb,
        "memory_snapshot": list,
        **dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats"), lambda: None),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    seen = iter([False, True])  # by the thread of the group

    def all_reduce(tensor: torch.Tensor) -> None:
        if next(seen, False):
            allocated[0] = 0

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    memory = measuring.PeakMemory(types.SimpleNamespace(is_cuda=True, device=torch.device("cpu")))  # type: ignore[arg-type]
    allocated.append(582)
    assert memory.measure(iter([None] * 3)) == 582


def test_the_command_of_a_result_is_the_one_that_was_typed() -> None:
    for text in (
        "python -m benchmarks.gpu --cpu-check --ranks 1 --seconds 90",
        "python -m benchmarks.gpu --cpu-check --ranks 1,8 --cases gpt-large,cnn --backend gloo --name other --seconds 600",
        "python -m benchmarks.gpu --cpu-check --variants 'bare;torch DDP, deterministic' --seconds 230",
    ):
        assert command(parse(shlex.split(text)[3:])) == text


def test_what_an_option_leaves_out_is_missing_from_the_results() -> None:
    options = parse(["--cpu-check", "--ranks", "1", "--cases", "gpt-large,gpt-small,narrow"])
    assert not_asked_for(options) == [
        ("2 ranks over nccl", "left out by --ranks 1"),
        ("cnn", "left out by --cases gpt-large,gpt-small,narrow"),
    ]
    assert not_asked_for(parse(["--cpu-check", "--ranks", "1,2,8"])) == []


def test_a_step_is_measured_as_under_lockstep_run_if_there_are_other_ranks() -> None:
    confirmed = {variant.name for variant in VARIANTS if variant.confirms}
    assert confirmed == {"Lockstep Run, confirmed", "Lockstep Run captured, confirmed"}
    assert confirmed <= {variant.name for variant in variants_for(2)}
    assert not confirmed & {variant.name for variant in variants_for(1)}


def test_a_figure_that_is_missing_makes_a_goal_neither_met_nor_missed() -> None:
    found = row()
    found["variants"]["Lockstep Run captured"] = {"skipped": "this Lockstep has no run.capture"}
    assert verdict(found, "Lockstep Run captured / bare captured, deterministic") is None
    assert "could not be measured" in summary(goals([found]))


def test_the_table_has_ratios_of_equal_kernels_and_the_remarks_say_each_reason_once() -> None:
    first, second = row(), row(ranks=2)
    for each in (first, second):
        each["variants"]["torch DDP"] = {"error": "RuntimeError: out of `memory`"}
    text = tables.text([first, second], [("8 ranks over nccl", "8 NCCL ranks need 8 GPUs")])
    assert "| a step | 1 | Lockstep Run | 20.00 (20.00-20.00) | 20.00 | 1.000 | 0.909 | - | 20 |" in text
    assert "| a step | 1 | Lockstep Run captured | 2.00 (2.00-2.00) | 2.00 | 0.100 | 0.091 | 1.000 | 2 |" in text
    assert "| a step | 1 | Lockstep DDP | 10.00 (10.00-10.00) | 10.00 | 1.000 | - | - | 10 |" in text
    assert "- failed: torch DDP: `RuntimeError: out of memory`. a step (1 rank); a step (2 ranks)" in text
    assert "- not measured: 8 NCCL ranks need 8 GPUs. 8 ranks over nccl" in text
    assert "2 ranks share one GPU, over NCCL 2.30.7" in text


def test_goals_that_were_missed_come_first() -> None:
    lines = tables.goal_table(goals([row(ddp=15), row(ranks=2)])).splitlines()
    verdicts = [line.split("|")[-2].strip() for line in lines[4:]]
    assert verdicts == sorted(verdicts, key=["**missed**", "not measured", "met"].index)
    assert verdicts[0] == "**missed**"


def test_figures_can_quote_the_table(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.figures.RESULTS", tmp_path)
    (tmp_path / "gpu.md").write_text(tables.text([row(), row(ranks=2, run=33)], []))
    result = Result("gpu")
    assert result.cell("ms (quartiles)", "a step", "1", "Lockstep Run") == "20.00"
    assert result.cell("ms (quartiles)", "a step", "2", "Lockstep Run") == "33.00"


def test_a_goal_with_a_unit_is_compared_without_decimals() -> None:
    goal = Goal("memory", "a step", 1, 8780.2, 8780.0, unit=" MB")
    assert goal.is_met is True
    assert (goal.measured_text, goal.limit_text) == ("8780 MB", "at most 8780 MB")


def test_tiny_cases_stand_for_the_real_ones_and_names_are_unique() -> None:
    assert [case.key for case in TINY_CASES] == [case.key for case in GPU_CASES]
    assert len({case.name for case in GPU_CASES}) == len(GPU_CASES)
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    assert {variant.name for variant in VARIANTS} - {variant.name for variant in variants_for(2)} == {
        "bare captured",
        "bare captured, deterministic",
    }


def test_the_cnn_has_the_size_of_resnet_50() -> None:
    with torch.device("meta"):
        model = CNN((3, 4, 6, 3), 64, 1000)
    assert 25e6 < sum(param.numel() for param in model.parameters()) < 26e6
    assert sum(isinstance(module, torch.nn.Conv2d) for module in model.modules()) == 54  # one in the place of max pooling


def test_several_ranks_on_one_gpu_need_a_library(tmp_path: Any) -> None:
    library = tmp_path / "libnccl.so.2"
    library.touch()
    given = {"LOCKSTEP_NCCL_LIB": str(library), "LD_PRELOAD": "other.so"}
    assert shared_gpu.environment({}) == {}
    assert shared_gpu.environment(given)["LD_PRELOAD"] == f"{library}:other.so"
    assert shared_gpu.why_no_nccl(2, 2, {}) is None
    assert shared_gpu.why_no_nccl(4, 1, given) is None
    assert "LOCKSTEP_NCCL_LIB" in str(shared_gpu.why_no_nccl(4, 1, {}))
    assert shared_gpu.why_no_nccl(1, 0, given) == "there is no NVIDIA GPU"
    with pytest.raises(FileNotFoundError, match="is not a file"):
        shared_gpu.environment({"LOCKSTEP_NCCL_LIB": str(tmp_path / "missing.so")})


def test_a_schedule_of_faults_has_no_more_ranks_than_can_meet_over_nccl() -> None:
    assert [chaos_gpu.largest_over_nccl(4, gpus, {}) for gpus in (2, 3, 4, 8)] == [2, 3, 4, 4]
    assert chaos_gpu.largest_over_nccl(4, 1, {shared_gpu.VARIABLE: "/a/library"}) == 4
    with pytest.raises(SystemExit, match="need 2 GPUs"):
        chaos_gpu.largest_over_nccl(4, 1, {})


def test_the_worker_that_is_killed_has_the_gpu_of_the_spare(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    members, spare = {101: "cuda:0", 102: "cuda:1"}, os.getpid()
    ended.wait()
    for pid, device in {**members, ended.pid: "cuda:0"}.items():
        (tmp_path / f"device-{pid}").write_text(device)
        (tmp_path / str(pid)).write_text("1.0 0\n" if pid in members else "")
    assert spares.replaceable(tmp_path, members) == [101, 102], "without a spare it may be any worker"
    (tmp_path / f"device-{spare}").write_text("cuda:1")
    (tmp_path / str(spare)).touch()
    assert spares.replaceable(tmp_path, members) == [102]
