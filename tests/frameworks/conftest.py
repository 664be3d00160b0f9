"""Fixtures of the tests with frameworks."""

from tests.process.conftest import launch

__all__ = ["launch"]
