"""Adapters of other libraries for the judge: functions that write a short text."""
