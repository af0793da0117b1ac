"""Settings: what is refused, with which sentence, and what a value means."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from eval_runs import start_run
from launch import multitask
from launch.config import load_config, override_config, read_run, write_run
from launch.settings import parse_overrides
from tasks import environment

ROOT = Path(__file__).parents[1]


def refused(capsys, *arguments: str) -> str:
    """The one sentence with which the command refuses these arguments."""
    code = multitask.main(list(arguments))
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    return captured.err


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optimiser.learning_rat=1e-3", ["optimiser.learning_rat", "optimiser.learning_rate"]),
        ("learning_rate=1e-3", ["learning_rate", "optimiser.learning_rate"]),
        ("lerner.batch_size=3", ["lerner.batch_size", "learner.batch_size"]),
        ("learner.batch_size=many", ["learner.batch_size", "many"]),
        ("learner.batch_size=1.5", ["learner.batch_size", "1.5"]),
        ("learner.batch_size=true", ["learner.batch_size", "True"]),
        ("learner.batch_size=0", ["learner.batch_size", "0", "at least 1"]),
        ("loss.discount=1.5", ["loss.discount", "1.5", "at most 1"]),
        ("loss.discount=nan", ["loss.discount", "nan"]),
        ("loss.reward_transform=sqrt", ["loss.reward_transform", "sqrt", "clip"]),
        ("seed=-1", ["seed", "-1", "at least 0"]),
        ("seed=9223372036854775808", ["seed", "9223372036854775808"]),
        ("actor.num_envs=7", ["actor.num_envs", "7", "even"]),
        ("actor.slots=2", ["actor.slots", "2", "8"]),
        ("learner.device=mps", ["learner.device", "mps"]),
        ("environment={probe: false, prob: true}", ["environment.prob", "environment.probe"]),
        ("total_frames=null", ["total_frames"]),
        ("learner=3", ["learner"]),
        ("tasks=[catch,cacth]", ["cacth", "catch"]),
        ("tasks=[catch,catch]", ["catch", "2 times"]),
        ("actor.weights={cacth: 2}", ["cacth", "catch"]),
        ("learner.device=gpu9", ["learner.device", "gpu9"]),
        ("learner.device=cuda:99", ["learner.device", "cuda:99"]),
        ("nonsense", ["nonsense", "key=value"]),
    ],
)
def test_bad_settings_are_refused_by_name(capsys, tmp_path, monkeypatch, setting, words):
    monkeypatch.chdir(tmp_path)
    message = refused(capsys, "--suite", "toy", setting)
    for word in words:
        assert word in message
    assert list(tmp_path.iterdir()) == []


def test_a_key_set_twice_is_refused(capsys):
    assert "total_frames is set twice" in refused(capsys, "--suite", "toy", "--total-frames", "5", "total_frames=6")
    assert "seed is set twice" in refused(capsys, "--suite", "toy", "seed=1", "seed=2")
    twice = refused(capsys, "--suite", "toy", "optimiser={learning_rate: 1}", "optimiser.learning_rate=2")
    assert "optimiser.learning_rate is set twice" in twice
    for flags in (["--seed", "1", "--seed", "2"], ["--suite", "atari5"]):
        with pytest.raises(SystemExit, match="2"):
            multitask.main(["--suite", "toy", *flags])
        assert "is set twice" in capsys.readouterr().err


@pytest.mark.parametrize("tasks", ["", "catch,,memory", "catch,"])
def test_empty_task_names_are_refused(capsys, tasks):
    assert "empty name" in refused(capsys, "--suite", "toy", "--tasks", tasks)


def test_equal_frames_need_an_actor_per_task(capsys):
    message = refused(capsys, "--suite", "toy", "actor.num_actors=2", "learner.balance=frames")
    assert "actor.num_actors=4" in message


def test_slots_must_hold_the_larger_half(capsys):
    arguments = ["--suite", "toy", "--tasks", "catch,memory,instruction", "actor.num_actors=1", "actor.num_envs=10"]
    assert "6 unrolls" in refused(capsys, *arguments, "actor.slots=5")


def test_whole_frames_may_be_written_short():
    assert [multitask.whole(text) for text in ("1e9", "1.5e3", "1e-3", "12", "x")] == ["1000000000", "1500", "1e-3", "12", "x"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def make(seed): raise RuntimeError('no licence')", ["no licence", "RuntimeError"]),
        ("def make(): pass", ["TypeError", "seed"]),
        ("def make(seed:", ["SyntaxError"]),
        ("import gymnasium\ndef make(seed): return gymnasium.make('CartPole-v99')", ["CartPole"]),
    ],
)
def test_a_broken_own_suite_is_one_sentence(capsys, tmp_path, code, words):
    name = f"broken_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    path = tmp_path / "own.yaml"
    path.write_text(f"{{name: own, tasks: [{{name: mine, env: '{name}:make'}}]}}", encoding="utf-8")
    message = refused(capsys, "--suite", str(path))
    for word in ("mine", *words):
        assert word in message


@pytest.mark.parametrize(
    "text", ["seed: 1\nseed: 2\n", "loss: {discount: 0.9}\nloss: {discount: 0.8}\n", "- a\n", "a: [\n", "suite: ${\n"]
)
def test_a_bad_file_is_refused(capsys, tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    assert str(path) in refused(capsys, "--suite", "toy", "--config", str(path))


def test_a_missing_file_is_refused(capsys, tmp_path):
    assert "none.yaml" in refused(capsys, "--suite", "toy", "--config", str(tmp_path / "none.yaml"))


def test_unknown_suite_names_the_nearest(capsys):
    assert "atari57" in refused(capsys, "--suite", "atari58")


def test_dmlab_without_its_engine_is_one_sentence(capsys):
    message = refused(capsys, "--suite", "dmlab30")
    for word in ("deepmind_lab", "Docker", "atari5"):
        assert word in message


def test_too_few_environments_for_the_tasks_say_how_many(capsys):
    message = refused(capsys, "--suite", "atari57", "actor.num_actors=2", "actor.num_envs=4")
    assert "15" in message, "57 tasks in actors of 4 environments need 15 actors"


def test_weights_with_too_few_actors_say_how_many(capsys):
    message = refused(capsys, "--suite", "toy", "actor.num_actors=2", "actor.weights={catch: 2}")
    assert "4" in message


def test_values_mean_what_they_say(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("optimiser: {learning_rate: 1e-3}\nlog: {tensorboard: true}\nseed: 4\n", encoding="utf-8")
    config = load_config("toy", path, ["log.tensorboard=false", "loss.entropy_cost=2e-2", "tasks=[memory]"])
    assert config.log.tensorboard is False
    assert config.optimiser.learning_rate == 0.001
    assert config.loss.entropy_cost == 0.02
    assert config.seed == 4
    assert config.tasks == ["memory"]
    assert config.actor.unroll_length == 10, "from launch/configs/toy.yaml"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 5


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_all_seeds_are_seeds(seed):
    assert load_config("toy", None, [f"seed={seed}"]).seed == seed


def test_resume_keeps_what_makes_the_run():
    config = load_config("toy", None, [])
    assert override_config(config, ["total_frames=5"], ("seed", "network")).total_frames == 5
    for setting in ("seed=1", "network.core_size=3"):
        with pytest.raises(ValueError, match=setting.split("=")[0]):
            override_config(config, [setting], ("seed", "network"))


def test_overrides_are_yaml():
    assert parse_overrides(["a.b={c: [1, x]}"]) == {"a": {"b": {"c": [1, "x"]}}}


def test_published_settings_are_the_defaults():
    """Numbers of arXiv:1802.01561 (appendix D, table G.1) and of the released command."""
    dmlab = load_config("dmlab30", None, [])
    assert (dmlab.actor.unroll_length, dmlab.learner.batch_size, dmlab.total_frames) == (100, 32, 10**10)
    assert (dmlab.optimiser.learning_rate, dmlab.loss.entropy_cost) == (0.00031867, 0.00333914)
    assert (dmlab.optimiser.epsilon, dmlab.optimiser.epsilon_placement) == (0.1, "inside")
    assert (dmlab.loss.discount, dmlab.loss.baseline_cost, dmlab.loss.reward_transform) == (0.99, 0.5, "soft_asymmetric")
    atari = load_config("atari57", None, [])
    assert (atari.actor.unroll_length, atari.learner.batch_size) == (20, 32)
    assert (atari.optimiser.learning_rate, atari.optimiser.epsilon) == (6e-4, 0.01)
    assert (atari.optimiser.max_gradient_norm, atari.loss.entropy_cost, atari.loss.reward_transform) == (40, 0.01, "clip")


def test_presets_by_suite():
    """What learns where a newcomer starts; the papers' where their numbers are to be reproduced."""
    for suite, preset in (("atari5", "fast"), ("atari57", "published"), ("dmlab30", "published"), ("toy", "suite")):
        config = load_config(suite, None, [])
        is_fast = config.preset == "fast"
        assert config.preset == preset
        assert (config.optimiser.name, config.network.input_normalisation) == (
            ("adam", "pixel") if is_fast else ("rmsprop", "none")
        )
        assert (config.learner.epochs > 1) == (config.learner.minibatches > 1) == is_fast


def test_a_preset_lies_between_the_suite_and_what_a_person_sets(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("preset: fast\nlearner: {epochs: 7}\n", encoding="utf-8")
    config = load_config("atari57", path, ["learner.minibatches=8"])
    assert (config.preset, config.learner.epochs, config.learner.minibatches) == ("fast", 7, 8)
    assert config.optimiser.name == "adam" and config.loss.ratio_clip > 0
    assert config.total_frames == 11_400_000_000, "from the suite"
    back = load_config("atari57", path, ["preset=published"])
    assert (back.preset, back.learner.epochs, back.optimiser.name) == ("published", 7, "rmsprop")
    assert load_config("atari5", None, ["preset=published"]).optimiser.learning_rate == 6e-4


def test_the_configuration_of_a_run_can_be_used_again(tmp_path):
    """RUN/config.yaml as --config, also of a suite with settings of its own."""
    for suite in ("toy", "atari5", "atari57"):
        config = load_config(suite, None, ["loss.entropy_cost=0.03"])
        start_run(tmp_path / suite, config)
        assert load_config(suite, tmp_path / suite / "config.yaml", []) == config


def test_without_ale_py_atari_is_refused_in_a_sentence(monkeypatch, capsys):
    """Also where the games' own actions would be asked for before anything else."""
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    for suite in ("atari5", "atari57"):
        assert "pip install -e '.[atari]'" in refused(capsys, "--suite", suite)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--suite", "toy", "--preset", "fast"), ["preset=fast", "toy", "leave it out"]),
        (("--suite", "atari5", "preset=suite"), ["preset=suite", "fast or published"]),
        (("--suite", "atari5", "preset=quick"), ["preset", "quick"]),
        (("--suite", "toy", "learner.minibatches=5"), ["learner.minibatches=5", "learner.batch_size", "multiple of 5"]),
        (("--suite", "atari5", "optimiser.decay=1"), ["optimiser.decay=1", "adam", "below 1"]),
        (("--suite", "toy", "learner.epochs=0"), ["learner.epochs", "at least 1"]),
        (("--suite", "toy", "network.core=gru"), ["network.core", "gru"]),
        (("--suite", "toy", "optimiser.name=sgd"), ["optimiser.name", "sgd"]),
    ],
)
def test_presets_and_reuse_that_do_not_fit(capsys, arguments, words):
    message = refused(capsys, *arguments)
    assert all(word in message for word in words), message


def test_dry_run_prints_json_and_starts_nothing(tmp_path):
    command = [sys.executable, str(ROOT / "launch" / "multitask.py"), "--suite", "atari57", "--dry-run", "actor.num_actors=2"]
    done = subprocess.run([*command, "actor.num_envs=64"], cwd=tmp_path, capture_output=True, text=True, check=True)
    plan = json.loads(done.stdout)
    assert list(tmp_path.iterdir()) == []
    actors = plan["plan"]["actors"]
    assert sorted(task for actor in actors for task in actor["tasks"]) == sorted(plan["plan"]["tasks"])
    seeds = [seed for actor in actors for seed in actor["seeds"]]
    assert len(set(seeds)) == len(seeds) == sum(actor["num_envs"] for actor in actors)
    assert "several tasks" in plan["plan"]["notes"][0]
    assert plan["plan"]["shared_memory_bytes"] > 2 * 64 * 21 * 84 * 84 * 4
    assert plan["config"]["optimiser"]["learning_rate"] == 6e-4


def test_dry_run_of_dmlab_works_anywhere(capsys):
    assert multitask.main(["--suite", "dmlab30", "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert len(plan["tasks"]) == 30
    assert len(plan["actors"]) == 30


def test_popart_needs_a_value_head_per_task(capsys):
    settings = ("loss.value_normalisation=popart", "network.value_head=shared")
    assert "does not fit network.value_head=shared: use per_task" in refused(capsys, "--suite", "toy", *settings)


def test_a_rank_that_waits_must_not_count_as_hanging(capsys):
    """The supervisor would end it before it has seen that another rank hangs, and the last minutes would be lost."""
    load_config("toy", None, ["distributed.timeout_seconds=115"])
    load_config("toy", None, ["learner.ranks=2", "distributed.timeout_seconds=110"])
    message = refused(capsys, "--suite", "toy", "learner.ranks=2", "distributed.timeout_seconds=115")
    assert "distributed.timeout_seconds=115 is too long for supervisor.silent_seconds=120" in message


def test_the_files_of_a_run_are_read_as_they_were_written(tmp_path):
    run = start_run(tmp_path, load_config("toy", None, ["seed=7", "environment.dmlab.engine.logLevel=WARN"]))
    again = read_run(tmp_path)
    assert again._replace(code_version="") == run
    assert again.code_version
    write_run(tmp_path, run._replace(dropped_tasks=("memory",)))
    assert read_run(tmp_path).dropped_tasks == ("memory",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "resolved.yaml"]


def test_a_run_folder_in_use_is_refused(capsys, tmp_path):
    (tmp_path / "something").write_text("x", encoding="utf-8")
    assert "--resume" in refused(capsys, "--suite", "toy", "--run-dir", str(tmp_path))


def test_resume_of_no_run_is_refused(capsys, tmp_path):
    assert "no run folder" in refused(capsys, "--resume", str(tmp_path))


def test_help_is_short():
    text = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "multitask.py"), "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert len(text.splitlines()) < 40
    for flag in ("--suite", "--tasks", "--config", "--run-dir", "--resume", "--total-frames", "--seed", "--dry-run"):
        assert flag in text
