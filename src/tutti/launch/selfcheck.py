"""Run as a module by ranks: checks that they meet and that an all-reduce is correct. Exits with 0 if so."""

from datetime import timedelta

from tutti.launch.launch_environment import place_and_rendezvous

if __name__ == "__main__":
    import torch
    import torch.distributed as dist

    rank, world_size, rendezvous, timeout_s = place_and_rendezvous()
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    if total.item() != world_size * (world_size - 1) / 2:
        raise SystemExit(f"rank {rank}: the all-reduce over {world_size} ranks gave a wrong sum, {total.item()}")
    dist.destroy_process_group()
