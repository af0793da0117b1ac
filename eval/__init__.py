"""Scores a finished or running run."""
