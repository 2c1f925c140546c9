"""Fine-tune with the Hugging Face Trainer, and resume from its last checkpoint at the same number of ranks.

torchrun --nproc-per-node 2 examples/huggingface_trainer/plain.py --backend fsdp2
"""

import os

from task import LossLog, Text, arguments, build_model, parse
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint


def main() -> None:
    options = parse()
    args = arguments(options)
    trainer = Trainer(
        model=build_model(options),
        args=args,
        train_dataset=Text(options.samples),
        callbacks=[LossLog()],
    )
    last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
