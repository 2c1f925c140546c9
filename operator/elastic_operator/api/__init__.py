"""The resource as data: spec, status, conditions, and what pods report.

Strict readers turn plain mappings into frozen data. Pure: no I/O, no clock. Imports only pydantic, `reshard.contract`,
`reshard.topology` and `reshard.errors`; everything else in the operator may import it.
"""
