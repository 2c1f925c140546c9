"""What this process may use and how it ends: memory, processors, processes, open files, signals.

Imports only `errors` and `contract`; imported by everything that does I/O.
"""
