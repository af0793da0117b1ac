"""What has come from other machines, per actor: it outlives the listener and the run, so that no unroll is taken twice."""

from pathlib import Path

import numpy as np

from agent.transport import mapped

# In the life of a run.
MAX_REMOTE_ACTORS = 2**16


class Ledger:
    """Per remote actor, by number: unrolls whose number is known, how many of them never came, and how many were refused.

    Args:
        path: of the mapped file, in the run folder: a resumed run goes on with it.
        create: make the file, or open it.
    """

    def __init__(self, path: Path, create: bool = False) -> None:
        make = mapped.create if create else mapped.attach
        self._rows = make(path, 24 * MAX_REMOTE_ACTORS).view(np.int64).reshape(MAX_REMOTE_ACTORS, 3)

    def next(self, number: int) -> int:
        """The lowest number of an unroll that is not known yet."""
        return int(self._rows[number, 0])

    def lost_before(self, number: int, sequence: int) -> int:
        """Lost unrolls of an actor, if `sequence` is the next to come."""
        return int(self._rows[number, 1]) + sequence - self.next(number)

    def note(self, number: int, sequence: int, lost: int, refused: int = 0) -> None:
        """Unroll `sequence` is known now; doing it twice does no harm but for `refused`."""
        row = self._rows[number]
        row[2] += refused
        row[1] = lost
        row[0] = sequence + 1

    def totals(self) -> tuple[int, int, int]:
        """Unrolls received, lost and refused in the life of the run."""
        known, lost, refused = self._rows.sum(0).tolist()
        return known - lost - refused, lost, refused
