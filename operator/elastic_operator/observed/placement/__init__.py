"""Where the scheduler would place a pod: what it requests, which nodes admit it, how the pods of a job may be spread.

Pure. Imports `observed.observation`; imported by the modules of `observed` that count capacity, and by `reconcile`.
"""
