"""Kubernetes operator for `ElasticTrainingJob`: it observes the cluster, decides, and applies the decisions."""
