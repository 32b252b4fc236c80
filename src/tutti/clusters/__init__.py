"""Runs that a cluster's own scheduler starts: `tutti submit`, `status`, `logs`, `cancel` and `tutti run --on slurm`."""
