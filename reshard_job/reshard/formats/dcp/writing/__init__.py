"""Lay out a DCP checkpoint for unmodified `torch.distributed.checkpoint.load`.

Imports the reading side in `formats.dcp`; imported by the format's entry in the registry and by `formats.megatron`.
"""
