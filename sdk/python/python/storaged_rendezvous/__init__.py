"""The entry point of storaged's rendezvous backend (`storaged/torchrun.py`).

torch loads it whenever it is imported, in every program of an environment that has storaged, also in those that never use it. A module of the
`storaged` package would have all of them import that, with its library: hence a package apart, which imports nothing before a torchrun asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters


def backend() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What makes a rendezvous. torch is half imported when it asks for this."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        from storaged._rendezvous import VerdictRendezvous

        return VerdictRendezvous.create(parameters)

    return create
