"""Convert training checkpoints between parallelism topologies: index, plan, check, execute, verify."""
