"""CRC-32 of byte ranges, digests of logical tensors, and the checksum that a small file states of itself.

Imports `errors` and `tensors`; imported by storage, commits and execution.
"""
