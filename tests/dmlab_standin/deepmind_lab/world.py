"""What happens in an episode: where it pays, what is seen, when it ends. Cheap, and a function of the seed alone.

Time is cut into slots of 4 frames; a target (left, right, forward or fire) holds for 4 slots. The first frame of a slot
on which the action fits the target pays the level's points, once a slot. So with an action repeat of 4 every step
can pay, playing at random hits about one slot in six, and playing well hits all of them.
- Most levels show a bright patch at the target's side: left, right, top (forward) or bottom (fire).
- Language levels always show four patches, one colour per side; the instruction names the colour that pays. It changes
  every 64 frames. Taking another side costs 1 point.
- `rooms_keys_doors_puzzle` ends after 20 hits, and the last one pays a bonus of 1 for each slot that is left.
"""

from __future__ import annotations

import numpy as np

from .levels import COLOURS, DIRECTIONS, Level

SLOT_FRAMES = 4
TARGET_SLOTS = 4
TARGETS_PER_INSTRUCTION = 4
TARGETS_DRAWN = 1024  # then they repeat
HITS_TO_SOLVE = 20
HITS_PER_MAP = 25  # in the levels that build maps midway
PATCH = (255, 255, 255)


def direction(action: np.ndarray) -> int | None:
    """Which of DIRECTIONS an action takes: fire before turning, turning before walking; None for all others."""
    yaw, _, _, move, fire, _, _ = action.tolist()
    if fire > 0:
        return 3
    if yaw:
        return 0 if yaw < 0 else 1
    return 2 if move > 0 else None


class World:
    """One episode of one level.

    frame: frames played. limit: frames until the clock. over: it has ended. hits: slots that paid.
    """

    def __init__(self, level: Level, seed: int, mixer_seed: int, seconds: float, height: int, width: int) -> None:
        self.level = level
        random = np.random.default_rng([seed, mixer_seed, level.number])
        self.targets = random.integers(0, 4, TARGETS_DRAWN).tolist()
        self.map_index = int(random.integers(0, 2**31))
        coarse = random.integers(0, 64, (height // 4, width // 4, 3), dtype=np.uint8)
        coarse[..., level.number % 3] += 40  # each level has its tint
        self.background = coarse.repeat(4, axis=0).repeat(4, axis=1)
        self.limit = max(1, round(seconds * 60))
        self.frame = 0
        self.hits = 0
        self.paid_slot = -1
        self.over = False
        self.position = np.zeros(3)
        self.velocity = np.zeros(3)
        self.yaw = 0.0
        self.turn = 0.0

    def target(self, frame: int) -> int:
        """Which of DIRECTIONS pays at `frame`."""
        number = frame // (SLOT_FRAMES * TARGET_SLOTS)
        if self.level.sentence:
            number //= TARGETS_PER_INSTRUCTION
        return self.targets[number % TARGETS_DRAWN]

    def advance(self, action: np.ndarray, frames: int) -> float:
        """Play up to `frames` frames; the reward of those really played."""
        taken = direction(action)
        stop = min(self.frame + frames, self.limit)
        reward = 0.0
        first = self.frame
        while self.frame < stop and not self.over:
            slot = self.frame // SLOT_FRAMES
            if taken is not None and slot != self.paid_slot:
                reward += self._choose(taken, slot)
            self.frame = self.frame + 1 if self.over else min(stop, (slot + 1) * SLOT_FRAMES)
        self.over = self.over or self.frame >= self.limit
        self._move(action, self.frame - first)
        return reward

    def _choose(self, taken: int, slot: int) -> float:
        """The reward of taking a direction in a slot that has not paid yet."""
        if taken != self.target(self.frame):
            if not self.level.sentence:
                return 0.0
            self.paid_slot = slot
            return -1.0
        self.paid_slot = slot
        self.hits += 1
        if self.level.ends_when_solved and self.hits == HITS_TO_SOLVE:
            self.over = True
            return float(self.level.points + (self.limit - self.frame) // SLOT_FRAMES)
        return float(self.level.points)

    def _move(self, action: np.ndarray, frames: int) -> None:
        yaw, _, strafe, move, *_ = action.tolist()
        self.turn = 0.1 * yaw
        self.yaw = (self.yaw + self.turn * frames + 180) % 360 - 180
        self.velocity = np.array([move, strafe, 0.0]) * 5.0
        self.position = self.position + self.velocity * (frames / 60)

    def instruction(self) -> str:
        """The text of this frame; empty outside language levels."""
        return self.level.sentence.format(self.level.colours[self.target(self.frame)]) if self.level.sentence else ""

    def picture(self, plain: bool) -> np.ndarray:
        """A fresh uint8 [H, W, 3]: background, a mark that moves one pixel a frame, patches. `plain`: no background."""
        picture = np.zeros_like(self.background) if plain else self.background.copy()
        height, width = picture.shape[:2]
        picture[: height // 8 + 1, self.frame % width] = 200
        if self.level.sentence:
            for side in range(len(DIRECTIONS)):
                picture[_side(side, height, width)] = COLOURS[self.level.colours[side]]
        else:
            picture[_side(self.target(self.frame), height, width)] = PATCH
        return picture


def _side(side: int, height: int, width: int) -> tuple[slice, slice]:
    """Where a direction's patch lies: rows, columns."""
    rows = {2: slice(height // 8, height // 8 + height // 4), 3: slice(height - height // 4, height)}
    columns = {0: slice(0, width // 4), 1: slice(width - width // 4, width)}
    middle = slice(height * 3 // 8, height * 3 // 8 + height // 4)
    centre = slice(width * 3 // 8, width * 3 // 8 + width // 4)
    return rows.get(side, middle), columns.get(side, centre)
