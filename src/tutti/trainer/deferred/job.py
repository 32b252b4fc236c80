"""What a Job says of models that are built without memory."""

from collections.abc import Callable

from torch import nn

from tutti.errors import ScriptError
from tutti.trainer import capture
from tutti.trainer.deferred.model import build_empty, build_whole
from tutti.trainer.deferred.tape import Tape
from tutti.trainer.session import Session


class Builder:
    """The part of a Job that builds models. `_tape`: how the one without memory was made."""

    _session: Session
    _tape: Tape | None = None

    def build(self, function: Callable[[], nn.Module]) -> nn.Module:
        """The model that `function()` makes, without memory until `prepare` gives every rank its part of it.

        Values are those that one device would have initialised, bit for bit. torch's generators are left as they were
        before the call, at any number of ranks. Raises ScriptError for a constructor that needs to see values.
        """
        if self._tape is not None:
            raise ScriptError("build was called twice; one Job trains one model: compose several into one module")
        if capture.is_capturing():
            return build_empty(function)[0]
        if self._session.world.world_size == 1 or self._session.wishes.observer:
            return build_whole(function)
        model, self._tape = build_empty(function)
        return model
