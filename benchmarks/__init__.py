"""Measurements beside what a user would use instead, on the same files in one run, reported as ratios."""
