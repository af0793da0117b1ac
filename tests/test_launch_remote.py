"""Joining a run: addresses and keys, refusals in words, seeds that no two machines share."""

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.transport.listener import Admission, RemoteSettings
from agent.transport.wire import WireError
from launch import multitask, remote
from launch.config import RunFiles, load_config, read_run, suite_of, write_run
from launch.plan import environment_seeds, groups, make_plan, network_spec, probe_seed, seeds_per_start
from launch.ranks import Place
from launch.remote import Code, Machine, Members, agreement, as_joined, greeting, plan_of, this_code
from launch.torchrun import whole_plan, with_port
from tasks.environment import suite_spaces

CODE = this_code()


def files(*overrides: str, suite_name: str = "toy") -> RunFiles:
    values = {"actor.num_envs": "4", "remote.listen": "tcp://127.0.0.1:5555", **dict(text.split("=", 1) for text in overrides)}
    config = load_config(suite_name, None, [f"{key}={value}" for key, value in values.items()])
    suite = suite_of(config)
    spaces = suite_spaces(suite, config.environment)
    return RunFiles(config, suite, network_spec(config, suite, spaces), spaces.frames_per_step)


RUN = files("seed=3")


@pytest.fixture
def run(tmp_path):
    run = files()
    write_run(tmp_path, run)
    return run


def admitted(members: Members, session: int, actors: int, starts: int) -> dict:
    found = members.admit(session, greeting(actors, starts, {}, CODE))
    assert isinstance(found, Admission), found
    assert found.first == found.answer["first"] and found.actors == actors
    return found.answer


@pytest.mark.parametrize(
    ("address", "encrypted", "words"),
    [
        ("tcp://0.0.0.0:5555", True, None),
        ("tcp://*:1", True, None),
        ("tcp://[::]:65535", True, None),
        ("tcp://127.0.0.1:5555", False, None),
        ("tcp://[::1]:5555", False, None),
        ("tcp://0.0.0.0:5555", False, "without keys is for this machine only: use tcp://127.0.0.1:5555"),
        ("tcp://127.0.0.1.evil.example:5555", False, "without keys"),
        ("tcp://host", True, "is no address: write tcp://HOST:PORT"),
        ("tcp://host:0", True, "is no address"),
        ("tcp://host:99999", True, "is no address"),
        ("ipc:///tmp/x", True, "is no address"),
    ],
)
def test_addresses(address, encrypted, words):
    if words is None:
        remote.check_address("--listen", address, encrypted)
    else:
        with pytest.raises(ValueError, match=words):
            remote.check_address("--listen", address, encrypted)


def test_a_busy_port_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ValueError, match=rf"remote.listen {address}: Address already in use; choose another port"):
            remote.check_listen(RemoteSettings(listen=address))
    remote.check_listen(RemoteSettings(listen=address))
    remote.check_listen(RemoteSettings(listen=address))
    with pytest.raises(ValueError, match=r"remote\.listen tcp://192\.0\.2\.1:5555: "):
        remote.check_listen(RemoteSettings(listen="tcp://192.0.2.1:5555"))


def test_a_busy_port_ends_the_command_before_anything_starts(tmp_path, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        assert multitask.main(["--suite", "toy", "--run-dir", str(tmp_path / "run"), "--listen", address]) == 2
    assert f"multitask: remote.listen {address}: Address already in use" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_to_copy_is_one_line_and_keys_are_made_once(tmp_path):
    settings = RemoteSettings(listen="tcp://0.0.0.0:5555")
    told = remote.prepare(tmp_path, settings)
    assert "\n" not in told and f"{tmp_path}/keys/run.key and {tmp_path}/keys/actors.key_secret" in told
    assert "python launch/actors.py --connect tcp://HOST:5555 --actors 8 --keys FOLDER" in told
    before = (tmp_path / "keys" / "run.key").read_bytes()
    assert remote.prepare(tmp_path, settings) == told and (tmp_path / "keys" / "run.key").read_bytes() == before


def test_nobody_left_to_play_is_refused():
    with pytest.raises(ValueError, match=r"remote\.only=true leaves nobody to play: add --listen"):
        make_plan(files("remote.only=true", "remote.listen=''"))


def test_a_machine_is_told_everything_it_needs(tmp_path, run):
    answer = admitted(Members(tmp_path, run), 5, 3, 8)
    assert answer["first"] == 0 and answer["member"] == 0
    assert answer["agreement"] == agreement(run)
    folder = tmp_path / "machine"
    folder.mkdir()
    for name, text in answer["files"].items():
        (folder / name).write_text(text, encoding="utf-8")
    joined = as_joined(read_run(folder), 3)
    machine = Machine("tcp://x:1", "", 5, answer["first"], answer["agreement"], answer["seeds"])
    machine.write(folder)
    assert remote.read_machine(folder) == machine and remote.read_machine(tmp_path) is None
    plan = plan_of(joined, machine)
    assert (len(plan.actors), plan.num_ranks, plan.services, plan.remote_slots) == (3, 0, ("relay",), 0)
    assert {task for actor in plan.actors for task in actor.tasks} == set(range(4)), "every machine plays all tasks"


def test_other_code_is_refused(tmp_path, run):
    reason = Members(tmp_path, run).admit(5, greeting(3, 3, {}, Code("x" * 64, "0.0")))
    assert isinstance(reason, str) and "this machine runs other code" in reason and "install the same version" in reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["learner.batch_size=7", "optimiser.learning_rate=0.1", "total_frames=5", "loss.discount=0.5", "log.every_seconds=9",
          "remote.only=true", "actor.num_actors=9", "remote.slots=3"], None),
        (["tasks=[catch,memory]"], "another task table"),
        (["actor.unroll_length=9"], "another table of fields"),
        (["actor.num_envs=6"], "other settings of actors"),
        (["seed=8"], "other settings of actors"),
        (["environment.probe=false"], "other settings of actors"),
    ],
)  # fmt: skip
def test_a_resumed_run_refuses_only_what_matters_to_actors(tmp_path, run, changes, words):
    agreed = agreement(run)
    changed = files(*changes)
    write_run(tmp_path, changed)
    found = Members(tmp_path, changed).admit(5, greeting(3, 3, agreed, CODE))
    if words is None:
        assert isinstance(found, Admission), found
    else:
        assert isinstance(found, str) and f"the run has gone on with {words}" in found and "start launch/actors.py" in found


@pytest.mark.parametrize(
    "changes",
    [{"actors": 0}, {"actors": True}, {"actors": "3"}, {"actors": 10**6}, {"starts": -1}, {"starts": 1e3}, {"code": 3},
     {"agreed": []}, {"agreed": {"a": 1}}, {"host": None}, {"code_version": {}}, {"host": "\ud800"}, {"host": "a\x1b[2J"},
     {"code": "x", "code_version": "\ud800"}, {"agreed": {"\ud800": "x"}}],
    ids=ascii,
)  # fmt: skip
def test_a_greeting_that_is_none_changes_nothing(tmp_path, run, changes):
    members = Members(tmp_path, run)
    with pytest.raises(WireError, match="no greeting"):
        members.admit(5, {**greeting(3, 3, {}, CODE), **changes})
    assert (tmp_path / remote.MEMBERS).read_text(encoding="utf-8") == ""


def test_numbers_and_seeds_are_written_before_they_are_given(tmp_path, run):
    """A listener that is killed and started again gives nothing twice, and the same machine the same."""
    given_out, actors = [], []
    for session in (5, 6, 7):
        members = Members(tmp_path, run)
        answer = admitted(members, session, 2, 4)
        assert admitted(members, session, 2, 4) == answer == admitted(Members(tmp_path, run), session, 2, 4)
        assert sum(count for _, count in answer["seeds"]) == 4 * 5
        more = admitted(Members(tmp_path, run), session, 2, 9)
        assert more["seeds"][:1] == answer["seeds"] and sum(count for _, count in more["seeds"]) == 9 * 5
        given_out += more["seeds"]
        actors += [more["first"], more["first"] + 1]
    numbers = [number for first, count in given_out for number in range(first, first + count)]
    assert len(set(numbers)) == len(numbers) == 3 * 9 * 5
    assert actors == [*range(6)]
    again = Members(tmp_path, run).admit(5, greeting(3, 3, {}, CODE))
    assert isinstance(again, str) and "has joined with 2 actors, not 3" in again


def test_what_is_used_up_is_refused(tmp_path, run, monkeypatch):
    monkeypatch.setattr(remote, "PART_OF_SEEDS", 20)
    members = Members(tmp_path, run)
    monkeypatch.setattr(remote, "MAX_REMOTE_ACTORS", 4)
    admitted(members, 5, 3, 3)
    assert "has had 3 remote actors, 4 are the most" in str(members.admit(6, greeting(2, 2, {}, CODE)))
    assert "has used up its seeds" in str(members.admit(5, greeting(3, 30, {}, CODE)))


def test_a_line_that_was_torn_by_a_full_disk_gives_nothing_away(tmp_path, run):
    """Its machine was never answered; the next line stands alone, and can be read."""
    admitted(Members(tmp_path, run), 5, 2, 4)
    path = tmp_path / remote.MEMBERS
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-9])
    answer = admitted(Members(tmp_path, run), 6, 2, 4)
    assert admitted(Members(tmp_path, run), 6, 2, 4) == answer and answer["first"] == 2


@settings(deadline=None, max_examples=8)
@given(st.data())
def test_no_seed_is_used_twice_on_any_machine(data):
    """Local starts beyond the shared part of the numbers, several machines, and restarts of single actors."""
    run = RUN
    local = make_plan(as_joined(run, 3))
    late = data.draw(st.integers(0, 20_000))
    seeds: list[int] = []
    for generation in (1, 2, 13_108, 13_200 + late):
        for actor in local.actors:
            seeds.append(probe_seed(run.config, local, actor, generation))
            seeds += [s for g in groups(actor) for s in environment_seeds(run.config, local, actor, g, generation)]
    number = data.draw(st.sampled_from([0, 2**16 - 20, 2**18, 10**6]))
    for _ in range(3):
        blocks = []
        for _ in range(2):
            count = seeds_per_start(run.config) * data.draw(st.integers(4, 9))
            blocks.append([number, count])
            number += count
        machine = Machine("", "", 1, 0, {}, blocks)
        plan = plan_of(as_joined(run, 2), machine)
        total = sum(count for _, count in blocks) // seeds_per_start(run.config)
        starts = [(actor, 1) for actor in plan.actors] + [(plan.actors[g % 2], g) for g in range(2, total)]
        for actor, generation in starts:
            seeds.append(probe_seed(run.config, plan, actor, generation))
            seeds += [s for g in groups(actor) for s in environment_seeds(run.config, plan, actor, g, generation)]
        with pytest.raises(ValueError, match="no seeds left for actor 0"):
            probe_seed(run.config, plan, plan.actors[0], total)
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**30 for seed in seeds)


def test_ranks_that_were_started_apart_listen_and_admit_without_asking_each_other(tmp_path):
    """Each at a port and with seeds of its own; a machine with one actor can join any of them."""
    run, given_out = files("learner.ranks=2", "actor.num_actors=2"), []
    place = Place(0, 2, 0, 1, "127.0.0.1", 29500, True, "0")
    assert whole_plan(run, place)[0].config.remote == run.config.remote, "not refused, and rank 0 has the port itself"
    for rank in range(2):
        mine = with_port(run, rank)
        assert mine.config.remote.listen == f"tcp://127.0.0.1:{5555 + rank}"
        folder = tmp_path / str(rank)
        folder.mkdir()
        write_run(folder, mine)
        answer = admitted(Members(folder, mine, rank), 5, 1, 9)
        machine = Machine("tcp://x:1", "", 5, answer["first"], answer["agreement"], answer["seeds"])
        plan = plan_of(as_joined(mine, 1), machine)
        [actor] = plan.actors
        for generation in (1, 2):
            given_out += [*environment_seeds(mine.config, plan, actor, next(groups(actor)), generation)]
    assert len(set(given_out)) == len(given_out)
    with pytest.raises(ValueError, match="works with up to 64 ranks"):
        with_port(run, 64)
