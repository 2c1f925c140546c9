"""`make demo-lifecycle`: one model from its first step to the text that it writes, over three frameworks.

`__main__` runs the stages, each in processes of its own; `finetune_rank` and `measure` are what those processes run.
"""
