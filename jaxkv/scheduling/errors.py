"""Errors that mean a bug in the engine, never a bad request: the books do not balance, or a step cannot go on."""

from __future__ import annotations

from jaxkv.core.errors import JaxkvError


class LedgerError(JaxkvError, RuntimeError):
    """A block operation that the block's state forbids, or books that do not balance."""


class SchedulerError(JaxkvError, RuntimeError):
    """A step that makes no progress, or a result that belongs to no plan. The message names the state."""
