"""Fine-tune with the Hugging Face Trainer, and resume from its last checkpoint at the same number of ranks.

torchrun --nproc-per-node 2 examples/huggingface_trainer/plain.py --backend fsdp2
"""

from pathlib import Path

from tiny_llama import Text, build_model
from trainer_task import LossLog, arguments, parse
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint


def main() -> None:
    options = parse()
    args = arguments(options)
    trainer = Trainer(
        model=build_model(dropout=options.dropout),
        args=args,
        train_dataset=Text(options.samples),
        callbacks=[LossLog()],
    )
    last = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
