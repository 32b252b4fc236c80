"""Constants of offloading that predictions share with the code that runs."""

from tutti import direct_io
from tutti.cost_model import cost_constants
from tutti.parallel.offload import saved_activations, state_on_disk


def test_predictions_cut_state_and_activations_as_the_run_does() -> None:
    assert cost_constants.STATE_GROUP_NBYTES == direct_io.GROUP_NBYTES
    assert cost_constants.STATE_BUFFERS == state_on_disk.BUFFERS
    assert cost_constants.SAVED_NBYTES == saved_activations.MIN_NBYTES
