"""Resources of this process and its end: memory, processors, child processes, open files, signals.

Imports only `errors` and `contract`; imported by everything that does I/O.
"""
