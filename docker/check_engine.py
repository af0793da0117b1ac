"""Fails the build of an image whose deepmind_lab does not import, or cannot reset and play one level."""

import sys
import time
from importlib.metadata import version

import deepmind_lab
import numpy as np

# Builds its map in each episode: so the map tools, bash and zip are tried, too.
LEVEL = "contributed/dmlab30/explore_goal_locations_small"
LOOK_AND_WALK = np.array([20, 0, 0, 1, 0, 0, 0], np.intc)
STEPS = 10


def main() -> int:
    """Exit code 0 if the level plays. The engine itself ends the process with 1 or by a signal when it lacks something."""
    began = time.monotonic()
    lab = deepmind_lab.Lab(LEVEL, ["RGB_INTERLEAVED"], config={"width": "96", "height": "72"}, renderer="software")
    lab.reset(seed=1)
    reset_seconds = time.monotonic() - began
    frames = [lab.observations()["RGB_INTERLEAVED"]]
    for _ in range(STEPS):
        lab.step(LOOK_AND_WALK, num_steps=4)
        frames.append(lab.observations()["RGB_INTERLEAVED"])
    lab.close()
    for frame in frames:
        if frame.shape != (72, 96, 3) or frame.dtype != np.uint8:
            print(f"check_engine: {LEVEL} gives frames {frame.shape} {frame.dtype}, not (72, 96, 3) uint8", file=sys.stderr)
            return 1
    if all(np.array_equal(frames[0], frame) for frame in frames):
        print(f"check_engine: {LEVEL} shows the same frame for {STEPS} steps: nothing is drawn", file=sys.stderr)
        return 1
    print(f"deepmind_lab {version('deepmind_lab')}, numpy {np.__version__}: {LEVEL} reset in {reset_seconds:.1f} s and plays")
    return 0


if __name__ == "__main__":
    sys.exit(main())
