"""The table of fields: sizes, views over a slot, columns in and out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agent_reference as reference
from agent.unroll import UnrollSpec

SPECS = st.builds(
    UnrollSpec,
    unroll_length=st.integers(1, 5),
    frame_shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    frame_dtype=st.sampled_from(["uint8", "float32"]),
    instruction_length=st.integers(0, 3),
    num_actions=st.integers(1, 5),
    core_size=st.integers(1, 5),
)


def random_arrays(spec: UnrollSpec, columns: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    batch = spec.empty(columns)
    for array in batch.values():
        array[...] = rng.integers(0, 2 if array.dtype == bool else 120, size=array.shape)
    return batch


@settings(deadline=None, max_examples=30)
@given(spec=SPECS, seed=st.integers(0, 999), source=st.integers(0, 2), target=st.integers(0, 1))
def test_a_column_out_and_in_is_the_identity(spec: UnrollSpec, seed: int, source: int, target: int) -> None:
    """batch column -> flat slot -> column of another batch: every field, bit for bit, and no other column touched."""
    batch, other = random_arrays(spec, 3, seed), random_arrays(spec, 2, seed + 1)
    untouched = {name: array.copy() for name, array in other.items()}
    slot = spec.views(np.full(spec.unroll_bytes(), 0xFF, np.uint8))
    spec.copy_out(slot, batch, source)
    spec.copy_in(other, target, slot)
    for name, field in spec.fields().items():
        rows = (slice(None),) if field.per_row else ()
        np.testing.assert_array_equal(other[name][(*rows, target)], batch[name][(*rows, source)])
        np.testing.assert_array_equal(other[name][(*rows, 1 - target)], untouched[name][(*rows, 1 - target)])
        assert slot[name].dtype == batch[name].dtype == np.dtype(field.dtype)


@settings(deadline=None, max_examples=30)
@given(spec=SPECS)
def test_views_share_the_buffer_without_overlap(spec: UnrollSpec) -> None:
    buffer = np.zeros(spec.unroll_bytes(), np.uint8)
    views = spec.views(buffer)
    assert list(views) == list(spec.fields())
    for name, field in spec.fields().items():
        assert views[name].shape == spec.array_shape(field)
        assert (views[name].ctypes.data - buffer.ctypes.data) % 64 == 0
        before = int(np.count_nonzero(buffer))
        np.atleast_1d(views[name]).view(np.uint8)[...] = 1
        assert int(np.count_nonzero(buffer)) - before == views[name].nbytes, f"{name} overlaps with another field"


def test_a_wrong_buffer_is_refused_with_both_sizes() -> None:
    spec = reference.unroll_spec(reference.small_spec(), 3)
    with pytest.raises(ValueError, match=rf"needs {spec.unroll_bytes()} bytes, the buffer has 7"):
        spec.views(np.zeros(7, np.uint8))


def test_the_fields_of_the_contract() -> None:
    spec = reference.unroll_spec(reference.small_spec(instruction_length=2), 3)
    rows = {name for name, field in spec.fields().items() if field.per_row}
    assert rows == {
        *("frame", "instruction", "reward", "terminated", "truncated", "first", "last_action", "action", "log_probs", "frames"),
        *("episode_return", "episode_frames", "episode_steps"),
    }
    assert set(spec.fields()) - rows == {"core_state", "task", "version", "acted_at", "actor", "environment"}
    assert "instruction" not in reference.unroll_spec(reference.small_spec(), 3).fields()
