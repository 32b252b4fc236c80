"""Trains ResNet-50 on BigEarthNet, on any number of devices. train_torch.py is the same program in plain PyTorch.

    tutti run --nproc 4 examples/bigearthnet/train_tutti.py packed --epochs 90 --batch-size 512 --precision bfloat16

The rate is 0.1 for 256 samples and proportional to the batch, with 5 epochs of warm-up and a tenth after 30, 60 and 80
epochs. The validation split is evaluated between, the test split once, at the end.
"""

from torch import nn

import tutti
from network import F1
from shared_training import (
    datasets,
    lr_rule_of,
    make_model,
    make_optimizer,
    parse_arguments,
    recipe_of,
    shown,
    validates_after,
)


def main() -> None:
    args = parse_arguments(__doc__)
    recipe = recipe_of(args)
    train, validation, test = datasets(args)
    facts = {"data.native_shape": "12×120×120", "preprocess.timed": "false", **dict(f.split("=", 1) for f in args.fact)}
    if train.generated:
        facts["data.start_state"] = "generated"
    job = tutti.Job(
        global_batch_size=args.batch_size,
        seed=args.seed,
        precision=args.precision,
        lr_rule=lr_rule_of(args),
        facts=facts,
    )
    model = make_model(args)
    optimizer = make_optimizer(args, model)
    loss_fn = nn.BCEWithLogitsLoss()
    model, optimizer, loader = job.prepare(
        model,
        optimizer,
        train,
        loss_fn,
        scheduler=recipe.scheduler(optimizer),
        scheduler_clock="epoch",
        num_workers=args.workers,
    )

    for epoch in job.epochs(args.epochs):
        for batch in loader:
            job.step(batch)
        if validates_after(args, epoch):
            values = job.evaluate(validation, whole=F1, name="validation")
            job.print(f"epoch {epoch}: validation {shown(values)}")
    if not args.tuning:
        job.print(f"test {shown(job.evaluate(test, whole=F1, name='test'))}")


if __name__ == "__main__":
    main()
