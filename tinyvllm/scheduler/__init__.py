"""Which sequences run in the next step, with how many tokens, in which blocks. Integers and times only: no text, no tensors."""

from tinyvllm.scheduler.rates import Rates
from tinyvllm.scheduler.schedule import Schedule, Scheduled, SchedulerLimits
from tinyvllm.scheduler.scheduler import Scheduler

__all__ = ["Rates", "Schedule", "Scheduled", "Scheduler", "SchedulerLimits"]
