"""The engine: schedule, run, commit."""
