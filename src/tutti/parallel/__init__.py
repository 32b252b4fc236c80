"""Parallelism: what each rank holds and computes of one model, and how the parts are combined.

One package for each kind of parallelism, by the axis of the mesh:

- `data/` (replicate): `replicate.py` puts gradients into buckets while backward runs, `buckets.py` all-reduces them,
  `bucket_size_tuner.py` measures bucket sizes; `batchnorm.py` has statistics over ranks, `noise_meter.py` measures the
  gradient noise scale.
- `sharding/` (shard): ZeRO; `optimizer_state_sharding.py` is level 1, `parameter_sharding.py` levels 2 and 3.
- `tensor/` (split): `tensor_plan.py` decides how layers are divided, `apply_tensor_parallel.py` divides them.
- `pipeline/` (stage): `stage_building.py` cuts the model, `pipeline_runner.py` runs the schedule.
- `context/` (context): `context_parallel.py` cuts sequences, `ring_attention.py` attends over all of them.
- `expert/` (expert): `expert_parallel.py` divides the experts and exchanges tokens.
- `embedding/` (table): `apply_table_parallel.py` divides tables and wide layers.
- `spatial/` (space): `apply_spatial_parallel.py` divides samples, `halo_exchange.py` exchanges halos.
- `compressed/` (sync.compress): gradient reductions that a codec encodes; the codecs are in tutti/compression.

Used by all of them:

- `parallelize.py`: applies a plan's mechanisms in a fixed order; `parallel_model.py`: the result.
- `mesh.py`: ranks as a grid, and process groups; `layout.py`: this rank's part of every tensor.
- `whole_model.py`: the whole model out of all ranks' parts; `part_guards.py`: refusals to take a part for the whole.
- `losses.py`: a batch becomes a call of the model and a loss; `loss_means.py`: the counts of means in torch's losses.
- `mixed_precision.py`: autocast and loss scaling.
- `divided_tensor.py`: the base of divided activations; `all_to_all.py`: exchanges of rows, with gradients.
- `recompute.py`: recompute and chunks; `sharded_norms.py`: norms of divided tensors, for LARS and LAMB.
- `saved_values.py`: optimizer scalars as plain values.

Before training:

- `annotated_plan.py`: the script's annotations and a plan become one plan.
- `preview.py`: where a plan puts each module (`tutti plan --explain`).
- `capabilities.py`: how each module can be divided, for the planner.
"""
