"""The whole story on real parts: train, lose a node, reshard, resume, grow back, compare with an undisturbed run."""
