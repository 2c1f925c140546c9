"""The `.pt` container of torch.save: a zip archive of one pickle and one raw entry per tensor storage.

The package needs no torch: `reader` returns the object tree with tensors as byte ranges, and `writer` lays out a file
in which all bytes but the tensor payloads are known. Source of the format: torch 2.13,
caffe2/serialize/inline_container.cc, torch/serialization.py and torch/_utils.py.
"""
