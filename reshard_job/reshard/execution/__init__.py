"""Move the bytes of a plan, resume conversions, verify and compare checkpoints.

Imports all packages below it, formats for reading results back; imported by `api`, `virtual` and `cli`.
"""
