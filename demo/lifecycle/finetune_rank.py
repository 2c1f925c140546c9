"""One rank of the fine-tuning: the Hugging Face Trainer with DeepSpeed, made elastic. Arguments: model, steps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from demo.lifecycle.texts import Documentation
from elastic_trainer.stacks.huggingface import ElasticCallback

SEED = 5
GLOBAL_BATCH, MICRO_BATCH = 16, 2


class LossLog(TrainerCallback):  # type: ignore[misc]
    """Writes step, samples and training loss of every step to a file."""

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and logs and "loss" in logs:
            record = {"step": state.global_step, "samples": state.global_step * GLOBAL_BATCH, "loss": logs["loss"]}
            with open(Path(os.environ["ETJ_CHECKPOINT_ROOT"]) / "losses.jsonl", "a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")


def main() -> None:
    model, steps = sys.argv[1], int(sys.argv[2])
    ranks = int(os.environ["WORLD_SIZE"])
    args = TrainingArguments(
        output_dir=str(Path(model).parent / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=GLOBAL_BATCH // MICRO_BATCH // ranks,
        learning_rate=5e-4,
        logging_steps=1,
        save_steps=steps,
        seed=SEED,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        deepspeed={
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": 1},
        },
    )
    elastic = ElasticCallback(args)
    trainer = Trainer(
        model=LlamaForCausalLM.from_pretrained(model), args=args, train_dataset=Documentation(), callbacks=[LossLog()]
    )
    trainer.train(resume_from_checkpoint=elastic.attach(trainer))


if __name__ == "__main__":
    main()
