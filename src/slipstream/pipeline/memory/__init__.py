"""Measures what a rank holds, and keeps schedules within a memory limit."""
