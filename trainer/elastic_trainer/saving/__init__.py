"""Asynchronous saves: the framework saves into a node-local folder, and a process per node copies that to the volume.

`asynchronous` is what the session calls; `copy_process` runs beside the training. `refusals` reads the first commit as
the resharder does. No module imports a framework.
"""
