"""Files on this machine and in object stores: reads of ranges, writes, and durable file names.

Imports `system`, `checksums` and `tensors`; imported by commits, planning, formats and execution.
"""
