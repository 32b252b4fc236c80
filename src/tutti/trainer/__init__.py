"""The trainer: the Job, and the loop that trains a model by a plan.

- `job.py`: the public Job; `job_context.py`, `prepare.py`: from a script's arguments to a Run (`run_state.py`).
- `step.py`: one step's forward and backward. Gradients are all-reduced during backward by parallel/data/replicate.py,
  or reduce-scattered by parallel/sharding.
- `update.py`: clipping, optimizer step and learning rate; warm-up and batch-size rules are in optim/learning_rate.py.
- `finite_gradients.py`: the check for gradients that are not finite; autocast and loss scaling are in
  parallel/mixed_precision.py.
- `evaluate.py`: evaluation of every sample exactly once.
- `epoch_loop.py`: the loop over epochs, and how ranks agree to stop it; `callbacks.py`: the user's callbacks.
- `metrics.py`, `metrics_rows.py`, `run_header.py`, `run_start.py`, `run_end.py`: what a run writes; `loggers.py`: where
  its numbers go besides; `step_profile.py`: a profile of some steps.
- `metric_objects.py`: metrics with a state of their own.
- `whole_weights.py`: whole weights out of a divided model (job.state_dict, job.whole_model).
- `operation_watch.py`: names ranks that wait for each other in different methods of the Job.
- `deferred_init.py`: building a model without memory (job.build).
- `observer.py`, `capture.py`: how verification and planning look into a script.
"""
