"""DeepSpeed files for a source that knows nothing of DeepSpeed, from a model description and a configuration.

`description` reads the file that `elastic_trainer.stacks.description` writes; `optimizer` says which states and
settings the configured optimizer keeps; `fit` compares source and description; `example` builds of them what `--like`
would name. Writers of DeepSpeed's formats import `example` alone.
"""
