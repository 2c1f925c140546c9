"""Fine-tune with the Hugging Face Trainer as an elastic job, and resume from its commit at any number of ranks.

python -m elastic_trainer.launch --nproc 2 examples/huggingface_trainer/elastic.py --backend fsdp2
"""

from tiny_llama import Text, build_model
from trainer_task import LossLog, arguments, parse
from transformers import Trainer

from elastic_trainer.stacks.huggingface import ElasticCallback


def main() -> None:
    options = parse()
    args = arguments(options)
    elastic = ElasticCallback(args)
    trainer = Trainer(
        model=build_model(dropout=options.dropout),
        args=args,
        train_dataset=Text(options.samples),
        callbacks=[LossLog()],
    )
    trainer.train(resume_from_checkpoint=elastic.attach(trainer))


if __name__ == "__main__":
    main()
