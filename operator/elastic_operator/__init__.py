"""Kubernetes operator for `ElasticTrainingJob`: observe, decide, apply."""
