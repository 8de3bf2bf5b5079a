"""One writer for two saves at once is a mistake that costs saves and never bytes."""

import pytest
import torch
from storaged.errors import StoragedError
from storaged.torch import Checkpointer, StoragedWriter


def test_two_saves_of_one_writer_at_once_are_refused(session):
    writer = StoragedWriter(1, session=session, rank=0, world_size=1)
    writer.stage({"w": torch.ones(10)})
    # Staged while the first has not begun: the first call of DCP's says so, whichever save it is of, and no save goes on.
    assert writer.stage({"w": torch.zeros(10)}) == {}
    with pytest.raises(StoragedError, match="one writer per save"):
        writer.set_up_storage_writer(True)
    writer.set_up_storage_writer(True)
    with pytest.raises(StoragedError, match="one writer per save"):
        writer.write_data(None, None)

    # Staged while the first is about to write: that one is refused, and the second is whole.
    writer.stage({"w": torch.ones(10)})
    writer.set_up_storage_writer(True)
    second = writer.stage({"w": torch.full((10,), 7.0)})
    with pytest.raises(StoragedError, match="one writer per save"):
        writer.write_data(None, None)
    assert torch.equal(second["w"], torch.full((10,), 7.0))
    with Checkpointer(session=session, alone=True) as checkpointer:
        assert checkpointer.latest_step() is None
    writer.close()
