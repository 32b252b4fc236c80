"""Exchanges between ranks of one host through memory that they share, where a process group's own go through sockets.

A team is a process group's ranks, all of one host. They meet once, over their process group; from then on they signal
each other with semaphores in shared memory and read each other's tensors where they lie.
"""

from tutti.comm.channel import Letter, Receiving, Sending
from tutti.comm.host_sum import HostSum
from tutti.comm.meeting import Tiers, make_team, make_team_or_tiers
from tutti.comm.pairs import all_gather, all_to_all, messages, ring_nbytes, sum_little, sum_part, to_others
from tutti.comm.rooms import Room
from tutti.comm.staged import Desk, make_desk
from tutti.comm.team import Team
from tutti.comm.tiered_desk import TieredDesk, make_desk_or_tiers
from tutti.comm.tiered_sum import TieredSum, part_of, share_parts
from tutti.comm.worker import Worker

__all__ = [
    "Desk",
    "HostSum",
    "Letter",
    "Receiving",
    "Room",
    "Sending",
    "Team",
    "TieredDesk",
    "TieredSum",
    "Tiers",
    "Worker",
    "all_gather",
    "all_to_all",
    "make_desk",
    "make_desk_or_tiers",
    "make_team",
    "make_team_or_tiers",
    "messages",
    "part_of",
    "ring_nbytes",
    "share_parts",
    "sum_little",
    "sum_part",
    "to_others",
]
