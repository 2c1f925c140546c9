"""Files on this machine and in object stores: ranged reads, writes, and durable names.

Imports `system`, `checksums` and `tensors`; imported by commits, planning, formats and execution.
"""
