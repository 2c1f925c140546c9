"""Fine-tune with the Hugging Face Trainer as an elastic job, and resume from its commit at any number of ranks.

python -m elastic_trainer.launch --nproc 2 examples/huggingface_trainer/elastic.py --backend fsdp2
"""

from task import LossLog, Text, arguments, build_model, parse
from transformers import Trainer

from elastic_trainer.stacks.huggingface import ElasticCallback


def main() -> None:
    options = parse()
    args = arguments(options)
    elastic = ElasticCallback(args)
    trainer = Trainer(
        model=build_model(options),
        args=args,
        train_dataset=Text(options.samples),
        callbacks=[LossLog()],
    )
    trainer.train(resume_from_checkpoint=elastic.attach(trainer))


if __name__ == "__main__":
    main()
