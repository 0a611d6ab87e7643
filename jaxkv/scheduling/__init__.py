"""Who runs in the next step, and on which KV blocks. Plain Python: no arrays, no text."""

from jaxkv.scheduling.blocks import BlockLedger
from jaxkv.scheduling.config import SchedulerConfig
from jaxkv.scheduling.errors import LedgerError, SchedulerError
from jaxkv.scheduling.plan import Entry, StepPlan
from jaxkv.scheduling.scheduler import Scheduler, SchedulerCounters
from jaxkv.scheduling.sequence import Sequence, SequenceStatus

__all__ = [
    "BlockLedger",
    "Entry",
    "LedgerError",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerCounters",
    "SchedulerError",
    "Sequence",
    "SequenceStatus",
    "StepPlan",
]
