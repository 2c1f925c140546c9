"""Errors of the test bed."""

from __future__ import annotations


class TestbedError(Exception):
    """Base class; the message says what is wrong and what to do."""

    __test__ = False


class CannotRunHereError(TestbedError):
    """This machine cannot hold a test bed; use kind or any other cluster instead."""


class TimedOutError(TestbedError):
    """An expected event did not happen in time."""
