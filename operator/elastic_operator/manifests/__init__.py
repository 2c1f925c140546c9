"""The desired objects of one attempt: training Job, reshard Job, Services, Leases and rights.

Pure builders, and the checks of what no job may ask for. Imports `api`; imported by everything above it.
"""
