"""Evaluation: tasks with their graders, runs that survive a crash, scores with intervals, reports."""
