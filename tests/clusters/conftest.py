"""Hosts for the tests of clusters."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters.ssh_rig import SshHosts, ssh_hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[SshHosts]:
    """Two hosts with an sshd each, `alpha` and `beta`."""
    base = Path(tempfile.mkdtemp(prefix="ssh-hosts-"))
    try:
        with ssh_hosts(base, ["alpha", "beta"]) as made:
            yield made
    finally:
        shutil.rmtree(base, ignore_errors=True)
