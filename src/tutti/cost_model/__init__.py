"""Pure cost functions: what a plan costs on a cluster. No torch, no clock, no files.

- `step_time.py`: `predict`, which puts the rest together; `step_timeline.py`: a step of one pipeline replica;
  `rank_tracks.py`: the same as a picture.
- Model: `module_costs.py` (columns by module), `compute_cost.py` (operators), `work_division.py` (a rank's part of each
  module), `stage_cuts.py` (pipeline stages).
- Machines: `rank_placement.py` (where ranks run), `worker_speed.py` (rates of a rank), `group_links.py` (links of a
  group and its collectives).
- Communication: `microbatch_cost.py` (within passes), `gradient_sync_cost.py`, `sharding_cost.py`,
  `compressed_sync_cost.py`, `relaxed_sync_cost.py`; `overlap.py` hides it behind backward.
- `memory_cost.py`: what a rank holds; `loading_time.py`: samples; `pipeline_cost.py`: schedules.
- Bounds of many plans at once, from the same formulas: `plan_table.py` (plans as columns), `best_case.py` (best rates),
  `best_case_work.py`, `best_case_memory.py`, `plan_bounds.py`.
- `cost_constants.py`: numbers that nothing measures; `cost_notes.py`: what a prediction says of itself.
"""

from tutti.cost_model.step_time import predict

__all__ = ["predict"]
