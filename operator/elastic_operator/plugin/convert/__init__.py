"""`kubectl etj convert`: makes an ElasticTrainingJob from a PyTorchJob, a TrainJob or a JobSet.

`documents` and `section` read files strictly; a module for each kind reads it as a `Workload`; `job` makes the
resource. What has no counterpart becomes a note, and what cannot be converted truly is refused. No cluster, no clock.
Imported by the other modules of the plugin; imports `api` and the plugin's own `errors` and `output`.
"""
