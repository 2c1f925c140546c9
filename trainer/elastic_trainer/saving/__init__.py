"""Asynchronous saves: the framework saves into a node-local folder, and a process per node copies that to the volume.

`asynchronous` is what the session calls; `copy_process` runs beside the training. No module imports a framework.
"""
