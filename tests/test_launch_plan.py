"""The plan: half-groups, seeds, and what the machine must have."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch import checks
from launch.config import RunFiles, load_config, suite_of
from launch.plan import Plan, environment_seeds, groups, make_plan, network_spec, probe_seed, split_halves
from tasks.environment import suite_spaces


def plan_of(suite_name: str, *overrides: str) -> tuple[RunFiles, Plan]:
    config = load_config(suite_name, None, overrides)
    suite = suite_of(config)
    spaces = suite_spaces(suite, config.environment)
    run = RunFiles(config, suite, network_spec(config, suite, spaces), spaces.frames_per_step)
    return run, make_plan(run)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 57), st.integers(1, 40))
def test_halves_hold_every_task_with_equal_numbers(num_tasks, per_task):
    num_envs = num_tasks * per_task
    num_envs += num_envs % 2
    if num_envs // num_tasks % 2 and num_tasks == 1:
        return
    halves = split_halves(tuple(range(num_tasks)), num_envs)
    found = [group for half in halves for group in half]
    count = {task: sum(g.count for g in found if g.task == task) for task in range(num_tasks)}
    assert set(count.values()) == {num_envs // num_tasks}
    assert len(halves) == 2
    assert all(halves)
    numbers = [number for g in found for number in range(g.first, g.first + g.count)]
    assert numbers == list(range(len(numbers)))


def test_all_seeds_of_a_run_differ():
    run, plan = plan_of("toy", "actor.num_actors=7", "actor.num_envs=6", "seed=3")
    seeds = []
    for generation in range(1, 6):
        for actor in plan.actors:
            seeds.append(probe_seed(run.config, plan, actor, generation))
            for group in groups(actor):
                seeds += environment_seeds(run.config, plan, actor, group, generation)
    assert len(set(seeds)) == len(seeds) == 5 * 7 * (6 + 1)
    assert all(type(seed) is int and 0 <= seed < 2**31 for seed in seeds)


def test_neighbouring_runs_share_no_seed():
    def all_seeds(base: int) -> set[int]:
        run, plan = plan_of("toy", "actor.num_actors=8", "actor.num_envs=64", f"seed={base}")
        return {
            seed
            for generation in range(1, 20)
            for actor in plan.actors
            for group in groups(actor)
            for seed in environment_seeds(run.config, plan, actor, group, generation)
        }

    first, second = all_seeds(0), all_seeds(1)
    assert len(first) == len(second) == 19 * 8 * 64
    assert not first & second


def test_every_task_has_an_actor_by_default():
    _, plan = plan_of("atari5", "preset=published")
    assert {task for actor in plan.actors for task in actor.tasks} == set(range(5))
    assert all(len(actor.tasks) == 1 for actor in plan.actors)


def test_the_fast_preset_has_one_actor_that_plays_all_tasks():
    """Each in as many environments as every other."""
    _, plan = plan_of("atari5")
    (actor,) = plan.actors
    counts = {task: sum(g.count for half in actor.halves for g in half if g.task == task) for task in actor.tasks}
    assert counts == dict.fromkeys(range(5), 3)


@pytest.mark.parametrize(
    ("settings", "count"), [((), 4), (("learner.ranks=6",), 6), (("learner.balance=frames",), 57), (("actor.num_actors=9",), 9)]
)
def test_the_fast_preset_has_as_few_actors_as_will_do(settings, count):
    _, plan = plan_of("atari57", "preset=fast", *settings)
    assert len(plan.actors) == count
    assert {task for actor in plan.actors for task in actor.tasks} == set(range(57))


def test_too_little_shared_memory_names_the_docker_flag(monkeypatch, tmp_path):
    run, plan = plan_of("toy", "actor.slots=4000000")
    with pytest.raises(ValueError, match=r"--shm-size=\d+g"):
        checks.check_machine(run.config, plan, tmp_path)


def test_ranks_that_share_a_machine_share_its_memory(monkeypatch, tmp_path):
    """Under torchrun each of them looks for itself: three would fit, four do not."""
    run, plan = plan_of("toy", "learner.ranks=4", "actor.num_actors=4")
    free = 3 * checks.shared_bytes(plan, 1)
    disk = checks.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checks, "memory_root", lambda: "memory")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: disk._replace(free=free) if path == "memory" else disk)
    checks.check_machine(run.config, plan, tmp_path, 1, 3)
    with pytest.raises(ValueError, match=r"--shm-size=\d+g"):
        checks.check_machine(run.config, plan, tmp_path, 1, 4)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    run, plan = plan_of("toy")
    blocking = tmp_path / "file"
    blocking.write_text("x", encoding="utf-8")
    with pytest.raises(ValueError, match="not writable"):
        checks.check_machine(run.config, plan, blocking / "run")


def test_shared_bytes_are_those_of_the_files(tmp_path):
    from agent.network import Network
    from agent.transport.board import Board, num_parameters
    from agent.transport.ring import Ring
    from launch.inference import open_mailboxes
    from launch.status import open_status

    _, plan = plan_of("toy", "actor.inference=batched")
    open_status(tmp_path, plan, create=True)
    Board(tmp_path / "board", num_parameters(Network(plan.network)), create=True)
    for actor in plan.actors:
        Ring(tmp_path / f"ring-{actor.index}", plan.unroll, plan.slots, create=True)
        open_mailboxes(tmp_path, plan, actor, create=True)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == checks.shared_bytes(plan)


def test_an_inference_device_that_is_not_here_is_refused(tmp_path):
    run, plan = plan_of("toy", "actor.inference_device=tpu")
    checks.check_machine(run.config, plan, tmp_path)  # nobody uses it
    run, plan = plan_of("toy", "actor.inference=batched", "actor.inference_device=tpu")
    with pytest.raises(ValueError, match=r"actor\.inference_device=tpu is no device"):
        checks.check_machine(run.config, plan, tmp_path)
