"""benchmarks.gpu on the CPU: it runs as a whole, and a variant that fails does not lose the others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.gpu.supervisor import Configuration, measure

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_command_measures_every_variant_and_writes_its_results(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--cpu-check", "--cases", "narrow,cnn", "--ranks", "1", "--seconds", "45"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "BENCHMARK_RESULTS": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "gpu.md").read_text()
    for case in ("6 layers of 16, 1x8", "tiny CNN, 4x32x32"):
        for variant in ("bare", "torch DDP", "Lockstep DDP", "bare, deterministic", "torch DDP, deterministic", "Lockstep Run"):
            assert f"| {case} | 1 | {variant} |" in page, done.stdout + done.stderr
    assert "CUDA graphs need a GPU" in page
    assert "failed" not in page, page


@pytest.mark.slow
def test_variants_that_raise_or_die_are_left_out_and_the_others_measured() -> None:
    config = Configuration(2, "cpu", "gloo", ["narrow"], [], worker="tests.failing_benchmark")
    found = measure(config, 0, time.time() + 100)
    assert not found.missing
    variants = found.rows["narrow"]["variants"]
    assert found.rows["narrow"]["complete"]
    assert variants["torch DDP"] == {"error": "RuntimeError: a planted failure"}
    assert variants["Lockstep DDP"] == {"error": "rank 0 ended with exit code -9, warming up"}
    assert all(variants[name]["ms"] > 0 for name in ("bare", "bare, deterministic"))


@pytest.mark.slow
def test_a_lone_rank_goes_on_without_a_variant_that_raises() -> None:
    config = Configuration(1, "cpu", "gloo", ["narrow"], ["bare", "torch DDP"], worker="tests.failing_benchmark")
    found = measure(config, 0, time.time() + 30)
    variants = found.rows["narrow"]["variants"]
    assert variants["torch DDP"]["error"] == "RuntimeError: a planted failure"
    assert variants["bare"]["ms"] > 0


@pytest.mark.slow
def test_a_step_can_be_measured_with_the_waits_of_a_run_that_recovers() -> None:
    names = ["Lockstep Run, confirmed", "Lockstep Run captured, confirmed"]
    found = measure(Configuration(2, "cpu", "gloo", ["narrow"], names), 0, time.time() + 60)
    variants = found.rows["narrow"]["variants"]
    assert list(variants) == names
    assert all(each.get("ms", 0) > 0 for each in variants.values()), variants
