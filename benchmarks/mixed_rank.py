"""What each rank of the benchmark of unequal hosts runs: `probe`, or `steps` of plan_rank.py, on a slower processor
where its rank is among those of --slow."""

import os
import sys
from pathlib import Path

SLOWER = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""Read by MKL and oneDNN when a process computes its first product and convolution."""


def main() -> None:
    _, slow, what, *words = sys.argv[1:]
    if os.environ["RANK"] in slow.split(","):
        os.environ.update(SLOWER)
    if what == "probe":
        from tutti.cli.main import main as command

        sys.argv = ["tutti", "probe", *words]
        command()
    else:
        sys.path.insert(0, str(Path(__file__).parent))
        import plan_rank

        sys.argv = ["plan_rank.py", *words]
        plan_rank.main()


if __name__ == "__main__":
    main()
