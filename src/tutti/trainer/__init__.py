"""The trainer: the Job, and the loop that trains a model by a plan.

- `job.py`: the public Job; `prepare.py`: model, loop and output of a run, in this order.
- `step.py`: one step's forward and backward. Gradients are all-reduced during backward by parallel/data/replicate.py,
  or reduce-scattered by parallel/sharding.
- `update.py`: clipping, optimizer step and learning rate; warm-up and batch-size rules are in optim/lr_rule.py.
- `precision.py`: autocast, loss scaling and the check for non-finite gradients.
- `metrics.py`, `metrics_rows.py`, `run_header.py`: what a run writes.
- `deferred_init.py`: building a model without memory (job.build).
"""
