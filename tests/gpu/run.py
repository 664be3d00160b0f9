"""Runs the GPU tests from the source tree with the interpreter's own packages: PYTHONPATH=src:. python tests/gpu/run.py"""

import sys
import unittest

if __name__ == "__main__":
    suite = unittest.defaultTestLoader.loadTestsFromNames(
        ["tests.gpu.test_gpu", "tests.gpu.test_lanes", "tests.gpu.test_checkpoint"]
    )
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    sys.exit(0 if result.wasSuccessful() else 1)
