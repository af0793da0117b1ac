"""The levels that the stand-in knows: names, lengths, points, and which of them build maps, speak or need images."""

from __future__ import annotations

from dataclasses import dataclass

FOLDER = "contributed/dmlab30/"
DIRECTIONS = ("left", "right", "forward", "fire")

# task: seconds of an episode, points that one hit pays
TASKS = {
    "rooms_collect_good_objects": (60, 1),
    "rooms_exploit_deferred_effects": (60, 2),
    "rooms_select_nonmatching_object": (12, 2),
    "rooms_watermaze": (120, 1),
    "rooms_keys_doors_puzzle": (60, 1),
    "language_select_described_object": (60, 8),
    "language_select_located_object": (120, 6),
    "language_execute_random_task": (120, 5),
    "language_answer_quantitative_question": (60, 4),
    "lasertag_one_opponent_small": (240, 1),
    "lasertag_three_opponents_small": (240, 1),
    "lasertag_one_opponent_large": (240, 1),
    "lasertag_three_opponents_large": (240, 1),
    "natlab_fixed_large_map": (120, 1),
    "natlab_varying_map_regrowth": (120, 1),
    "natlab_varying_map_randomized": (120, 1),
    "skymaze_irreversible_path_hard": (60, 2),
    "skymaze_irreversible_path_varied": (60, 2),
    "psychlab_arbitrary_visuomotor_mapping": (300, 1),
    "psychlab_continuous_recognition": (300, 1),
    "psychlab_sequential_comparison": (300, 1),
    "psychlab_visual_search": (150, 1),
    "explore_object_locations_small": (90, 1),
    "explore_object_locations_large": (120, 1),
    "explore_obstructed_goals_small": (90, 4),
    "explore_obstructed_goals_large": (120, 3),
    "explore_goal_locations_small": (90, 5),
    "explore_goal_locations_large": (120, 4),
    "explore_object_rewards_few": (90, 2),
    "explore_object_rewards_many": (120, 3),
}
SPLIT_IN_TWO = ("rooms_collect_good_objects", "rooms_exploit_deferred_effects")  # a _train and a _test file
BUILDS_MAPS = ("explore_", "skymaze_", "lasertag_", "rooms_keys_doors_puzzle")
NEEDS_IMAGES_AT_RESET = "psychlab_continuous_recognition"
NEEDS_IMAGES_LATER = "psychlab_arbitrary_visuomotor_mapping"
COLOURS = {"red": (255, 40, 40), "green": (40, 255, 40), "blue": (60, 60, 255), "yellow": (255, 255, 40)}
SENTENCES = {
    "language_select_described_object": "Pick up the {} object .",
    "language_select_located_object": "Pick the object that lies in the {} room .",
    "language_execute_random_task": "Go to the {} room , then pick up what you find there .",
    "language_answer_quantitative_question": "Are there more {} things than others ?",
}


@dataclass(frozen=True)
class Level:
    """One level file.

    name: the file's name, without its folder. number: its place in the list, for colours and random numbers.
    seconds: length of an episode. points: what one hit pays. sentence: empty outside language levels.
    colours: names of the four colours, for left, right, forward and fire in this order.
    """

    name: str
    number: int
    seconds: float
    points: int
    sentence: str
    colours: tuple[str, ...]

    @property
    def builds_maps(self) -> bool:
        return self.name.startswith(BUILDS_MAPS)

    @property
    def builds_maps_midway(self) -> bool:
        return self.name.startswith("skymaze_")

    @property
    def ends_when_solved(self) -> bool:
        return self.name == "rooms_keys_doors_puzzle"

    @property
    def held_out(self) -> bool:
        return self.name.endswith("_test")

    @property
    def needs_images(self) -> bool:
        return self.name in (NEEDS_IMAGES_AT_RESET, NEEDS_IMAGES_LATER)


def _levels() -> dict[str, Level]:
    """Path of a level -> Level; 32 of them."""
    found = {}
    for number, (task, (seconds, points)) in enumerate(TASKS.items()):
        names = list(COLOURS)
        colours = tuple(names[number % 4 :] + names[: number % 4])
        for name in (f"{task}_train", f"{task}_test") if task in SPLIT_IN_TWO else (task,):
            found[FOLDER + name] = Level(name, number, seconds, points, SENTENCES.get(task, ""), colours)
    return found


LEVELS = _levels()
