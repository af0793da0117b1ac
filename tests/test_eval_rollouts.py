"""Games played for a score: whole ones, exactly those asked for, the same for one or many environments in parallel."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from agent.inference import sample_actions
from agent.network import Network, NetworkSettings, NetworkSpec
from eval import rollouts
from eval.rollouts import Game
from tasks.environment import EnvironmentSettings, make_vector_env, suite_spaces
from tasks.registry import load_suite
from tasks.seeds import evaluation_seed
from tasks.suite import Suite

SETTINGS = EnvironmentSettings()

OWN_ENVS = '''
"""A gymnasium world whose games differ in length, and a dm_env world that cannot be reseeded."""

import dm_env
import gymnasium
import numpy as np
from dm_env import specs


class Lengths(gymnasium.Env):
    """Lasts 1 to 40 steps, as its seed says; shows the step; pays action / 2^step: the return tells all actions."""

    observation_space = gymnasium.spaces.Box(0, 255, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_index, self.length = 0, int(np.random.default_rng(seed).integers(1, 41))
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.step_index += 1
        reward = action * 0.5**self.step_index
        return np.full(1, self.step_index, np.float32), reward, self.step_index == self.length, False, {}


class Remembers(dm_env.Environment):
    """Counts its games, and pays the action times a random number of the stream that began at construction."""

    def __init__(self, seed):
        self.random, self.games = np.random.default_rng(seed), 0

    def reset(self):
        self.games, self.steps = self.games + 1, 0
        return dm_env.restart(np.array([self.games], np.float32))

    def step(self, action):
        self.steps += 1
        observation = np.array([self.random.random()], np.float32)
        reward = float(action) * self.random.random() + 1000 * self.games
        return dm_env.termination(reward, observation) if self.steps == 5 else dm_env.transition(reward, observation)

    def observation_spec(self):
        return specs.Array((1,), np.float32)

    def action_spec(self):
        return specs.DiscreteArray(2)


def make_lengths(seed):
    return Lengths()


def make_remembers(seed):
    return Remembers(seed)
'''


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The networks are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def own_suite(tmp_path: Path) -> Suite:
    (tmp_path / "eval_test_worlds.py").write_text(OWN_ENVS, encoding="utf-8")
    tasks = [f"  - {{name: {name}, env: 'eval_test_worlds:make_{name}'}}" for name in ("lengths", "remembers")]
    (tmp_path / "mine.yaml").write_text("name: mine\ntasks:\n" + "\n".join(tasks) + "\n", encoding="utf-8")
    return load_suite(str(tmp_path / "mine.yaml"))


def make_network(suite: Suite, torso: str, policy_scale: float) -> Network:
    """A fresh network in float64; `policy_scale` 0 is the uniform policy, a large one depends strongly on its input."""
    spaces = suite_spaces(suite, SETTINGS)
    settings = NetworkSettings(torso=torso, hidden_size=16, core_size=16)  # type: ignore[arg-type]
    legal = dict(zip(suite.task_names, spaces.num_actions, strict=True))
    shape, words = spaces.frame_shape, spaces.instruction_length
    torch.manual_seed(0)
    network = Network(NetworkSpec(settings, shape, spaces.frame_dtype, words, max(legal.values()), legal)).double()
    with torch.no_grad():
        for parameter in network.policy_heads.parameters():
            parameter.mul_(policy_scale)
        network.core.input.weight[:, settings.hidden_size].mul_(policy_scale)  # of the last reward
    return network


def play(suite: Suite, task: str, network: Network, num_games: int, num_envs: int, seed: int = 0) -> list[Game]:
    games = rollouts.play_games(suite, task, network, SETTINGS, range(num_games), num_envs, seed, "test")
    return sorted(games, key=lambda game: game.index)


@pytest.mark.parametrize("task", load_suite("toy").task_names)
def test_one_or_many_environments_play_the_same_toy_games(task: str) -> None:
    suite = load_suite("toy")
    network = make_network(suite, "small", 30.0)
    games = play(suite, task, network, 25, 1)
    assert [game.index for game in games] == list(range(25))
    assert len({game.raw_return for game in games}) > 1
    assert play(suite, task, network, 25, 4) == games
    assert play(suite, task, network, 25, 40) == games
    assert play(suite, task, network, 25, 4, seed=1) != games


def whole_game_at_once(network: Network, game: Game, seed: int) -> np.ndarray:
    """The actions [T] of a game of `lengths`, drawn from one forward pass over all its rows."""
    bits = [int(game.raw_return * 2 ** (step + 1)) % 2 for step in range(game.steps)]
    rows = {
        "frame": torch.arange(game.steps, dtype=torch.float32).reshape(-1, 1, 1, 1, 1),
        "reward": torch.tensor([0.0] + [bit * 0.5 ** (step + 1) for step, bit in enumerate(bits[:-1])])[:, None],
        "last_action": torch.tensor([-1, *bits[:-1]])[:, None],
        "first": torch.tensor([True] + [False] * (game.steps - 1))[:, None],
    }
    with torch.no_grad():
        logits = network(rows, network.initial_state(1), [0]).logits[:, 0]
    uniforms = np.random.default_rng((seed, rollouts.ACTION_STREAM)).random(game.steps)
    return sample_actions(torch.log_softmax(logits, -1).numpy(), uniforms)


def test_games_of_any_length_are_played_to_their_end_with_state_carried_as_in_acting(own_suite: Suite) -> None:
    network = make_network(own_suite, "mlp", 30.0)
    seeds = [evaluation_seed(7, "lengths", index) for index in range(11)]
    lengths = [int(np.random.default_rng(seed).integers(1, 41)) for seed in seeds]
    games = play(own_suite, "lengths", network, 11, 3, seed=7)
    assert [(game.index, game.frames, game.steps) for game in games] == [
        (index, length, length) for index, length in enumerate(lengths)
    ]
    for game, seed in zip(games, seeds, strict=True):
        actions = whole_game_at_once(network, game, seed)
        assert game.raw_return == sum(int(action) * 0.5 ** (step + 1) for step, action in enumerate(actions))
    for num_envs in (1, 11):
        assert play(own_suite, "lengths", network, 11, num_envs, seed=7) == games


def test_a_world_that_cannot_be_reseeded_plays_the_same_games_too(own_suite: Suite) -> None:
    network = make_network(own_suite, "mlp", 30.0)
    games = play(own_suite, "remembers", network, 7, 1)
    assert all(5000 <= game.raw_return < 5005 for game in games)
    assert play(own_suite, "remembers", network, 7, 3) == games


@pytest.mark.parametrize("task", load_suite("toy").task_names)
def test_actions_do_not_depend_on_the_world_s_own_random_numbers(task: str) -> None:
    suite = load_suite("toy")
    returns = [game.raw_return for game in play(suite, task, make_network(suite, "small", 0.0), 600, 100)]
    random_score = suite.task(task).random_score
    assert random_score is not None
    assert abs(np.mean(returns) - random_score) < 4 * np.std(returns) / 600**0.5


def test_a_lost_life_does_not_split_the_return_of_an_atari_game() -> None:
    suite = load_suite("atari57", ["breakout"])
    games = play(suite, "breakout", make_network(suite, "shallow", 0.0), 2, 2)
    for game in games:
        # The same game with life loss raised as in training, played apart from the code under test.
        seed = evaluation_seed(0, "breakout", game.index)
        env = make_vector_env(suite, suite.task("breakout"), 1, SETTINGS, [seed], training=True)
        env.reset()
        generator = np.random.default_rng((seed, rollouts.ACTION_STREAM))
        raw_return, frames, steps, ends = 0.0, 0, 0, 0
        while True:
            _, rewards, terminated, _, infos = env.step(np.array([int(generator.random() * 18)]))
            if infos["reset"][0]:
                break
            raw_return += float(rewards[0])
            frames += int(infos["frames"][0])
            steps += 1
            ends += int(terminated[0])
        env.close()
        assert ends == 5
        assert game == Game(game.index, raw_return, frames, steps)


def test_a_task_that_the_checkpoint_does_not_know_is_named() -> None:
    network = make_network(load_suite("toy", ["catch"]), "small", 1.0)
    with pytest.raises(ValueError, match="knows no task 'memory', only: catch"):
        play(load_suite("toy"), "memory", network, 1, 1)


def test_a_diverged_checkpoint_is_an_error_and_no_score() -> None:
    suite = load_suite("toy", ["catch"])
    with pytest.raises(ValueError, match="log-probabilities are not finite"):
        play(suite, "catch", make_network(suite, "small", float("nan")), 1, 1)
