"""Move the bytes of a plan, resume, verify and compare: executor, journal, unit records, read-back.

Imports all packages below it, formats for reading results back; imported by `api`, `virtual` and `cli`.
"""
