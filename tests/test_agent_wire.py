"""The wire: what is packed comes out the same, and anything else is refused with its kind."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import remote_children as remote
from agent.transport import wire
from agent.transport.inspection import fault_of
from agent.transport.wire import Kind, WireError

INT64 = st.integers(-(2**63), 2**63 - 1)
SIZES = {kind: (0, 100) for kind in Kind}
SPEC = remote.SPEC


@given(st.sampled_from(Kind), INT64, INT64, INT64, st.binary(max_size=100))
def test_messages_come_out_as_they_went_in(kind, session, ring, sequence, payload):
    found = wire.unpack(wire.pack(kind, session, ring, sequence, payload), SIZES)
    assert found[:4] == (kind, session, ring, sequence)
    assert bytes(found.payload) == payload


@given(st.binary(min_size=1, max_size=60), st.data())
def test_one_wrong_bit_is_noticed(payload, data):
    frames = [bytearray(part) for part in wire.pack(Kind.UNROLL, 3, 2, 1, payload)]
    frame = frames[data.draw(st.integers(0, 1))]
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WireError):
        wire.unpack([bytes(part) for part in frames], SIZES)


@pytest.mark.parametrize(
    ("frames", "fault"),
    [
        ([], "frames"),
        ([b"x"], "frames"),
        ([*wire.pack(Kind.PING, 1), b""], "frames"),
        ([b"x" * 44, b""], "header"),
        ([wire.pack(Kind.PING, 1)[0] + b"x", b""], "header"),
        ([b"MTAW\x02" + wire.pack(Kind.PING, 1)[0][5:], b""], "format"),
        (wire.pack(Kind.PONG, 1), "kind"),
        (wire.pack(Kind.UNROLL, 1, payload=b"x" * (SPEC.unroll_bytes() - 1)), "size"),
        (wire.pack(Kind.HELLO, 1, payload=b"x" * 5000), "size"),
        ([wire.pack(Kind.HELLO, 1, payload=b"{}")[0], b"{}x"], "size"),
        ([wire.pack(Kind.HELLO, 1, payload=b"{}")[0], b"[]"], "checksum"),
    ],
)
def test_what_is_wrong_has_a_name(frames, fault):
    with pytest.raises(WireError) as error:
        wire.unpack(frames, wire.to_listener(SPEC))
    assert error.value.fault == fault


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff", b"[" * 4000, b"1" * 4001])
def test_json_that_is_no_object_is_refused(text):
    with pytest.raises(WireError):
        wire.unpack_json(memoryview(text))


@settings(deadline=None)
@given(
    arrays(np.uint32, 50, elements=st.integers(0, 2**32 - 1)),
    arrays(np.uint32, 50, elements=st.integers(0, 2**32 - 1)),
    st.booleans(),
)
def test_parameters_come_out_bit_for_bit(bits, before, is_change):
    """Also NaN and denormals: a delta is one of bits."""
    numbers, base = bits.view(np.float32), before.view(np.float32) if is_change else None
    packed = wire.pack_parameters(numbers, 12, base)
    found, frames = wire.unpack_parameters(memoryview(packed), 50, base)
    np.testing.assert_array_equal(found.view(np.uint32), bits)
    assert frames == 12
    low, high = wire.to_relay(50)[Kind.PARAMETERS]
    assert low <= len(packed) <= high


def test_parameters_of_another_size_are_refused_before_they_are_unpacked():
    packed = wire.pack_parameters(np.zeros(10**6, np.float32), 0, None)
    for content, fault in ((packed, "size"), (packed[:8] + b"noise", "content")):
        with pytest.raises(WireError) as error:
            wire.unpack_parameters(memoryview(content), 50, None)
        assert error.value.fault == fault


def test_small_changes_are_cheaper_than_all():
    rng = np.random.default_rng(0)
    before = (0.05 * rng.standard_normal(100_000)).astype(np.float32)
    after = (before + 1e-5 * rng.standard_normal(100_000)).astype(np.float32)
    whole, change = (len(wire.pack_parameters(after, 0, base)) for base in (None, before))
    assert change < 0.55 * 4e5 < whole < 0.9 * 4e5


def fault(**values) -> str | None:
    """Of an unroll of actor 1 with these values in every place."""
    unroll = SPEC.views(np.zeros(SPEC.unroll_bytes(), np.uint8))
    SPEC.copy_out(unroll, remote.unroll(1, 5), 0)
    for name, value in values.items():
        unroll[name][...] = value
    return fault_of(unroll, SPEC, remote.LEGAL, remote.WORDS, remote.FIRST_REMOTE_ACTOR + 1)


@pytest.mark.parametrize(
    "values",
    [
        {"task": 2}, {"task": -1}, {"actor": 1}, {"action": 3}, {"action": -1}, {"last_action": -2}, {"last_action": 3},
        {"task": 0, "action": 2}, {"instruction": -1}, {"instruction": 1001}, {"frames": -1}, {"episode_frames": -1},
        {"episode_steps": -1}, {"environment": -1}, {"version": -1}, {"reward": np.nan}, {"log_probs": -np.inf},
        {"core_state": np.inf}, {"acted_at": np.nan}, {"episode_return": np.inf}, {"episode_return": -1e300},
        {"acted_at": 1e300}, {"acted_at": -1.0}, {"log_probs": 1.0}, {"frames": 2**31 - 1}, {"reward": 3e38},
        {"core_state": -3e38}, {"episode_frames": 2**60}, {"episode_steps": 2**60},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_could_end_the_run_are_found(values):
    assert fault(**values) is not None


def test_values_at_their_limits_are_taken():
    assert fault() is None
    assert fault(action=2, last_action=-1, instruction=1000, episode_return=np.nan) is None
    assert fault(task=0, action=1, last_action=1) is None
    assert fault(log_probs=1e-6, reward=-1e12, frames=108_000, episode_frames=2**40, acted_at=4e9) is None
    assert fault(log_probs=-1e9, episode_return=-1e15) is None


@pytest.mark.parametrize("name", ["terminated", "truncated", "first"])
def test_a_bool_is_0_or_1(name):
    payload = np.zeros(SPEC.unroll_bytes(), np.uint8)
    views = SPEC.views(payload)
    views["actor"][...] = 7
    assert fault_of(views, SPEC, remote.LEGAL, remote.WORDS, 7) is None
    views[name].view(np.uint8)[1] = 2
    assert fault_of(views, SPEC, remote.LEGAL, remote.WORDS, 7) == f"{name} is neither true nor false"
