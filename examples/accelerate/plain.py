"""Train with Accelerate and an own loop, and resume from the last checkpoint at the same number of ranks.

torchrun --nproc-per-node 2 examples/accelerate/plain.py --backend fsdp2
"""

import torch
from loop_task import LossLog, Text, build_accelerator, build_model, parse, resume
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

WARMUP_STEPS = 4


def main() -> None:
    options = parse()
    accelerator = build_accelerator(options)
    loader = DataLoader(Text(options.samples), batch_size=options.micro_batch, shuffle=True)
    model = build_model(dropout=options.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ranks = accelerator.num_processes  # accelerate steps a schedule once per rank and optimizer step
    num_steps = options.epochs * len(loader) // (accelerator.gradient_accumulation_steps * ranks)
    scheduler = get_linear_schedule_with_warmup(optimizer, WARMUP_STEPS * ranks, num_steps * ranks)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    log = LossLog(accelerator)
    step = resume(accelerator, options.output)
    first_epoch, num_done = divmod(step * accelerator.gradient_accumulation_steps, len(loader))
    for epoch in range(first_epoch, options.epochs):
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, num_done):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            log.add(loss)
            if accelerator.sync_gradients:
                step += 1
                log.write(step, scheduler.get_last_lr()[0])
                if step % options.save_every == 0:
                    accelerator.save_state(f"{options.output}/step-{step}")
        num_done = 0
    accelerator.end_training()


if __name__ == "__main__":
    main()
