"""Runs the GPU tests from the source tree with the interpreter's own packages.

    PYTHONPATH=src:. python tests/gpu/run.py                      all of them
    PYTHONPATH=src:. python tests/gpu/run.py -k OverNccl          those of several ranks over NCCL; -k is that of unittest

With several GPUs each rank has one of its own. With one GPU, LOCKSTEP_NCCL_LIB=/path/to/libnccl.so.2 (NCCL 2.30 or newer) lets
several ranks meet over NCCL on it; without it those tests are skipped.
"""

import sys
import unittest
from pathlib import Path

TESTS = [f"tests.gpu.{path.stem}" for path in sorted(Path(__file__).parent.glob("test_*.py"))]

if __name__ == "__main__":
    named = any(argument.startswith("tests.") for argument in sys.argv[1:])
    unittest.main(module=None, argv=[sys.argv[0], "-v", *sys.argv[1:], *([] if named else TESTS)])
