"""What the test bed says when it cannot do what was asked."""

from __future__ import annotations


class TestbedError(Exception):
    """Base: the message says what is wrong and what to do."""

    __test__ = False


class CannotRunHereError(TestbedError):
    """This machine cannot hold a test bed; use kind or any other cluster instead."""


class TimedOutError(TestbedError):
    """Something that should have happened did not."""
