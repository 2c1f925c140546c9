"""The `.pt` container of torch.save: a zip archive of one pickle and one raw entry per tensor storage.

Read and written without torch: `reader` yields the object tree with tensors as byte ranges, `writer` lays out a file
of which everything but the tensor payloads is known up front. Source of the format: torch 2.13,
caffe2/serialize/inline_container.cc, torch/serialization.py and torch/_utils.py.
"""
